"""Choosing tokens from logits. Randomness is a pure function of (seed, position, token id), so that a row's
sample depends on nothing else: not on the batch around it, nor on how its text was fed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    ``temperature``: divides the logits; 0 takes the most probable token, of equal ones the lowest id.
    ``top_p``: choose only among the smallest set of most probable tokens whose probability (after
    temperature) reaches this (arXiv 1904.09751); of equally probable ones the lower ids come first.
    ``seed``: another seed, another sample; it plays no part at temperature 0.
    Raises InputError for a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        _require(
            _is_number(temperature) and 0 <= temperature < math.inf,
            "temperature",
            temperature,
            "a number >= 0",
        )
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p", top_p, "a number > 0 and <= 1")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        _require(whole and 0 <= self.seed < 1 << 63, "seed", self.seed, "an integer from 0 to 2**63 - 1")


def sample(logits: Tensor, sampling: Sampling, position: int | Sequence[int]) -> Tensor:
    """Choose a token from each row of ``logits``.

    ``logits`` [V] or [B, V]; ``position``: the absolute position where the chosen token will stand, one for
    all rows or one a row. Returns token ids, int64 [] or [B]. A token whose logit is -inf is never chosen.
    Raises InputError where a row holds NaN or +inf, or nothing but -inf.
    """
    if logits.dim() not in (1, 2) or logits.shape[-1] == 0:
        raise InputError(f"logits have the shape {list(logits.shape)}; expected [V] or [B, V], V at least 1")
    best, ids = logits.max(dim=-1)  # NaN wins; of equal logits the first
    if not bool(torch.isfinite(best).all()):
        _refuse(best.reshape(-1))
    if sampling.temperature == 0:
        return ids
    rows, peaks = (logits, best) if logits.dim() == 2 else (logits[None], best[None])
    positions = torch.as_tensor(position, dtype=torch.int64).reshape(-1).to(logits.device)
    if positions.numel() not in (1, rows.shape[0]):
        raise InputError(
            f"{positions.numel()} positions were given for {rows.shape[0]} rows; expected one, or one a row"
        )
    scaled = (rows.double() - peaks[:, None].double()) / sampling.temperature  # at most 0, so it never overflows
    return _draw(scaled, sampling, positions.expand(rows.shape[0])).reshape(ids.shape)


def nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Which tokens top-p keeps: bool [B, V], for ``scaled`` [B, V] whose softmax is the probability."""
    probabilities = torch.softmax(scaled, dim=-1)
    vocab, count = scaled.shape[1], 256
    while True:  # a sort of the whole vocabulary would cost more than all the rest
        count = min(count, vocab)
        top = probabilities.topk(count, dim=-1).values
        reached = top.cumsum(dim=-1)
        if count == vocab or bool((reached[:, -1] >= top_p).all()):
            break
        count *= 8
    size = ((reached < top_p).sum(dim=-1, keepdim=True) + 1).clamp(max=vocab)  # [B, 1]
    least = top.gather(1, size - 1)
    above, level = probabilities > least, probabilities == least
    room = size - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


def gumbel(seed: int, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise, float64 [B, N], for ``positions`` int64 [B] and token ``ids`` int64 [N].

    argmax(log p + noise) is distributed as p (Gumbel, 1954; arXiv 1611.01144, eq. 1). The uniform numbers are
    those of splitmix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"), whose
    integer arithmetic modulo 2**64 is the same on every device.
    """
    state = _mix(_mix(torch.full_like(positions, seed) + _GOLDEN) + (positions + 1) * _GOLDEN)
    bits = _mix(state[:, None] + (ids + 1) * _GOLDEN)
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52  # strictly between 0 and 1
    return -torch.log(-torch.log(uniform))


def _draw(scaled: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    if sampling.top_p < 1:
        kept = nucleus(scaled, sampling.top_p)
        ids = torch.nonzero(kept.any(dim=0)).squeeze(1)  # in order of id; noise is needed for these only
        scaled = scaled[:, ids].masked_fill(~kept[:, ids], -math.inf)
    return ids[(scaled + gumbel(sampling.seed, positions, ids)).argmax(dim=-1)]


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """The output function of splitmix64: every bit of the result depends on every bit of ``z``."""
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z`` >> ``bits`` as if it were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _refuse(best: Tensor) -> None:
    row, value = next((r, v) for r, v in enumerate(best.tolist()) if not math.isfinite(v))
    held = {"nan": "NaN", "inf": "+inf"}.get(str(value), "nothing but -inf")
    raise InputError(
        f"row {row} of the logits holds {held}; expected finite logits, -inf only for tokens not to choose. "
        "NaN from a model usually means that its weights or its dtype do not suit: try dtype float32."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}; expected {expected}")


GREEDY = Sampling()
"""The most probable token, always."""
