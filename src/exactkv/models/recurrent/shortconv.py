"""LFM2's short convolution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import make_norm
from exactkv.models.recurrent.parts import Convolution
from exactkv.models.recurrent.spec import ShortConvSpec
from exactkv.models.spec import DecoderSpec
from exactkv.ops import Ops


class ShortConv:
    """See Recurrent."""

    def __init__(self, spec: ShortConvSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.conv = Convolution(weights, None, ops)

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        layer = call.recurrent[self.slot]
        u, c = in_blocks(self._project, x)  # [B, T, size] each
        rows = torch.cat((layer.read(call.step)["tail"], u), dim=1)
        for _, end in call.step.stretches:
            layer.write(call.step, end, {"tail": self.conv.tail(rows, end)})
        if queries == "none":
            return None
        y = self.conv(rows) * c
        if queries == "last":
            y = last_of_rows(y, call.step)
        return self.ops.linear(y, self.weights["out.weight"], self.weights.get("out.bias"))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x`` [B, T, hidden] -> B · x, which is convolved, and C, which multiplies the result."""
        normed = x if self.norm is None else self.norm(x)
        b, c, x = self.ops.linear(normed, self.weights["in.weight"], self.weights.get("in.bias")).chunk(3, dim=-1)
        return b * x, c
