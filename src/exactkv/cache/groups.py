"""Quantizing in groups: the numbers of a head's row, some after another, as integers with a scale a group.

With 8 bits a number is ``code * scale``, codes from -127 to 127. With 4 bits it is ``least + code * scale``, codes from
0 to 15, two in a byte: byte i holds those of the numbers i (low half) and i + size / 2 (high half). Scales are rounded
up and least numbers down to float16, and codes are made for what they then are; so a number within the range of
float16 comes back with an error of at most half a step. A group of NaN or beyond that range (8 bits: 127 times 65504)
comes back as NaN or infinite, as nothing that was computed wrong may go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from exactkv.errors import InputError

GROUP = 32
"""Numbers of a group where nothing else is said."""
SUFFIXES = {8: ("", ".scale"), 4: ("", ".scale", ".least")}
UP = 1 + 2.0**-10
"""A positive normal number times this, rounded to float16, is not less than it was."""
TINY = 2.0**-24
"""The least positive float16: added, it does the same for the others, and keeps scales above 0."""


def layout(size: int, bits: int, group: int) -> dict[str, tuple[int, torch.dtype]]:
    """What a head's row of ``size`` numbers becomes: suffix -> (numbers, dtype). Raises InputError for an odd size with
    4 bits."""
    if bits == 8:
        return {"": (size, torch.int8), ".scale": (_count(size, group), torch.float16)}
    _check_even(size)
    half = torch.float16
    return {"": (size // 2, torch.uint8), ".scale": (_count(size, group), half), ".least": (_count(size, group), half)}


def quantize(x: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """``x`` [..., size] -> by suffix: codes, scales [..., groups], and with 4 bits least numbers [..., groups]."""
    size = x.shape[-1]
    wide = _grouped(x.to(torch.promote_types(x.dtype, torch.float32)), group)  # [..., groups, group]
    low, high = wide.aminmax(dim=-1, keepdim=True)
    if bits == 8:
        scale = (torch.maximum(high, -low) * (UP / 127) + TINY).half()
        codes = (wide / scale).round_().to(torch.int8)
        return {"": codes.flatten(-2)[..., :size], ".scale": scale.squeeze(-1)}
    _check_even(size)
    least = (low - low.abs() * (UP - 1) - TINY).half()
    scale = ((high - least) * (UP / 15) + TINY).half()
    codes = ((wide - least) / scale).round_().to(torch.uint8).flatten(-2)[..., :size]
    first, second = codes.chunk(2, dim=-1)
    return {"": first | second << 4, ".scale": scale.squeeze(-1), ".least": least.squeeze(-1)}


def dequantize(stored: Mapping[str, Tensor], bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """The way back: [..., size] in ``dtype``, computed in max(float32, dtype)."""
    wide = torch.promote_types(dtype, torch.float32)
    codes = stored[""]
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    numbers = codes.to(wide)  # a copy, which is overwritten
    _each_group(numbers, stored[".scale"].to(wide), group, Tensor.mul_)
    if bits == 4:
        _each_group(numbers, stored[".least"].to(wide), group, Tensor.add_)
    return numbers.to(dtype)


def _each_group(numbers: Tensor, given: Tensor, group: int, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change ``numbers`` [..., size] by the number that is ``given`` [..., groups] for the group of each."""
    size, count = numbers.shape[-1], given.shape[-1]
    if count > 1 and size % group:
        change(numbers, given.repeat_interleave(group, dim=-1)[..., :size])
    else:
        change(numbers.view(*numbers.shape[:-1], count, size // count), given.unsqueeze(-1))


def _grouped(x: Tensor, group: int) -> Tensor:
    """[..., size] -> [..., groups, group]; a group that is not full is filled with its last number."""
    size = x.shape[-1]
    if size <= group:
        return x.unsqueeze(-2)
    if missing := -size % group:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.view(*x.shape[:-1], -1, group)


def _count(size: int, group: int) -> int:
    return -(-size // group)


def _check_even(size: int) -> None:
    if size % 2:
        raise InputError(f"a head's row has {size} numbers; 4 bits take an even number, two in a byte: take int8")
