"""docs/adding-a-family.md shows the repository's own code, and what it says is said."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from exactkv.errors import LoadError
from exactkv.models import families

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "adding-a-family.md").read_text()
NAMED = {name: (ROOT / name).read_text() for name in re.findall(r"`((?:src|tests)/[\w/]+\.py)`", PAGE)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_shown_is_the_repositorys():
    (whole,) = blocks("python")
    assert whole == NAMED["src/exactkv/models/families/seed_oss.py"]
    shown = [line for block in re.findall(r"\n\n```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    code = [line for line in shown if not line.startswith(("exactkv ", "make "))]
    assert len(code) == 3
    for line in code:
        assert any(line in map(str.strip, text.splitlines()) for text in NAMED.values()), line


def test_the_answer_for_an_unknown_family(monkeypatch: pytest.MonkeyPatch):
    others = tuple(f for f in families.FAMILIES if f.name != "seed_oss")
    monkeypatch.setattr(families, "FAMILIES", others)
    with pytest.raises(LoadError) as error:
        families.find_family(json.loads(blocks("json")[0]))
    shown = " ".join(blocks("text")[0].split()).removeprefix("exactkv: ")
    assert str(error.value).startswith(shown)


def test_its_commands_run(tmp_path: Path):
    """With the page's config, and one schedule."""
    (tmp_path / "config.json").write_text(blocks("json")[0])
    commands = re.findall(r"^exactkv verify .*$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in dict.fromkeys(commands):
        if "transformers" in command:
            pytest.importorskip("transformers")
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command), "--schedules", "steps"],
            capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
