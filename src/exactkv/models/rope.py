"""Rotary position embedding (arXiv 2104.09864, section 3.4.2) and its variants, each with its source."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exactkv.models.norm import compute_dtype
from exactkv.models.spec import FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec


def frequencies(spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle a position for each pair, [dim / 2], in the compute dtype of ``dtype``."""
    dtype = compute_dtype(dtype)
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).to(dtype) / spec.dim
    base = 1.0 / (spec.base**exponents)
    match spec.scaling:
        case None:
            scaled = base
        case LinearScaling(factor):
            scaled = base / factor
        case FrequencyFactors(factors):
            scaled = base / torch.tensor(factors, dtype=dtype)
        case Llama3Scaling():
            scaled = _llama3(base, spec.scaling)
    return scaled.to(device)


def _llama3(base: Tensor, s: Llama3Scaling) -> Tensor:
    """Llama 3.1 (model card and reference code, "rope scaling"): a wavelength under original / high stays, one
    over original / low is slowed by the factor, one between is blended. With equal low and high factors
    there is nothing between."""
    wavelength = 2 * math.pi / base
    slowed = base / s.factor
    long = wavelength > s.original_max_position / s.low_freq_factor
    short = wavelength < s.original_max_position / s.high_freq_factor
    scaled = torch.where(long, slowed, base)
    if s.high_freq_factor != s.low_freq_factor:
        ramp = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        scaled = torch.where(~long & ~short, (1 - ramp) * slowed + ramp * base, scaled)
    return scaled


class Rotation(NamedTuple):
    """The rotations of one variant at the positions of one call: made once, used by every layer.

    ``cos`` and ``sin`` are [B, T, 1, dim], the sine signed so that a pair (a, b) becomes
    (a·cos - b·sin, b·cos + a·sin).
    """

    cos: Tensor
    sin: Tensor


def rotation(spec: RopeSpec, freqs: Tensor, positions: Tensor) -> Rotation:
    """The rotations at ``positions`` [B, T], for ``freqs`` [dim / 2]."""
    angles = positions[:, :, None, None].to(freqs.dtype) * freqs
    cos, sin = torch.cos(angles), torch.sin(angles)
    if spec.interleaved:
        return Rotation(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2))
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate ``x`` [B, T, H, dim]; same shape and dtype."""
    y = x.to(cos.dtype)
    half = x.shape[-1] // 2
    swapped = y.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else y.roll(half, -1)
    rotated = y * cos if y is x else y.mul_(cos)
    return rotated.addcmul_(swapped, sin).to(x.dtype)
