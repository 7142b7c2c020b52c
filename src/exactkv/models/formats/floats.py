"""Weights in small floats: 8 bits with a scale a block, a row or a tensor; 4 bits with a power of two a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.formats.recipe import (
    Block,
    Recipe,
    Shapes,
    block_of,
    ending,
    numbers_of,
    spread,
    stems,
    whole,
    whole_number,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits (OCP Microscaling Formats, section 5.3.3)."""


def fp8(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """DeepSeek V3's: "weight" times "weight_scale_inv", a number a block of "weight_block_size"; experts may be
    stacked, [E, rows, columns]. Scales may be powers of two, as exponents ("scale_fmt": "ue8m0")."""
    block = block_size("weight_block_size", fields.get("weight_block_size") or [128, 128])
    powers, recipes = fields.get("scale_fmt") == "ue8m0", {}
    for name in stems(shapes, "_scale_inv"):  # "….weight", or experts' "…_proj"
        scale = f"{name}_scale_inv"
        if name in shapes:
            found = block_of(scale, shapes[name], shapes[scale], (block, whole(shapes[name])))
            recipes[name] = Recipe(shapes[name], (name, scale), scaled(found, powers), stacked=len(shapes[name]) == 3)
    for stem in stems(shapes, ".weight_scale"):  # a number a tensor or a row, as others write them
        name, scale = f"{stem}.weight", f"{stem}.weight_scale"
        if name in shapes:
            rows, columns = whole(shapes[name])
            declared = (block,) if fields.get("weight_block_size") else ()
            found = block_of(scale, shapes[name], shapes[scale], ((rows, columns), (1, columns), *declared))
            recipes[name] = Recipe(shapes[name], (name, scale), scaled(found, powers))
    return recipes, ending(shapes, ".input_scale", ".activation_scale")


def block_size(name: str, given: Any) -> Block:
    """A block as configs give it. Raises LoadError."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise LoadError(f"quantization_config: {name} is {given!r}, expected [rows, columns]")
    return whole_number(name, given[0]), whole_number(name, given[1])


def scaled(block: Block, powers: bool = False) -> Any:
    """Multiply by a number for each block; ``powers``: see `numbers_of`."""

    def compute(out: Tensor, weight: Tensor, scale: Tensor) -> None:
        out.copy_(weight.to(torch.float32) * spread(numbers_of(scale, powers), tuple(weight.shape), block))

    return compute


def mxfp4(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """GPT-OSS's experts: "…_blocks" [E, rows, groups, 16], two numbers a byte, the lower half first, times 2 to the
    power of "…_scales" [E, rows, groups] less 127; [E, columns, rows] as the model has them. A scale of 255 means "not
    a number" (section 5.4.1) and is refused: it would make 32 weights so."""
    recipes = {}
    for stem in stems(shapes, "_blocks"):
        name, scale = f"{stem}_blocks", f"{stem}_scales"
        if len(shapes[name]) != 4 or shapes[name][-1] != 16:
            raise LoadError(f"{name} has the shape {list(shapes[name])}, expected [experts, rows, groups, 16]")
        experts, rows, groups, _ = shapes[name]
        if shapes.get(scale, shapes[name][:3]) != shapes[name][:3]:
            raise LoadError(
                f"{scale} has the shape {list(shapes[scale])}, expected {[experts, rows, groups]}, a number for each "
                f"group of {name}; the files are damaged"
            )
        recipes[stem] = Recipe((experts, groups * 32, rows), (name, scale), _mxfp4, stacked=True)
    return recipes, set()


def _mxfp4(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise LoadError(f"blocks are {blocks.dtype} and scales {scales.dtype}, expected torch.uint8 for both")
    if bool((scales == 255).any()):
        raise LoadError("a scale is 255, which means 'not a number'; the files are damaged, download them again")
    numbers = torch.tensor(E2M1)[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()]
    numbers = torch.ldexp(numbers, scales.to(torch.int32).sub(127).unsqueeze(-1))  # [rows, groups, 32]
    out.copy_(numbers.flatten(1).t())
