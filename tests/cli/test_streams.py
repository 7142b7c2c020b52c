"""Standard streams as a shell may leave them, and prompts as people mistype them: one line, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")


def shell(command: str, model: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which EXACTKV and MODEL stand for what they name."""
    line = command.replace("EXACTKV", f"{sys.executable} -m exactkv").replace("MODEL", str(model))
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": SOURCE, **environment}
    )


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("EXACTKV generate MODEL hi --max-tokens 3 >&-", 2, "standard output is closed"),
        ("EXACTKV generate MODEL hi --max-tokens 3 --json >&-", 2, "standard output is closed"),
        ("EXACTKV models >&-", 2, "standard output is closed"),
        ("EXACTKV generate MODEL hi --max-tokens 3 2>&-", 0, ""),
        ("EXACTKV generate MODEL - <&-", 2, "the prompt is empty"),
        ("EXACTKV generate MODEL - </dev/null", 2, "the prompt is empty"),
        ("EXACTKV generate MODEL ''", 2, "the prompt is empty"),
        ("EXACTKV generate MODEL hi --max-tokens 3 >/dev/full", 2, "No space left"),
        ("EXACTKV models >/dev/full", 2, "No space left"),
        (
            "printf 'a\\xff' | EXACTKV generate MODEL -",
            2,
            "standard input is not valid UTF-8: invalid start byte at byte 1",
        ),
        ("EXACTKV generate MODEL $'a\\xff'", 2, "the prompt is not valid UTF-8: invalid start byte at byte 1"),
        ("EXACTKV generate org/name", 2, "there is no prompt"),
    ],
)
def test_streams_and_prompts(model_dir: Path, command: str, code: int, said: str) -> None:
    done = shell(command, model_dir)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_a_prompt_in_utf8_is_read_as_such_in_any_locale(model_dir: Path) -> None:
    command = "EXACTKV generate MODEL 'Schöne 你' --max-tokens 3 --json"
    here, there = shell(command, model_dir), shell(command, model_dir, LC_ALL="C", PYTHONUTF8="0")
    assert here.returncode == there.returncode == 0, there.stderr
    results = [json.loads(done.stdout) for done in (here, there)]
    for result in results:
        assert result.pop("timings")
    assert results[0] == results[1] and len(results[0]["tokens"]) == 3
