"""Quantized weights: written here by plain loops, number by number, and read as what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exactkv
from tests.models.oracle import Case, build, tokens
from tests.models.saved import change_config, change_tensors, refusal

GROUP = 16
Written = tuple[dict[str, Tensor], Tensor]
"""What is stored in place of "weight", by the rest of the name, and the weight that it stands for."""


def packed(numbers: list[list[int]], bits: int, order: list[int], axis: int) -> Tensor:
    """Rows of unsigned numbers as words along ``axis``; number ``order[i]`` of each word's is at place i."""
    count = 32 // bits
    if axis == 0:
        return packed([list(row) for row in zip(*numbers, strict=True)], bits, order, 1).t().contiguous()
    words = [
        [sum(row[w + order[i]] << (bits * i) for i in range(count)) for w in range(0, len(row), count)]
        for row in numbers
    ]
    return torch.tensor(words, dtype=torch.int64).where(torch.tensor(words) < 2**31, torch.tensor(words) - 2**32).int()


def draws(rows: int, columns: int, high: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (rows, columns), generator=generator).tolist()


def scales(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, columns, generator=generator) * 0.02 + 0.01).to(dtype)


def awq(rows: int, columns: int, seed: int) -> Written:
    numbers, zeros = draws(columns, rows, 16, seed), draws(columns // GROUP, rows, 16, seed + 1)
    scale = scales(columns // GROUP, rows, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    weight = torch.empty(rows, columns)
    for o in range(rows):
        for i in range(columns):
            weight[o, i] = (numbers[i][o] - zeros[i // GROUP][o]) * float(scale[i // GROUP, o])
    return {"qweight": packed(numbers, 4, order, 1), "qzeros": packed(zeros, 4, order, 1), "scales": scale}, weight


def awq_centred(rows: int, columns: int, seed: int) -> Written:
    """Without zeros, as numbers count from the middle."""
    stored, _ = awq(rows, columns, seed)
    numbers, scale = draws(columns, rows, 16, seed), stored["scales"].float().repeat_interleave(GROUP, 0)
    weight = ((torch.tensor(numbers) - 8) * scale).t()
    return {part: stored[part] for part in ("qweight", "scales")}, weight


def gptq_borrowing(rows: int, columns: int, seed: int) -> Written:
    """Zeros from 0 on, 1 subtracted from each by one subtraction from its word."""
    numbers, zeros = draws(columns, rows, 16, seed), draws(columns // GROUP, rows, 16, seed + 1)
    zeros[0][:4] = [0, 0, 8, 15]
    scale, order = scales(columns // GROUP, rows, seed), list(range(8))
    weight = (
        torch.tensor(numbers) - torch.tensor(zeros).repeat_interleave(GROUP, 0)
    ) * scale.float().repeat_interleave(GROUP, 0)
    stored = {
        "qweight": packed(numbers, 4, order, 0),
        "qzeros": packed(zeros, 4, order, 1) - 0x11111111,
        "scales": scale,
    }
    return stored, weight.t()


def gptq(bits: int, shift: int, with_order: bool) -> Callable[[int, int, int], Written]:
    def write(rows: int, columns: int, seed: int) -> Written:
        numbers, zeros = draws(columns, rows, 2**bits, seed), draws(columns // GROUP, rows, 2**bits - 1, seed + 1)
        scale, order = scales(columns // GROUP, rows, seed), list(range(32 // bits))
        groups = [(i * 7 % columns) // GROUP if with_order else i // GROUP for i in range(columns)]
        weight = torch.empty(rows, columns)
        for o in range(rows):
            for i in range(columns):
                weight[o, i] = (numbers[i][o] - (zeros[groups[i]][o] + shift)) * float(scale[groups[i], o])
        stored = {"qweight": packed(numbers, bits, order, 0), "qzeros": packed(zeros, bits, order, 1), "scales": scale}
        return stored | ({"g_idx": torch.tensor(groups).int()} if with_order else {}), weight

    return write


def pack_quantized(symmetric: bool) -> Callable[[int, int, int], Written]:
    def write(rows: int, columns: int, seed: int) -> Written:
        numbers, zeros = draws(rows, columns, 16, seed), draws(rows, columns // GROUP, 16, seed + 1)
        scale, order = scales(rows, columns // GROUP, seed, torch.bfloat16), list(range(8))
        weight = torch.empty(rows, columns)
        for o in range(rows):
            for i in range(columns):
                zero = 8 if symmetric else zeros[o][i // GROUP]
                weight[o, i] = (numbers[o][i] - zero) * float(scale[o, i // GROUP])
        stored = {
            "weight_packed": packed(numbers, 4, order, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return stored | ({} if symmetric else {"weight_zero_point": packed(zeros, 4, order, 0)}), weight

    return write


def int8(rows: int, columns: int, seed: int) -> Written:
    numbers, scale = torch.tensor(draws(rows, columns, 255, seed)) - 127, scales(rows, 1, seed, torch.float32)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def int8_with_zeros(rows: int, columns: int, seed: int) -> Written:
    stored, _ = int8(rows, columns, seed)
    zero = torch.tensor(draws(rows, 1, 11, seed)) - 5
    weight = (stored["weight"].float() - zero) * stored["weight_scale"]
    return stored | {"weight_zero_point": zero.to(torch.int8)}, weight


def fp8_rows(rows: int, columns: int, seed: int) -> Written:
    values, scale = torch.tensor(draws(rows, columns, 255, seed)) - 127.0, scales(rows, 1, seed, torch.bfloat16)
    stored = values.to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def fp8_blocks(rows: int, columns: int, seed: int) -> Written:
    """Blocks of 10 by 12, which the sizes are no multiples of."""
    stored = (torch.tensor(draws(rows, columns, 255, seed)) - 127.0).to(torch.float8_e4m3fn)
    scale = scales(-(-rows // 10), -(-columns // 12), seed, torch.float32)
    weight = torch.empty(rows, columns)
    for o in range(rows):
        for i in range(columns):
            weight[o, i] = float(stored[o, i]) * float(scale[o // 10, i // 12])
    return {"weight": stored, "weight_scale_inv": scale}, weight


def fp8_structured(rows: int, columns: int, seed: int) -> Written:
    stored, weight = fp8_blocks(rows, columns, seed)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, weight


def gptq_uneven(rows: int, columns: int, seed: int) -> Written:
    """Without "g_idx", groups of 20 inputs, of which the last is cut off."""
    numbers, groups = draws(columns, rows, 16, seed), -(-columns // 20)
    zeros, scale, order = draws(groups, rows, 15, seed + 1), scales(groups, rows, seed), list(range(8))
    weight = torch.empty(rows, columns)
    for o in range(rows):
        for i in range(columns):
            weight[o, i] = (numbers[i][o] - (zeros[i // 20][o] + 1)) * float(scale[i // 20, o])
    return {"qweight": packed(numbers, 4, order, 0), "qzeros": packed(zeros, 4, order, 1), "scales": scale}, weight


def compressed(bits: int, strategy: str = "channel", **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": strategy, **fields}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


FORMATS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq(4, 1, True), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq-centred": (awq_centred, {"quant_method": "AWQ", "bits": 4, "group_size": GROUP, "zero_point": False}),
    "gptq-borrowing": (gptq_borrowing, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}),
    "gptq-no-order": (gptq(4, 1, False), {"quant_method": "gptq", "bits": 4}),
    "gptq-8": (gptq(8, 1, True), {"quant_method": "gptq", "bits": 8}),
    "gptq-2-v2": (gptq(2, 0, True), {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"}),
    "pack-quantized": (pack_quantized(True), compressed(4, "group", group_size=GROUP)),
    "pack-quantized-zeros": (pack_quantized(False), compressed(4, "group", group_size=GROUP)),
    "int-quantized": (int8, compressed(8)),
    "naive-quantized-zeros": (int8_with_zeros, compressed(8)),
    "float-quantized": (fp8_rows, compressed(8)),
    "float-quantized-blocks": (fp8_structured, compressed(8, "block", block_structure=[10, 12])),
    "gptq-uneven": (gptq_uneven, {"quant_method": "gptq", "bits": 4, "group_size": 20}),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [10, 12]}),
    "fp8-rows": (fp8_rows, {"quant_method": "fp8"}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_are_read_as_what_they_stand_for(model_dir: Path, name: str, dtype: str) -> None:
    write, fields = FORMATS[name]
    plain = {}

    def quantize(tensors: dict[str, Tensor]) -> None:
        linear = [n for n in tensors if n.endswith("_proj.weight")]
        for seed, weight in enumerate(linear):
            stored, plain[weight] = write(*tensors.pop(weight).shape, 3 * seed)
            stem = weight.removesuffix("weight")
            tensors.update({stem + part: t for part, t in stored.items()})

    change_tensors(model_dir, quantize)
    model = exactkv.load(change_config(model_dir, quantization_config=fields), dtype=dtype, device="cpu")
    layer = "model.layers.1.self_attn"
    stacked = torch.cat([plain[f"{layer}.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(model.decoder.weights["layers.1.attention.qkv.weight"], stacked.to(model.dtype))
    down = plain["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(model.decoder.weights["layers.0.mlp.down.weight"], down.to(model.dtype))
    out = model(tokens(1, 5))
    assert out is not None and out.isfinite().all()


def test_auto_dtype_of_quantized_weights_is_that_of_the_others(model_dir: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            stored, _ = int8(*tensors.pop(name).shape, 0)
            tensors.update({name.removesuffix("weight") + part: t for part, t in stored.items()})
        tensors.update({n: t.to(torch.bfloat16) for n, t in tensors.items() if t.dtype == torch.float32})

    change_tensors(model_dir, quantize)
    change_config(model_dir, quantization_config=compressed(8), dtype=None, torch_dtype=None)
    assert exactkv.load(model_dir).dtype == torch.bfloat16


def _first(kind: str) -> str:
    return f"model.layers.0.mlp.experts.gate_up_proj_{kind}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(_first("scales")), f"need are missing: {_first('scales')}"),
        (lambda t: t.update({_first("scales"): t[_first("scales")][:, :, :1].contiguous()}), "expected [2, 64, 2]"),
        (lambda t: t[_first("scales")].view(-1)[5:6].fill_(255), "a scale is 255, which means 'not a number'"),
        (lambda t: t.update({_first("blocks"): t[_first("blocks")][..., :8].contiguous()}), "rows, groups, 16]"),
        (lambda t: t.update({_first("blocks"): t[_first("blocks")][0].clone()}), "[experts, rows, groups, 16]"),
        (lambda t: t.update({_first("blocks"): t[_first("blocks")].int()}), "torch.int32 and scales torch.uint8"),
        (lambda t: t.update({_first("scales"): t[_first("scales")].float()}), "scales torch.float32, expected"),
    ],
)  # fmt: skip
def test_mxfp4_that_does_not_fit_is_refused(tmp_path: Path, change: Any, expected: str) -> None:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32, "hidden_size": 64}
    build(Case("gpt-oss", "GptOss", sizes)).save_pretrained(tmp_path)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj") and ".experts." in n]:
            experts, columns, rows = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)

    change_tensors(tmp_path, quantize)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    exactkv.load(tmp_path, dtype="float32", device="cpu")
    assert expected in refusal(change_tensors(tmp_path, change))


def test_mxfp4_experts(tmp_path: Path) -> None:
    """Blocks of 32 numbers of four bits, and a power of two each; gate and up alternate."""
    fields = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32}
    build(Case("gpt-oss", "GptOss", fields)).save_pretrained(tmp_path)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    plain = {}

    def quantize(tensors: dict[str, Tensor]) -> None:
        for seed, name in enumerate([n for n in tensors if n.endswith("_proj") and ".experts." in n]):
            experts, columns, rows = tensors.pop(name).shape
            codes = torch.tensor(draws(experts * rows, columns, 16, seed)).view(experts, rows, columns)
            powers = torch.tensor(draws(experts * rows, columns // 32, 9, seed)).view(experts, rows, -1) + 121
            weight = torch.empty(experts, columns, rows)
            for e in range(experts):
                for r in range(rows):
                    for c in range(columns):
                        weight[e, c, r] = values[codes[e, r, c]] * 2.0 ** (int(powers[e, r, c // 32]) - 127)
            pairs = codes.view(experts, rows, -1, 16, 2)
            tensors[f"{name}_blocks"] = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
            tensors[f"{name}_scales"] = powers.to(torch.uint8)
            plain[name] = weight

    change_tensors(tmp_path, quantize)
    model = exactkv.load(change_config(tmp_path, quantization_config={"quant_method": "mxfp4"}), dtype="float32")
    gate_up = plain["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2)
    ours = model.decoder.weights["layers.1.mlp.experts.gate_up.weight"]
    assert torch.equal(ours, torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1))
    down = plain["model.layers.0.mlp.experts.down_proj"].transpose(1, 2)
    assert torch.equal(model.decoder.weights["layers.0.mlp.experts.down.weight"], down)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quant_method": "aqlm"}, "quantized (aqlm), which is not supported; supported: fp8"),
        ({"quant_method": "awq", "version": "gemv"}, "supported is gemm"),
        ({"quant_method": "gptq", "bits": 3}, "with 3 bits"),
        (
            {**compressed(4), "format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized', which is not supported; supported",
        ),
        ({**compressed(4), "format": "mxfp4-pack-quantized"}, "supported are pack-quantized, int-quantized"),
        ({**compressed(8), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
    ],
)
def test_other_formats_are_refused(model_dir: Path, fields: dict[str, Any], expected: str) -> None:
    assert expected in refusal(change_config(model_dir, quantization_config=fields))


CUT = {
    "scale of fewer rows": ("pack-quantized", "weight_scale", lambda t: t[:-1]),
    "scale of fewer groups": ("pack-quantized", "weight_scale", lambda t: t[:, :-1]),
    "zeros of fewer groups": ("pack-quantized-zeros", "weight_zero_point", lambda t: t[:, :-1]),
    "group below 0": ("gptq", "g_idx", lambda t: t - 1),
    "group too high": ("gptq", "g_idx", lambda t: t + 1),
    "groups of fewer inputs": ("gptq", "g_idx", lambda t: t[:-1]),
    "scales of fewer groups": ("gptq", "scales", lambda t: t[:-1]),
    "zeros of fewer outputs": ("gptq", "qzeros", lambda t: t[:, :-1]),
    "scales of one axis": ("awq", "scales", lambda t: t[0]),
    "words of one axis": ("pack-quantized", "weight_packed", lambda t: t[0]),
    "words that are floats": ("pack-quantized", "weight_packed", lambda t: t.float()),
    "blocks of another size": ("float-quantized-blocks", "weight_scale", lambda t: t[:, :-1]),
    "inverse scales of another size": ("fp8-blocks", "weight_scale_inv", lambda t: t[:-1]),
}


@pytest.mark.parametrize("name", CUT)
def test_parts_that_do_not_fit_are_refused(model_dir: Path, name: str) -> None:
    """Scales of another shape than the config says: never a guess at what they are for, and no traceback."""
    written, part, change = CUT[name]
    write, fields = FORMATS[written]

    def quantize(tensors: dict[str, Tensor]) -> None:
        weight = "model.layers.0.mlp.down_proj.weight"
        for n in [n for n in tensors if n.endswith("_proj.weight")]:
            stored, _ = write(*tensors.pop(n).shape, 0)
            if n == weight:
                stored[part] = change(stored[part]).contiguous()
            tensors.update({n.removesuffix("weight") + p: t for p, t in stored.items()})

    change_tensors(model_dir, quantize)
    assert "model.layers.0.mlp.down_proj" in refusal(change_config(model_dir, quantization_config=fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "compressed-tensors", "config_groups": ["x"]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": "x"}}},
        compressed(8, "tensor_group"),
        compressed(8, "group", group_size=0),
        compressed(8, "block", block_structure="x"),
        {"quant_method": "fp8", "weight_block_size": "x"},
        {"quant_method": "fp8", "weight_block_size": [0, 0]},
        {"quant_method": "gptq", "bits": "x"},
    ],
    ids=str,
)
def test_configs_that_make_no_sense_are_refused(model_dir: Path, fields: dict[str, Any]) -> None:
    write = FORMATS["gptq" if fields["quant_method"] == "gptq" else "float-quantized"][0]

    def quantize(tensors: dict[str, Tensor]) -> None:
        for n in [n for n in tensors if n.endswith("_proj.weight")]:
            stored, _ = write(*tensors.pop(n).shape, 0)
            tensors.update({n.removesuffix("weight") + p: t for p, t in stored.items()})

    change_tensors(model_dir, quantize)
    assert "quantiz" in refusal(change_config(model_dir, quantization_config=fields))


def test_a_missing_part_is_named(model_dir: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.down_proj"
        tensors[f"{name}.qweight"] = torch.zeros(6, 32, dtype=torch.int32)
        tensors[f"{name}.scales"] = torch.zeros(3, 32)
        del tensors[f"{name}.weight"]

    change_tensors(model_dir, quantize)
    message = refusal(change_config(model_dir, quantization_config={"quant_method": "gptq", "bits": 4}))
    assert "1 tensors that the quantized weights need are missing: model.layers.0.mlp.down_proj.qzeros" in message


@pytest.mark.parametrize("name", ["pack-quantized", "int-quantized", "float-quantized", "fp8-blocks", "awq"])
def test_a_missing_scale_is_named(model_dir: Path, name: str) -> None:
    write, fields = FORMATS[name]
    stem = "model.layers.0.mlp.down_proj"

    def quantize(tensors: dict[str, Tensor]) -> None:
        for n in [n for n in tensors if n.endswith("_proj.weight")]:
            stored, _ = write(*tensors.pop(n).shape, 0)
            scale = next(part for part in stored if "scale" in part)
            kept = {part: t for part, t in stored.items() if not n.startswith(stem) or part != scale}
            tensors.update({n.removesuffix("weight") + part: t for part, t in kept.items()})

    change_tensors(model_dir, quantize)
    message = refusal(change_config(model_dir, quantization_config=fields))
    assert f"{stem}.{'scales' if name == 'awq' else 'weight_scale'}" in message


def test_biases_of_zeros_that_quantizers_write_add_nothing(model_dir: Path) -> None:
    write, fields = FORMATS["gptq"]

    def quantize(tensors: dict[str, Tensor], value: float = 0.0) -> None:
        for n in [n for n in tensors if n.endswith("_proj.weight")]:
            stored, _ = write(*tensors.pop(n).shape, 0)
            stored["bias"] = torch.full((int(stored["scales"].shape[1]),), value)
            tensors.update({n.removesuffix("weight") + part: t for part, t in stored.items()})

    change_tensors(model_dir, quantize)
    change_config(model_dir, quantization_config=fields)
    assert exactkv.load(model_dir, device="cpu").spec.layers[0].attention.bias is False

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.bias"][3] = 0.5

    change_tensors(model_dir, spoil)
    assert "1 unknown: model.layers.1.mlp.down_proj.bias" in refusal(model_dir)
