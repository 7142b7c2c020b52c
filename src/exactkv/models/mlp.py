"""The MLP, gated or plain."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import torch
from torch import Tensor

from exactkv.models.spec import MlpSpec
from exactkv.ops import Ops


class MLP:
    """``weights``: "gate_up.weight" [2·inter, hidden], gate first, or "up.weight" [inter, hidden], and
    "down.weight"; biases where there are."""

    def __init__(self, spec: MlpSpec, weights: Mapping[str, Tensor], ops: Ops):
        self.spec, self.ops = spec, ops
        name = "gate_up" if spec.gated else "up"
        self.up, self.up_bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        self.down, self.down_bias = weights["down.weight"], weights.get("down.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [B, T, hidden] or [N, hidden] -> the same shape."""
        up = self.ops.linear(x, self.up, self.up_bias)
        if not self.spec.gated:
            return self.ops.linear(self.ops.activate(up, self.spec.activation), self.down, self.down_bias)
        gate, up = up.chunk(2, dim=-1)
        if self.spec.gate_scale != 1.0:
            gate = gate * self.spec.gate_scale
        if self.spec.sparsity:
            gate = sparse(gate, self.spec.sparsity)
        return self.ops.linear(self.ops.gated(gate, up, self.spec.activation), self.down, self.down_bias)


def sparse(gate: Tensor, sparsity: float) -> Tensor:
    """What of ``gate`` [..., inter] exceeds the value under which a part ``sparsity`` of a normal distribution of
    its mean and deviation lies (Gemma 3n; arXiv 2411.07175, section 3, "statistical top-k")."""
    deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
    return torch.relu(gate - (mean + deviation * NormalDist().inv_cdf(sparsity)))
