"""Random numbers as a pure function of (seed, position, token id): a row's sample depends on nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel(seeds: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise, float64 [B, N], for ``positions`` int64 [B] and token ``ids`` int64 [N]; ``seeds``: one for all
    rows, or int64 [B].

    argmax(log p + noise) is distributed as p (Gumbel, 1954; arXiv 1611.01144, eq. 1). The uniform numbers are
    those of splitmix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"), whose
    integer arithmetic modulo 2**64 is the same on every device.
    """
    return _uniform(seeds, positions, ids).log_().neg_().log_().neg_()


def coin(seed: int, position: int) -> float:
    """A uniform number between 0 and 1 for a position as a whole: that of a token id -1, which no token has."""
    return float(_uniform(seed, torch.tensor([position]), torch.tensor([-1])))


def _uniform(seeds: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """float64 [B, N], strictly between 0 and 1."""
    first = seeds if isinstance(seeds, Tensor) else torch.full_like(positions, seeds)
    state = _mix(_mix(first + _GOLDEN) + (positions + 1) * _GOLDEN)
    bits = _mix(state[:, None] + (ids + 1) * _GOLDEN)
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """The output function of splitmix64: every bit of the result depends on every bit of ``z``, which it overwrites."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_FIRST)
    z.bitwise_xor_(_shifted(z, 27)).mul_(_SECOND)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z`` >> ``bits`` as if it were unsigned."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
