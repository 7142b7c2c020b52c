"""Rotary position embedding (arXiv 2104.09864, section 3.4.2) and its variants, each with its source."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exactkv.models.norm import compute_dtype
from exactkv.models.spec import FrequencyFactors, LinearScaling, Llama3Scaling, Proportion, RopeSpec, YarnScaling


def frequencies(spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle a position for each pair, [dim / 2], in the compute dtype of ``dtype``. ``spec`` must be settled:
    long rope (arXiv 2402.13753, section 3.3) is then one of its lists of factors, dynamic NTK (arXiv 2309.00071,
    section 3.3, "Dynamic Scaling", with "NTK-aware" interpolation, eq. 13) another base."""
    dtype = compute_dtype(dtype)
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).to(dtype) / spec.dim
    base = 1.0 / (spec.base**exponents)
    match spec.scaling:
        case None:
            scaled = base
        case LinearScaling(factor):  # arXiv 2306.15595, eq. 4
            scaled = base / factor
        case FrequencyFactors(factors):
            scaled = base / torch.tensor(factors, dtype=dtype)
        case Proportion(pairs, factor):  # Gemma 4, "p-RoPE" (arXiv 2410.06205, section 6)
            scaled = base.masked_fill(torch.arange(len(base)) >= pairs, 0.0) / factor
        case YarnScaling():
            scaled = _yarn(base, spec.dim, spec.base, spec.scaling)
        case Llama3Scaling():
            scaled = _llama3(base, spec.scaling)
        case _:
            raise TypeError(f"{spec.scaling} depends on the length and is not settled")
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


def _yarn(base: Tensor, dim: int, theta: float, s: YarnScaling) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2, "NTK-by-parts", eq. 17 to 20), the ramp over the pairs' numbers as in
    its authors' code."""

    def pair(turns: float) -> float:
        """The number of the pair that turns so many times within the original length."""
        return dim * math.log(s.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=base.dtype) - low) / (high - low or 0.001)).clamp(0, 1)
    return base / s.factor * ramp + base * (1 - ramp)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """0.1 · scale · ln(factor) + 1 (arXiv 2309.00071, eq. 22); 1 for a factor of at most 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_amplitude(factor: float, original_max_position: int) -> float:
    """sqrt(1 + ln(factor) / ln(original length)) (arXiv 2402.13753, section 3.3)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position)) if factor > 1 else 1.0


class Rotation(NamedTuple):
    """The rotations of one variant at the positions of one call: made once, used by every layer.

    ``cos`` and ``sin`` are [B, T, 1, dim], the sine signed so that a pair (a, b) becomes
    (a·cos - b·sin, b·cos + a·sin), both times the amplitude.
    """

    cos: Tensor
    sin: Tensor


def rotation(spec: RopeSpec, freqs: Tensor, positions: Tensor) -> Rotation:
    """The rotations at ``positions`` [B, T], for ``freqs`` [dim / 2]."""
    angles = positions[:, :, None, None].to(freqs.dtype) * freqs
    cos, sin = torch.cos(angles), torch.sin(angles)
    if spec.amplitude != 1.0:
        cos, sin = cos * spec.amplitude, sin * spec.amplitude
    if spec.interleaved:
        return Rotation(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2))
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``dim`` numbers of each head of ``x`` [B, T, H, D]; same shape and dtype."""
    dim = cos.shape[-1]
    if x.shape[-1] > dim:
        return torch.cat((rotate(x[..., :dim], cos, sin, interleaved), x[..., dim:]), -1)
    y = x.to(cos.dtype)
    half = dim // 2
    swapped = y.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else y.roll(half, -1)
    rotated = y * cos if y is x else y.mul_(cos)
    return rotated.addcmul_(swapped, sin).to(x.dtype)
