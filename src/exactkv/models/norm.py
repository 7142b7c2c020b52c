"""RMSNorm (arXiv 1910.07467, eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, rope and softmax run: max(float32, ``dtype``)."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm:
    """x · rsqrt(mean x² + eps) · (weight + offset) over the last axis, in the compute dtype."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0):
        self.weight = weight.to(compute_dtype(weight.dtype)) + offset
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype)
        return F.rms_norm(y, self.weight.shape, self.weight, self.eps).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean x² + eps) over the last axis: the norm without weights."""
    return F.rms_norm(x.to(compute_dtype(x.dtype)), x.shape[-1:], None, eps).to(x.dtype)
