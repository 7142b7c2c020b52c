"""Packed weights in models: decoding is one pass; directories of packed weights are the models they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import exactkv
from exactkv import InputError, LoadError
from exactkv.models.decode import DecodePath
from exactkv.models.model import Model
from exactkv.models.packing import packing, weight_format
from exactkv.ops import REFERENCE
from exactkv.ops.packed import Packed, dense
from tests.models.oracle import Case, build, tokens
from tests.models.saved import change_config, change_tensors, save

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
FAMILIES = {
    "llama": Case("llama", "Llama", SIZES),
    "llama-tied": Case("llama-tied", "Llama", {**SIZES, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": Case(
        "gemma3", "Gemma3", {**SIZES, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    ),
    "mixtral": Case("mixtral", "Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3": Case("qwen3", "Qwen3", SIZES),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build(FAMILIES[name]).save_pretrained(made[name])
        return made[name]

    return find


def unpacked(model: Model, ops: Any = None) -> Model:
    """The same weights, none packed."""
    weights = {name: dense(w) for name, w in model.decoder.weights.items()}
    return Model(model.spec, weights, ops=ops or model.decoder.ops)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_one_pass_and_that_of_the_dequantized_weights(saved: Any, family: str, quantize: str) -> None:
    ids = tokens(2, 21)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 0.06)):
        model = exactkv.load(saved(family), quantize=quantize, dtype=dtype, device="cpu")
        held = {n for n, w in model.decoder.weights.items() if isinstance(w, Packed)}
        assert held == set(packing(model.spec, weight_format(quantize))) and len(held) > 4
        whole = model(ids)
        cache = model.new_cache(batch_size=2)
        pieces = [model(ids[:, :9], cache=cache)] + [model(ids[:, i : i + 1], cache=cache) for i in range(9, 21)]
        largest = whole.abs().max()
        if family != "mixtral" or dtype != torch.bfloat16:  # there rounding chooses other experts
            assert (torch.cat(pieces, dim=1) - whole).abs().max() <= bound * largest
            assert (unpacked(model)(ids) - whole).abs().max() <= bound * largest
        if dtype == torch.float64:
            assert (unpacked(model, REFERENCE)(ids) - whole).abs().max() <= 1e-12 * largest


def test_verify_passes_with_packed_weights(saved: Any) -> None:
    from exactkv.verify import assert_exact
    from exactkv.verify.targets.exactkv import ExactKVTarget

    model = exactkv.load(saved("gemma3"), quantize="int4", dtype="float32", device="cpu")
    assert_exact(ExactKVTarget(model), schedules=["steps", "batch"])


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
@pytest.mark.parametrize("quantize", ["int8:32", "int4:64"])
def test_a_written_directory_is_the_packed_model(saved: Any, tmp_path: Path, family: str, quantize: str) -> None:
    from exactkv.models.load import load_with_source
    from exactkv.models.packed_files import write

    plain = exactkv.load(saved(family), device="cpu")
    made, source = load_with_source(saved(family), quantize=quantize, device="cpu")
    write(made, source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    again = exactkv.load(tmp_path / "out", device="cpu")
    assert again.fingerprint == made.fingerprint != plain.fingerprint
    assert again.quantization == made.quantization and made.quantization.startswith(quantize[:4])
    assert torch.equal(again(tokens(1, 9)), made(tokens(1, 9)))
    assert exactkv.load(tmp_path / "out", dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    with pytest.raises(InputError, match="already"):
        exactkv.load(tmp_path / "out", quantize="int4", device="cpu")
    with pytest.raises(InputError, match="exists already"):
        write(made, source, tmp_path / "out")
    with pytest.raises(InputError, match="another model"):
        again(tokens(1, 3), cache=plain.new_cache())


def written(tmp_path: Path) -> Path:
    from exactkv.models.load import load_with_source
    from exactkv.models.packed_files import write

    save(tmp_path / "in", **SIZES)
    write(*load_with_source(tmp_path / "in", quantize="int4", device="cpu"), tmp_path / "out")
    return tmp_path / "out"


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    out = written(tmp_path)
    config = json.loads((out / "config.json").read_text())
    name = "layers.0.mlp.down.weight"

    def refused(match: str) -> None:
        with pytest.raises(LoadError, match=match):
            exactkv.load(out, device="cpu")

    for change, match in (
        ({"version": 2}, "version 2"),
        ({"tensors": None}, "no list"),
        ({"tensors": {**config["quantization_config"]["tensors"], "x": {"bits": 4, "shape": [1, 1]}}}, "x.numbers"),
        ({"tensors": {**config["quantization_config"]["tensors"], name: {"bits": 8, "shape": [64, 96]}}}, "expected"),
    ):
        change_config(out, quantization_config={**config["quantization_config"], **change})
        refused(match)
    change_config(out, quantization_config=config["quantization_config"])
    exactkv.load(out, device="cpu")
    change_tensors(out, lambda t: t.pop(f"{name}.scales"))
    refused("1 packed tensors are missing")


def test_formats_that_are_none_are_refused(saved: Any) -> None:
    for given in ("int5", "int4:48", "int4:", "", 4, "INT4"):
        with pytest.raises(InputError, match="expected"):
            exactkv.load(saved("llama"), quantize=given, device="cpu")  # type: ignore[arg-type]


def test_captured_steps_are_declined(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exactkv.load(saved("llama"), quantize="int8", device="cpu")
    monkeypatch.setattr(model.decoder, "device", torch.device("cuda"))
    assert "packed weights" in str(DecodePath(model.decoder).unsupported)
