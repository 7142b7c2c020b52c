"""What recurrent mixers have in common: the convolution, and a scan that stops where states are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from exactkv.models.call import Call
from exactkv.models.norm import compute_dtype
from exactkv.ops import Ops

Scan = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""(tokens, state before them) -> (results for them, state after them)."""


class Convolution:
    """The causal convolution of each channel, in the compute dtype, then the activation if there is one."""

    def __init__(self, weights: Mapping[str, Tensor], activation: str | None, ops: Ops):
        weight, bias = weights["conv.weight"], weights.get("conv.bias")
        dtype = compute_dtype(weight.dtype)
        self.weight, self.bias = weight.squeeze(1).to(dtype), None if bias is None else bias.to(dtype)
        self.activation, self.ops = activation, ops

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` [B, K - 1 + T, C], the tail and the call's tokens after it -> [B, T, C] in their dtype."""
        out = self.ops.causal_conv(rows.to(self.weight.dtype), self.weight, self.bias)
        return (out if self.activation is None else self.ops.activate(out, self.activation)).to(rows.dtype)

    def tail(self, rows: Tensor, offset: int) -> Tensor:
        """What the convolution needs of the tokens before ``offset``: [B, K - 1, C]."""
        return rows[:, offset : offset + self.weight.shape[1] - 1]


def scanned(call: Call, slot: int, rows: Tensor, conv: Convolution, state: Tensor, scan: Scan) -> Tensor:
    """The results of ``scan`` on all tokens of the call, [B, T, ...]. It is done in stretches, and after each the
    state is written, beside the convolution's tail in ``rows``, so that every row's is filed at its own length."""
    layer, out = call.recurrent[slot], []
    for begin, end in call.step.stretches:
        y, state = scan(slice(begin, end), state)
        layer.write(call.step, end, {"tail": conv.tail(rows, end), "state": state})
        out.append(y)
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)
