"""Weights in small floats: 8 bits with a scale a block, a row or a tensor; 4 bits with a power of two a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.formats.recipe import Recipe, Shapes, ending, spread, stems

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits (OCP Microscaling Formats, section 5.3.3)."""


def fp8(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """DeepSeek V3's: "weight" times "weight_scale_inv", a number a block of "weight_block_size"."""
    block = fields.get("weight_block_size") or [128, 128]
    recipes = {}
    for stem in stems(shapes, ".weight_scale_inv"):
        name, scale = f"{stem}.weight", f"{stem}.weight_scale_inv"
        shape = shapes.get(name, ())
        expected = tuple(-(-size // b) for size, b in zip(shape[-2:], block, strict=False))
        if len(shapes[scale]) and shapes[scale][-2:] != expected:
            raise LoadError(f"{scale} is {list(shapes[scale])}, expected {list(expected)} for blocks of {block}")
        recipes[name] = Recipe(shape, (name, scale), blocks(*block))
    for stem in stems(shapes, ".weight_scale"):  # a number a tensor or a row, as others write them
        name = f"{stem}.weight"
        recipes[name] = Recipe(shapes.get(name, ()), (name, f"{stem}.weight_scale"), scaled)
    return recipes, ending(shapes, ".input_scale", ".activation_scale")


def blocks(rows: int, columns: int) -> Any:
    """Multiply blocks of so many rows and columns."""

    def compute(out: Tensor, weight: Tensor, scale: Tensor) -> None:
        scale = scale.to(torch.float32)
        if scale.dim() >= 2:
            scale = scale.repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
            scale = scale.repeat_interleave(columns, -1)[..., : weight.shape[-1]]
        out.copy_(weight.to(torch.float32) * scale)

    return compute


def scaled(out: Tensor, weight: Tensor, scale: Tensor) -> None:
    """Multiply by a scale a tensor, a row, or a group of a row."""
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        scale = scale.reshape((1,) * weight.dim())
    out.copy_(weight.to(torch.float32) * spread(scale, tuple(weight.shape)))


def mxfp4(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """GPT-OSS's experts: "…_blocks" [E, rows, groups, 16], two numbers a byte, the lower half first, times 2 to the
    power of "…_scales" [E, rows, groups] less 127; [E, columns, rows] as the model has them."""
    recipes = {}
    for stem in stems(shapes, "_blocks"):
        *experts, rows, groups, size = shapes[f"{stem}_blocks"]
        recipes[stem] = Recipe((*experts, groups * size * 2, rows), (f"{stem}_blocks", f"{stem}_scales"), _mxfp4)
    return recipes, set()


def _mxfp4(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    table = torch.tensor(E2M1)
    for o, b, s in zip(out, blocks, scales, strict=True):  # one expert at a time
        numbers = table[torch.stack((b & 15, b >> 4), dim=-1).flatten(-2).long()]  # [rows, groups, 32]
        numbers = torch.ldexp(numbers, s.to(torch.int32).sub(127).unsqueeze(-1))
        o.copy_(numbers.flatten(1).t())
