"""How one tensor is computed from those that are stored for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.errors import LoadError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recipe:
    """``shape``: of the result. ``parts``: the stored tensors, by name. ``compute(out, *parts)`` writes it."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    compute: Callable[..., None]


def unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """The unsigned numbers of ``bits`` bits in int32 ``words``, the lowest first, int32, in their order along
    ``axis``, which becomes 32 / bits times as long."""
    axis %= words.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(axis + 1) >> shifts.view(-1, *(1,) * (words.dim() - axis - 1))) & (2**bits - 1)
    return numbers.flatten(axis, axis + 1)


def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``scale``, each of whose numbers holds for a block of a tensor of ``shape``, at the tensor's size; the last
    block of an axis may be cut off."""
    for axis, size in enumerate(shape):
        blocks = scale.shape[axis]
        if blocks not in (1, size):
            scale = scale.repeat_interleave(-(-size // blocks), axis).narrow(axis, 0, size)
    return scale.expand(shape)


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
