"""The gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from exactkv.ops import Ops
from exactkv.ops.linear import FEW_ROWS


class GatedMLP:
    """down(act(gate x) · up x); ``weights``: "gate_up.weight" [2·inter, hidden], gate first, "down.weight"."""

    def __init__(self, activation: str, weights: Mapping[str, Tensor], ops: Ops):
        self.activation, self.ops = activation, ops
        self.gate_up, self.gate_up_bias = weights["gate_up.weight"], weights.get("gate_up.bias")
        self.down, self.down_bias = weights["down.weight"], weights.get("down.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [B, T, hidden] or [N, hidden] -> the same shape."""
        return self.ops.linear(self.ops.gated(*self._gate_and_up(x), self.activation), self.down, self.down_bias)

    def _gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        """One product for few rows, where its start costs most; two for many, so that each result is contiguous."""
        if x.shape[:-1].numel() <= FEW_ROWS:
            return self.ops.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        biases = (None, None) if self.gate_up_bias is None else self.gate_up_bias.chunk(2)
        return [self.ops.linear(x, w, b) for w, b in zip(self.gate_up.chunk(2), biases, strict=True)]
