"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.models.mlp import GatedMLP
from exactkv.models.norm import compute_dtype
from exactkv.models.spec import MoeSpec
from exactkv.ops import Ops


class MixtureOfExperts:
    """Llama 4's: the sigmoid of a chosen router logit multiplies that expert's input; the shared expert sees
    every token."""

    def __init__(self, spec: MoeSpec, weights: Mapping[str, Tensor], ops: Ops):
        self.spec, self.ops = spec, ops
        self.router = weights["router.weight"]
        self.gate_up, self.down = weights["experts.gate_up.weight"], weights["experts.down.weight"]
        shared = {n.removeprefix("shared."): w for n, w in weights.items() if n.startswith("shared.")}
        self.shared = GatedMLP(spec.activation, shared, ops)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [N, hidden]
        logits, chosen = self.ops.top_experts(self.ops.linear(flat, self.router), self.spec.top_k)
        scores = torch.sigmoid(logits.to(compute_dtype(x.dtype))).to(x.dtype)  # [N, k]
        inputs = flat[:, None, :] * scores[:, :, None]
        routed = self.ops.experts(inputs, chosen, self.gate_up, self.down, self.spec.activation).sum(1)
        return self.shared(x) + routed.view_as(x)
