"""What quantized directories say beside the weights: fields of their config, dtypes of scales, scales of caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exactkv
from tests.models.oracle import BOUND, Case, build, difference, tokens
from tests.models.saved import change_config, change_tensors, refusal, save
from tests.models.test_formats import FORMATS, Written, compressed, fp8_blocks, fp8_rows, gptq

FP8 = {"quant_method": "fp8", "weight_block_size": [10, 12]}
HADAMARD = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["re:.*q_proj$"]}]}}}


def quantized(directory: Path, write: Callable[[int, int, int], Written], fields: dict[str, Any]) -> Path:
    def quantize(tensors: dict[str, Tensor]) -> None:
        for seed, name in enumerate([n for n in tensors if n.endswith("_proj.weight")]):
            stored, _ = write(*tensors.pop(name).shape, seed)
            tensors.update({name.removesuffix("weight") + part: t for part, t in stored.items()})

    change_tensors(directory, quantize)
    return change_config(directory, quantization_config=fields)


@pytest.mark.parametrize("name", ["awq", "gptq", "pack-quantized", "int-quantized", "fp8-blocks"])
def test_every_field_is_accounted_for(model_dir: Path, name: str) -> None:
    write, fields = FORMATS[name]
    quantized(model_dir, write, {**fields, "rotation": "hadamard"})
    message = refusal(model_dir)
    assert "unknown fields that may change the arithmetic: rotation = 'hadamard'" in message
    exactkv.load(model_dir, device="cpu", accept_fields=["rotation"])
    exactkv.load(change_config(model_dir, quantization_config={**fields, "rotation": None}), device="cpu")


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("pack-quantized", {"transform_config": HADAMARD}, "transform_config = {'config_groups': "),
        ("pack-quantized", {"sparsity_config": {"bend": 1}}, "arithmetic: bend = 1"),
        ("pack-quantized", {"config_groups": {"a": {"bend": 1}}}, "arithmetic: bend = 1"),
        ("pack-quantized", {"config_groups": {"a": {"weights": {"bend": 1}}}}, "arithmetic: bend = 1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic = {'+:.*down.*'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype = 'int16' is not supported"),
        ("awq", {"format": "gemv"}, "format = 'gemv' is not supported"),
        ("fp8-blocks", {"scale_fmt": "ue4"}, "scale_fmt = 'ue4' is not supported"),
        ("fp8-blocks", {"fmt": "e3m4"}, "fmt = 'e3m4' is not supported"),
    ],
)
def test_values_that_change_what_weights_mean_are_refused(
    model_dir: Path, name: str, fields: dict[str, Any], expected: str
) -> None:
    write, known = FORMATS[name]
    assert expected in refusal(quantized(model_dir, write, {**known, **fields}))


def test_what_writers_add_is_read(model_dir: Path) -> None:
    added = {"damp_percent": 0.1, "true_sequential": True, "static_groups": False, "meta": {"quantizer": ["x"]},
             "dynamic": {"-:.*head.*": {}}, "pack_dtype": "int32", "lm_head": False}  # fmt: skip
    exactkv.load(quantized(model_dir, gptq(4, 1, True), {**FORMATS["gptq"][1], **added}), device="cpu")


def test_gptqs_second_format_by_either_name(model_dir: Path) -> None:
    quantized(model_dir, gptq(2, 0, True), {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"})
    first = exactkv.load(model_dir, device="cpu").fingerprint
    change_config(model_dir, quantization_config={"quant_method": "gptq", "bits": 2, "format": "gptq_v2"})
    assert exactkv.load(model_dir, device="cpu").fingerprint == first


# scales


def powers(dtype: torch.dtype) -> Callable[[int, int, int], Written]:
    """Scales that are powers of two, stored as ``dtype``."""

    def write(rows: int, columns: int, seed: int) -> Written:
        stored, _ = fp8_blocks(rows, columns, seed)
        generator = torch.Generator().manual_seed(seed)
        exponents = torch.randint(-8, 3, stored["weight_scale_inv"].shape, generator=generator)
        scale = torch.ldexp(torch.ones(exponents.shape), exponents)
        bytes_ = (exponents + 127).to(torch.uint8)
        kept = scale if dtype.is_floating_point and dtype.itemsize > 1 else bytes_ if dtype == torch.uint8 else None
        return {**stored, "weight_scale_inv": bytes_.view(dtype) if kept is None else kept.to(dtype)}, scale

    return write


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    fields = {**FP8, "scale_fmt": "ue8m0"}
    prints = [
        exactkv.load(
            quantized(save(tmp_path / str(i)), powers(kind), fields), dtype="float32", device="cpu"
        ).fingerprint
        for i, kind in enumerate((torch.float32, dtype))
    ]
    assert prints[0] == prints[1]


def test_scales_that_nothing_explains_are_refused(model_dir: Path) -> None:
    message = refusal(quantized(model_dir, powers(torch.uint8), FP8))
    assert "scales are torch.uint8, expected floats, or bytes where scale_fmt is 'ue8m0'" in message

    def no_number(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight_scale_inv"].view(-1)[0] = 255

    change_config(model_dir, quantization_config={**FP8, "scale_fmt": "ue8m0"})
    assert "a scale is 255, which means 'not a number'" in refusal(change_tensors(model_dir, no_number))


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-no-order", "pack-quantized", "int-quantized",
                                  "naive-quantized-zeros", "float-quantized", "fp8-rows"])  # fmt: skip
def test_scales_that_are_integers_are_refused(model_dir: Path, name: str) -> None:
    write, fields = FORMATS[name]

    def with_integers(rows: int, columns: int, seed: int) -> Written:
        stored, weight = write(rows, columns, seed)
        return {n: t.to(torch.int32) if "scale" in n else t for n, t in stored.items()}, weight

    assert "scales are torch.int32, expected floats" in refusal(quantized(model_dir, with_integers, fields))


@pytest.mark.parametrize("fields", [{"quant_method": "fp8"}, compressed(8)], ids=["fp8", "compressed"])
def test_scales_of_a_quantized_cache_are_set_aside(model_dir: Path, fields: dict[str, Any]) -> None:
    plain = exactkv.load(quantized(model_dir, fp8_rows, fields), device="cpu").fingerprint

    def add(tensors: dict[str, Tensor]) -> None:
        for part in ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"):
            tensors[f"model.layers.1.self_attn.{part}"] = torch.tensor(0.02)

    assert exactkv.load(change_tensors(model_dir, add), device="cpu").fingerprint == plain


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    """One by one they were read already; stacked, they mean the same."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    build(Case("x", "Qwen3Moe", fields)).save_pretrained(tmp_path)
    quantized(tmp_path, fp8_blocks, FP8)
    apart = exactkv.load(tmp_path, dtype="float32", device="cpu")

    def stack(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            stem = f"model.layers.{layer}.mlp.experts"
            for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for ours, theirs in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
                    each = [[tensors.pop(f"{stem}.{e}.{part}.{theirs}") for part in parts] for e in range(4)]
                    raw = [torch.cat([t.view(torch.uint8) for t in expert]).view(expert[0].dtype) for expert in each]
                    tensors[f"{stem}.{name}{ours}"] = torch.stack([t.view(torch.uint8) for t in raw]).view(raw[0].dtype)

    stacked = exactkv.load(change_tensors(tmp_path, stack), dtype="float32", device="cpu")
    assert stacked.fingerprint == apart.fingerprint
    other = apart(tokens(1, 5))
    assert other is not None and difference(stacked(tokens(1, 5)), other) <= BOUND


# heads that are the embedding


def test_a_quantized_head_beside_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    save(tmp_path, vocab_size=96, tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"lm_head.{part}": t for part, t in gptq(4, 1, True)(96, 32, 3)[0].items()})

    change_config(change_tensors(tmp_path, add), quantization_config=FORMATS["gptq"][1])
    assert "hold a lm_head.weight with other values" in refusal(tmp_path)
    assert exactkv.load(change_config(tmp_path, tie_word_embeddings=False), device="cpu").spec.tied_head is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_of_the_same_values_in_a_wider_dtype_is_the_embedding(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactkv.models.source._PIECE", 1000)
    save(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].to(dtype)}))
    exactkv.load(tmp_path, device="cpu")
    change_tensors(tmp_path, lambda t: t["lm_head.weight"][-1, -1].add_(1e-6))
    assert "hold a lm_head.weight with other values" in refusal(tmp_path)
