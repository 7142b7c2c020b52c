"""What the error for an unknown field advises can be done, by every command that it names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactkv.cli.main import app


@pytest.fixture
def novel(model_dir: Path, tmp_path: Path) -> Path:
    """The model with two fields that nobody knows."""
    directory = tmp_path / "novel"
    shutil.copytree(model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_sequence_length": 16384, "bend": 2}))
    return directory


@pytest.mark.parametrize("command", ["generate", "many", "draft", "chat", "perplexity"])
def test_unknown_fields_may_be_accepted(novel: Path, tmp_path: Path, command: str) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "out.jsonl"
    text.write_text('{"prompt": "ab", "max_tokens": 1}\n')
    words = {
        "generate": ["generate", novel, "ab", "--max-tokens", 2],
        "many": ["generate", novel, "--file", text, "--out", out],
        "draft": ["generate", novel, "ab", "--max-tokens", 2, "--draft", novel],
        "chat": ["chat", novel, "--max-tokens", 2],
        "perplexity": ["perplexity", novel, text],
    }[command]
    arguments = list(map(str, words))
    one = ["--accept-field", "bend"]
    for given in ([], one):
        result = CliRunner().invoke(app, [*arguments, *given], input="hi\n")
        told = f"{result.exception} {result.output}"
        assert result.exit_code != 0 and "max_sequence_length = 16384" in told
        assert ("bend = 2" in told) is (given == [])
    result = CliRunner().invoke(app, [*arguments, *one, "--accept-field", "max_sequence_length"], input="hi\n")
    assert result.exit_code == 0, result.output
