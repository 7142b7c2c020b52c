"""Weights in integers of a few bits, with a scale and a zero a row or a group of a row's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.formats import floats
from exactkv.models.formats.recipe import Recipe, Shapes, ending, per_word, spread, stems, unpacked

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the columns 0 … 7 lie in a word of AWQ's (AutoAWQ, "gemm" version)."""


def compressed(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """compressed-tensors: packed ("weight_packed", zeros packed along the rows), or an int8 or fp8 "weight"."""
    groups = [g.get("weights") or {} for g in (fields.get("config_groups") or {}).values()]
    bits = {int(g.get("num_bits", 8)) for g in groups}
    if len(bits) > 1:
        raise LoadError(f"the weights are quantized (compressed-tensors) with {sorted(bits)} bits; expected one number")
    width = bits.pop() if bits else 8
    recipes = {}
    for stem in stems(shapes, ".weight_scale"):
        name, parts = f"{stem}.weight", [f"{stem}.weight", f"{stem}.weight_scale"]
        zero, order = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx"
        if f"{stem}.weight_packed" in shapes:
            rows, words = shapes[f"{stem}.weight_packed"]
            # The true number of columns is stored as "weight_shape"; it differs where the last word is not full.
            parts[0] = f"{stem}.weight_packed"
            optional = [n if n in shapes else "" for n in (zero, order)]
            recipe = Recipe(
                (rows, words * per_word(width, "compressed-tensors")),
                (*parts, *(n for n in optional if n)),
                _packed(width, bool(optional[0]), bool(optional[1])),
            )
            recipes[name] = recipe
        elif zero in shapes:
            recipes[name] = Recipe(shapes[name], (*parts, zero), _affine)
        else:
            recipes[name] = Recipe(shapes[name], tuple(parts), floats.scaled)
    return recipes, ending(shapes, ".weight_shape", ".input_scale", ".input_zero_point", ".k_scale", ".v_scale")


def _packed(bits: int, has_zero: bool, has_order: bool) -> Any:
    half = 2 ** (bits - 1)

    def compute(out: Tensor, words: Tensor, scale: Tensor, *others: Tensor) -> None:
        numbers = unpacked(words, bits, 1) - half
        zero = unpacked(others[0], bits, 0)[: scale.shape[0]] - half if has_zero else torch.zeros_like(scale)
        scale, zero = scale.to(torch.float32), zero.to(torch.float32)
        if has_order:
            group = others[-1].long()
            scale, zero = scale[:, group], zero[:, group]
        shape = tuple(numbers.shape)
        out.copy_((numbers - spread(zero, shape)) * spread(scale, shape))

    return compute


def _affine(out: Tensor, numbers: Tensor, scale: Tensor, zero: Tensor) -> None:
    shape = tuple(numbers.shape)
    scale, zero = (t.to(torch.float32).reshape(t.shape if t.dim() == 2 else (-1, 1)) for t in (scale, zero))
    out.copy_((numbers.to(torch.float32) - spread(zero, shape)) * spread(scale, shape))


def awq(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """AWQ (arXiv 2306.00978) as AutoAWQ packs it: [in, out / 8] words of 4 bits, in an order of their own."""
    version, bits = str(fields.get("version", "gemm")).lower(), int(fields.get("bits", fields.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise LoadError(f"the weights are quantized (awq, {version}, {bits} bits); supported is gemm with 4 bits")
    recipes = {}
    for stem in stems(shapes, ".qweight"):
        inputs, words = shapes[f"{stem}.qweight"]
        parts = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
        recipes[f"{stem}.weight"] = Recipe((words * 8, inputs), parts, _awq)
    return recipes, set()


def _awq(out: Tensor, weight: Tensor, zeros: Tensor, scales: Tensor) -> None:
    order = torch.tensor(AWQ_ORDER)
    numbers, zero = (unpacked(t, 4, 1).unflatten(1, (-1, 8))[..., order].flatten(1) for t in (weight, zeros))
    shape = tuple(numbers.shape)
    zero, scale = spread(zero.to(torch.float32), shape), spread(scales.to(torch.float32), shape)
    out.copy_(((numbers - zero) * scale).t())


def gptq(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """GPTQ (arXiv 2210.17323) as AutoGPTQ packs it: [in / n, out] words; zeros less 1, but not in "gptq_v2"; each
    input's group in "g_idx"."""
    bits = int(fields.get("bits", 4))
    count = per_word(bits, "gptq")
    shift = 0 if fields.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    recipes = {}
    for stem in stems(shapes, ".qweight"):
        words, outputs = shapes[f"{stem}.qweight"]
        parts = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        parts += [f"{stem}.g_idx"] if f"{stem}.g_idx" in shapes else []
        recipes[f"{stem}.weight"] = Recipe((outputs, words * count), tuple(parts), _gptq(bits, shift))
    return recipes, set()


def _gptq(bits: int, shift: int) -> Any:
    def compute(out: Tensor, weight: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> None:
        numbers = unpacked(weight, bits, 0)  # [in, out]
        zero, scale = (unpacked(zeros, bits, 1) + shift).to(torch.float32), scales.to(torch.float32)  # [groups, out]
        if order is None:
            order = torch.arange(len(numbers)) // -(-len(numbers) // len(scale))
        out.copy_(((numbers - zero[order.long()]) * scale[order.long()]).t())

    return compute
