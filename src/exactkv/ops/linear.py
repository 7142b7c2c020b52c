"""Products with a weight matrix; on a CPU by the fastest of torch's kernels for so many rows (docs/log.md).

For few rows reading the weights is all that counts. There F.linear reads at a third of what memory gives: in
float32 because its product is one call of one thread, in bfloat16 because oneDNN sorts the weights anew each time.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.ops.packed import PackedWeight

FEW_ROWS = 16
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's float32 product, which F.linear leaves for MKL's; a tenth faster where MKL does not know the CPU."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. ``x`` [..., in], ``weight`` [out, in], packed or not, ``bias`` [out] -> [..., out]."""
    if isinstance(weight, PackedWeight):
        return weight.product(x, bias)
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or rows == 0:
        return F.linear(x, weight, bias)
    if rows > FEW_ROWS:
        return _onednn(x, weight, bias) if x.dtype == torch.float32 and _HAS_ONEDNN else F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        out = (_one_row(x, weight) if rows == 1 else (weight @ x.reshape(rows, -1).t()).t()).reshape(
            *x.shape[:-1], weight.shape[0]
        )
        return out if bias is None else out + bias
    if x.dtype == torch.bfloat16 and rows == 1:
        return _without_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """The rows ``tokens`` [...] of ``weight`` [vocabulary, size], packed or not -> [..., size]."""
    return weight.rows(tokens) if isinstance(weight, PackedWeight) else F.embedding(tokens, weight)


def _one_row(x: Tensor, weight: Tensor) -> Tensor:
    """The rows of the matrix in blocks, so that a batched product gives each thread some. As a column, x must
    have the strides of a transposed row: with those of a column the product takes a path four times slower."""
    out, size = weight.shape
    blocks = next(n for n in (4, 2, 1) if out % n == 0)
    column = x.reshape(1, size).t().expand(blocks, size, 1)
    return torch.bmm(weight.view(blocks, out // blocks, size), column)


def _without_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product, which reads bfloat16 weights as they lie and sums in float32."""
    with _ONEDNN_OFF:
        return F.linear(x, weight, bias)


class _OneDnnOff:
    """oneDNN switched off while any thread is within: the switch is the process's."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True
        self.switch: Any = torch.backends.mkldnn

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = self.switch.enabled
                self.switch.enabled = False
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.switch.enabled = self.before


_ONEDNN_OFF = _OneDnnOff()
