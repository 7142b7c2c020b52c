"""`exactkv bench`: its options, its errors, and that what it prints is what docs/bench.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exactkv.bench import ceilings
from exactkv.bench.ceilings import Sizes
from exactkv.cli.main import app

DOCS = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
FEW = ("--tokens", 3, "--repeat", 2)


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.SIZES, "cpu", Sizes(1 << 20, 64, 1, 1, 0.0))


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], **options)


def test_a_model_as_json(model_dir: Path, tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    result = run(model_dir, "--contexts", "40,9", "--batch", "2,1", "--prefill", 12, *FEW, "--json", "--plot", plot)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"]["random_weights"] is False and found["model"]["dtype"] == "float32"
    assert [(m["what"], m["context"], m["batch"], m["tokens"]) for m in found["measurements"]] == [
        ("prefill", 12, 1, 12), ("prefill", 12, 2, 24),
        ("decode", 9, 1, 3), ("decode", 9, 2, 6), ("decode", 40, 1, 3), ("decode", 40, 2, 6),
    ]  # fmt: skip
    assert all(len(m["seconds"]) == 2 and not m["synthetic_kv"] for m in found["measurements"])
    assert plot.read_text(encoding="utf-8").startswith("<svg")


def test_a_shape_with_synthetic_contexts() -> None:
    result = run(
        "--shape", "pythia-70m", "--layers", 1, "--contexts", 2000, *FEW, "--synthetic-kv", "--dtype", "float32",
        env={"COLUMNS": "120"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "pythia-70m (random weights), 1 layers, float32" in result.stdout and "--synthetic-kv" in result.stdout
    assert "decode" in result.stdout and "prefill" not in result.stdout.split("tokens/s")[1]


def test_the_docs_name_every_field(model_dir: Path) -> None:
    found = json.loads(run(model_dir, "--contexts", 9, "--prefill", "none", *FEW, "--json").stdout)
    named = set(re.findall(r"`(\w+)`", DOCS.split("## The JSON")[1]))
    fields = set(found)
    for name in ("machine", "model", "settings", "ceilings", "startup"):
        fields |= set(found[name])
    fields |= set(found["measurements"][0])
    assert fields - named - {"schema"} == set() and f'"schema": {found["schema"]}' in DOCS
    assert [m["what"] for m in found["measurements"]] == ["decode"]


def test_the_docs_name_every_option() -> None:
    told = set(re.findall(r"(--[a-z][a-z-]+)", run("--help", env={"COLUMNS": "120"}).stdout)) - {"--help"}
    assert told and told <= set(re.findall(r"(--[a-z][a-z-]+)", DOCS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either MODEL or --shape NAME"),
        (["MODEL", "--shape", "gpt2"], "give either MODEL or --shape NAME"),
        (["MODEL", "--layers", "2"], "--layers goes with --shape"),
        (["--shape", "nothing"], "no shape is called 'nothing'"),
        (["--shape", "gpt2", "--layers", "99"], "gpt2 has 1 to 12 layers, not 99"),
        (["--shape", "deepseek-v3", "--contexts", "512,999999"], "a context of 999999 and 64 tokens after it"),
        (["--shape", "gpt2", "--prefill", "2000"], "a prompt of 2000 tokens; this model takes at most 1024"),
        (["MODEL", "--contexts", "5000"], "this model takes at most 2048"),
        (["MODEL", "--contexts", "12,x"], "--contexts is '12,x'; expected whole numbers"),
        (["MODEL", "--batch", "0"], "--batch is '0'; expected whole numbers"),
        (["MODEL", "--prefill", ""], "--prefill is ''; expected whole numbers"),
        (["MODEL", "--plot", "a.png"], "expected a name that ends in .svg"),
        (["MODEL", "--plot", "/nowhere/a.svg"], "there is no directory '/nowhere'"),
        (["MODEL", "--dtype", "int3"], "dtype is 'int3'"),
        (["MODEL", "--device", "nothing"], "device is 'nothing'"),
        (["/no/model"], "there is no file or directory '/no/model'"),
    ],
)
def test_errors_are_a_message(arguments: list[str], said: str, model_dir: Path) -> None:
    result = run(*(str(model_dir) if a == "MODEL" else a for a in arguments))
    assert result.exit_code == 2 and result.stdout == ""
    assert said in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split()) and "Traceback" not in result.output
