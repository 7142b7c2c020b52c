"""`exactkv quantize`: what it writes is used as any model, and nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import exactkv
from exactkv.cli.main import app
from tests.models.saved import save


def quantize(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain"), hidden_size=64, intermediate_size=96)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_written_loads(plain: Path, tmp_path: Path, bits: int) -> None:
    code, told, _ = quantize(plain, tmp_path / "out", "--bits", bits, "--json")
    assert code == 0
    result = json.loads(told)
    model = exactkv.load(tmp_path / "out", device="cpu")
    assert result["fingerprint"] == model.fingerprint
    assert result["quantization"] == model.quantization and f"int{bits}" in str(model.quantization)
    assert model.nbytes == result["weights_bytes"] < result["weights_bytes_before"]
    assert model.fingerprint == exactkv.load(plain, quantize=f"int{bits}", device="cpu").fingerprint


def test_nothing_is_overwritten_and_nothing_left_behind(plain: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for arguments, said in (
        ((plain, there), "exists already"),
        ((plain, tmp_path / "new", "--bits", 5), 'expected "int8"'),
        ((plain, tmp_path / "new", "--group", 48), "groups of 32"),
        ((tmp_path / "none", tmp_path / "new"), "no file or directory"),
    ):
        code, _, error = quantize(*arguments)
        assert code == 2 and said in error
    assert [p.name for p in tmp_path.iterdir()] == ["there"] and not list(there.iterdir())


def test_models_that_no_group_fits_are_refused(tmp_path: Path) -> None:
    code, _, error = quantize(save(tmp_path / "in", hidden_size=48, intermediate_size=48, head_dim=4), tmp_path / "out")
    assert code == 2 and "none of the weights" in error
    assert not (tmp_path / "out").exists()
