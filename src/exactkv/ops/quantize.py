"""Rounding of matrices to integers of a few bits, in groups of a row's numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.errors import InputError
from exactkv.ops.packed import GROUPS, MIDDLE, Packed, PackedWeight, pack_numbers, pack_scales, packed

_ROWS_AT_A_TIME = 1 << 20  # numbers
_SHRUNK = (1.0, 0.92, 0.84, 0.76)
"""Of the range of a group of 4 bits, what may be covered: cutting extremes off can make the others finer."""


@dataclass(frozen=True)
class WeightFormat:
    """``bits``: 4 or 8. ``group``: how many numbers of a row share a scale, one of GROUPS."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in MIDDLE or self.group not in GROUPS:
            raise InputError(
                f"weights of {self.bits} bits in groups of {self.group} were asked for; expected 4 or 8 bits, in "
                f"groups of {', '.join(map(str, GROUPS))}"
            )

    def __str__(self) -> str:
        return f"int{self.bits}, groups of {self.group}"

    def for_inputs(self, inputs: int) -> WeightFormat | None:
        """This, or with the largest smaller group that divides ``inputs``; None if none does."""
        group = max((g for g in GROUPS if g <= self.group and inputs % g == 0), default=None)
        return None if group is None else WeightFormat(self.bits, group)


def pack(weight: Tensor, form: WeightFormat) -> Packed:
    """``weight`` [out, in], or experts' [E, out, in], rounded to ``form``; its dtype, to which scales are rounded
    first, is kept. Of 8 bits a group's greatest magnitude becomes 127 and zero stays zero; of 4 bits numbers are spread
    over the group's range, or that part of it, of some, which leaves the least squared error."""
    if weight.dim() == 3:
        each = [_matrix(w, form) for w in weight]
        numbers, scales = torch.stack([m.numbers for m in each]), torch.stack([m.scales for m in each])
        return packed(numbers, scales, tuple(weight.shape), form.bits)
    return _matrix(weight, form)


def _matrix(weight: Tensor, form: WeightFormat) -> PackedWeight:
    step = max(1, _ROWS_AT_A_TIME // weight.shape[1])
    parts = [_rounded(rows, form) for rows in weight.split(step)]
    numbers, scale, offset = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = (weight.shape[0], weight.shape[1])
    return PackedWeight(pack_numbers(numbers, form.bits), pack_scales(scale, offset), shape, form.bits)


def _rounded(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [n, in] uint8, scales and offsets [n, in / group] of some rows."""
    grouped = weight.unflatten(1, (-1, form.group)).to(torch.promote_types(weight.dtype, torch.float32))
    if form.bits == 8:
        scale = (grouped.abs().amax(-1) / 127).to(weight.dtype)
        return _nearest(grouped, scale, scale * 8, form.bits)[0].flatten(1), scale, scale * 8
    low, high = torch.aminmax(grouped, dim=-1)
    best: tuple[Tensor, ...] | None = None
    for part in _SHRUNK:
        scale = ((high - low) * (part / 15)).to(weight.dtype)
        offset = ((low + high) / 2 + scale / 2).to(weight.dtype)  # numbers reach from -8 to 7
        numbers, error = _nearest(grouped, scale, offset, form.bits)
        found = (numbers, scale, offset, error)
        if best is None:
            best = found
        else:
            better = error < best[3]
            best = tuple(
                torch.where(better.unsqueeze(-1) if new.dim() == 3 else better, new, old)
                for new, old in zip(found, best, strict=True)
            )
    assert best is not None
    return best[0].flatten(1), best[1], best[2]


def _nearest(grouped: Tensor, scale: Tensor, offset: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The numbers that come nearest to ``grouped`` [n, groups, group], uint8, and each group's squared error."""
    step, begin = (t.to(grouped.dtype).unsqueeze(-1) for t in (scale, offset))
    numbers = ((grouped - begin) / torch.where(step == 0, 1.0, step)).add_(MIDDLE[bits]).round_()
    numbers.clamp_(0, 2**bits - 1)
    error = (numbers - MIDDLE[bits]).mul_(step).add_(begin).sub_(grouped).square_().sum(-1)
    return numbers.to(torch.uint8), error
