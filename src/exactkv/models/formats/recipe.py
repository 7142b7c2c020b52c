"""How one tensor is computed from those that are stored for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recipe:
    """``shape``: of the result. ``parts``: the stored tensors, by name. ``compute(out, *parts)`` writes it;
    ``stacked``: a matrix at a time, out of what the parts have for it."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    compute: Callable[..., None]
    stacked: bool = False

    def fill(self, out: Tensor, *parts: Tensor) -> None:
        """Write the result into ``out``, of its shape or of that with axes split in several."""
        if self.stacked:
            matrix = Recipe(self.shape[1:], self.parts, self.compute)
            for place, *of_it in zip(out, *parts, strict=True):
                matrix.fill(place, *of_it)
        elif tuple(out.shape) == self.shape:
            self.compute(out, *parts)
        else:
            whole = torch.empty(self.shape, dtype=out.dtype)
            self.compute(whole, *parts)
            out.copy_(whole.view(out.shape))


def unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """The unsigned numbers of ``bits`` bits in int32 ``words``, the lowest first, int32, in their order along
    ``axis``, which becomes 32 / bits times as long."""
    axis %= words.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(axis + 1) >> shifts.view(-1, *(1,) * (words.dim() - axis - 1))) & (2**bits - 1)
    return numbers.flatten(axis, axis + 1)


Block = tuple[int, int]
"""How many rows and columns of a weight have one scale."""


def whole(shape: tuple[int, ...]) -> Block:
    """The block that is all of a weight [..., rows, columns]."""
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, 1)


def block_of(name: str, shape: tuple[int, ...], stored: tuple[int, ...], allowed: Iterable[Block] = ()) -> Block:
    """The block for each number of a scale ``name`` of shape ``stored``, which is for a weight [..., rows, columns].

    ``allowed``: blocks that the config may mean, of which the last of an axis may be cut off. Without any, blocks
    must divide the weight. Never a guess: raises LoadError where the scale has another shape.
    """
    if len(shape) < 2:
        raise LoadError(f"{name} is for a weight of shape {list(shape)}, expected [rows, columns]")
    rows, columns = shape[-2:]
    alike = len(stored) == len(shape) and stored[:-2] == shape[:-2]
    given = (1, 1) if stored in ((), (1,)) else (*stored, 1) if len(stored) == 1 else stored[-2:] if alike else None
    for block in allowed:
        if given == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    divide = given is not None and all(given) and rows % given[0] == 0 and columns % given[1] == 0
    if given is None or not divide or allowed:
        means = " or ".join(f"blocks of {b[0]} x {b[1]}" for b in allowed) or "blocks that divide it"
        raise LoadError(
            f"{name} has the shape {list(stored)}, which does not fit a weight of {rows} x {columns} with {means}, as "
            "the quantization config says; the files are damaged, or the config is another model's"
        )
    return rows // given[0], columns // given[1]


def group_blocks(fields: Mapping[str, Any], columns: int) -> tuple[Block, ...]:
    """The block by "group_size" (-1: a whole row); none where the config does not say."""
    size = fields.get("group_size", fields.get("q_group_size"))
    if size is None:
        return ()
    return ((1, columns if whole_number("group_size", size, -1) <= 0 else size),)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """``value``, if it is an integer of at least ``least``; else LoadError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LoadError(f"quantization_config: {name} is {value!r}, expected an integer of {least} or more")
    return value


def spread(scale: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """``scale``, each of whose numbers holds for ``block`` of a tensor of ``shape``, at the tensor's size, in float32;
    the last block of an axis may be cut off."""
    scale = scale.to(torch.float32)
    scale = scale.reshape((1,) * len(shape)) if scale.numel() == 1 else scale
    scale = scale.unsqueeze(-1) if scale.dim() == 1 else scale
    for axis in (-2, -1):
        if scale.shape[axis] not in (1, shape[axis]):
            scale = scale.repeat_interleave(block[axis], axis).narrow(axis, 0, shape[axis])
    return scale.expand(shape)


def numbers_of(scale: Tensor, powers: bool = False) -> Tensor:
    """Scales as float32: floats, or exponents of 2 (plus 127; 255 is "not a number") of the dtype for them, or, with
    ``powers``, in bytes. Raises LoadError for integers, whose meaning nothing tells."""
    is_bytes = scale.dtype == torch.uint8 and powers
    if scale.dtype == torch.float8_e8m0fnu or is_bytes:
        exponents = scale.view(torch.uint8).to(torch.int32)
        if bool((exponents == 255).any()):
            raise LoadError("a scale is 255, which means 'not a number'; the files are damaged, download them again")
        return torch.ldexp(torch.ones(exponents.shape), exponents - 127)
    if not scale.is_floating_point():
        raise LoadError(f"scales are {scale.dtype}, expected floats, or bytes where scale_fmt is 'ue8m0'")
    return scale.to(torch.float32)


def per_word(bits: int, method: str) -> int:
    """How many numbers an int32 holds. Raises LoadError where they are not whole."""
    if bits not in (2, 4, 8):
        raise LoadError(f"the weights are quantized ({method}) with {bits} bits; supported are 2, 4 and 8")
    return 32 // bits


def stems(shapes: Shapes, suffix: str) -> list[str]:
    """The names that, with ``suffix``, are stored."""
    return [name.removesuffix(suffix) for name in shapes if name.endswith(suffix)]


def ending(shapes: Shapes, *suffixes: str) -> set[str]:
    return {name for name in shapes if name.endswith(suffixes)}
