from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import exactkv
from exactkv.cli.main import app
from exactkv.models import embedded
from tests.cli.conftest import SOURCE, Start


def test_help_is_quick(start: Start) -> None:
    """Processor time of the whole process, the best of three runs, as machines are busy."""
    seconds = []
    for _ in range(3):
        process = start("--help")
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0 and "generate" in out and "models" in out
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) < 0.3


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "rich", "numpy", "tokenizers", "jinja2", "huggingface_hub", "transformers"}
    code = f"import sys, exactkv.cli.main; print(sorted({heavy} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_generates_help_tells_the_rule(option: str) -> None:
    result = CliRunner().invoke(app, ["generate", option])
    assert result.exit_code == 0
    assert "[OPTIONS] [MODEL] PROMPT" in result.stdout
    assert "a single argument is the" in " ".join(result.stdout.split())


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"exactkv {exactkv.__version__}\n"


def test_models_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        embedded, "hub_models", lambda: [embedded.HubModel("org/model", "XForCausalLM", 3_000_000, False)]
    )
    result = CliRunner().invoke(app, ["models"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in (*embedded.MODELS, "org/model", "XForCausalLM", "3.0 MB", "Llama4ForCausalLM", "gemma3"):
        assert name in result.stdout


def test_models_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_package_directory", lambda model: None)
    monkeypatch.setattr(embedded, "hub_models", lambda: [embedded.HubModel("org/model", "XForCausalLM", 7, False)])
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert [m["name"] for m in found["embedded"]] == list(embedded.MODELS)
    assert not any(m["installed"] for m in found["embedded"])
    assert all(m["install"].startswith("pip install") for m in found["embedded"])
    assert found["hub"] == [{"repo": "org/model", "architecture": "XForCausalLM", "bytes": 7, "supported": False}]
    families = {f["family"]: f for f in found["supported"]}
    assert families["llama"]["gguf"] == ["llama"] and families["olmo"]["gguf"] == ["olmo2", "olmoe"]
    assert "Gemma3ForCausalLM" in families["gemma3"]["architectures"]
