"""RMSNorm (arXiv 1910.07467, eq. 4) and LayerNorm (arXiv 1607.06450, eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.models.spec import DecoderSpec


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
        if y.numel() == self.weight.numel() and y.device.type == "cpu":
            return self._of_one_row(y).to(x.dtype)
        return F.rms_norm(y, self.weight.shape, self.weight, self.eps).to(x.dtype)

    def _of_one_row(self, y: Tensor) -> Tensor:
        """In two operations: on a CPU F.rms_norm makes eight, and they are what it costs."""
        flat = y.view(-1)
        scale = (float(torch.dot(flat, flat)) / flat.shape[0] + self.eps) ** -0.5
        return torch.mul(y, self.weight).mul_(scale)


class LayerNorm:
    """(x - mean x) · rsqrt(var x + eps) · (weight + offset) + bias over the last axis, in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0):
        self.weight = weight.to(compute_dtype(weight.dtype)) + offset
        self.bias = None if bias is None else bias.to(self.weight.dtype)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype)
        return F.layer_norm(y, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm


def make_norm(decoder: DecoderSpec, weights: Mapping[str, Tensor], name: str) -> Norm | None:
    """The norm of that name, as the decoder's norms are; None if there is none."""
    weight = weights.get(f"{name}.weight")
    if weight is None:
        return None
    if decoder.norm == "layer":
        return LayerNorm(weight, weights.get(f"{name}.bias"), decoder.norm_eps, decoder.norm_offset)
    return RMSNorm(weight, decoder.norm_eps, decoder.norm_offset)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean x² + eps) over the last axis: the norm without weights."""
    y = x.to(compute_dtype(x.dtype))
    if y.device.type != "cpu":
        return F.rms_norm(y, y.shape[-1:], None, eps).to(x.dtype)
    length: Tensor = torch.linalg.vector_norm(
        y, dim=-1, keepdim=True
    )  # half of the operations that F.rms_norm makes there
    normed: Tensor = y * length.square_().div_(y.shape[-1]).add_(eps).rsqrt_()
    return normed.to(x.dtype)
