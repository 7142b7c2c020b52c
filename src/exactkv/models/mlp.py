"""The gated MLP."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from exactkv.ops import Ops


class GatedMLP:
    """down(act(gate x) · up x); ``weights``: "gate_up.weight" [2·inter, hidden], gate first, "down.weight"."""

    def __init__(self, activation: str, weights: Mapping[str, Tensor], ops: Ops):
        self.activation, self.ops = activation, ops
        self.gate_up, self.gate_up_bias = weights["gate_up.weight"], weights.get("gate_up.bias")
        self.down, self.down_bias = weights["down.weight"], weights.get("down.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [B, T, hidden] or [N, hidden] -> the same shape."""
        gate, up = self.ops.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return self.ops.linear(self.ops.gated(gate, up, self.activation), self.down, self.down_bias)
