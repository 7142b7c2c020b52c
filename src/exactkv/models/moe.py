"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.models.mlp import MLP
from exactkv.models.norm import compute_dtype, unit_norm
from exactkv.models.spec import MlpSpec, MoeSpec
from exactkv.ops import Ops


class MixtureOfExperts:
    """The chosen experts' outputs, each times its score, and the shared expert's, which sees every token."""

    def __init__(self, spec: MoeSpec, weights: Mapping[str, Tensor], ops: Ops, eps: float = 0.0):
        self.spec, self.ops, self.eps = spec, ops, eps
        self.router_scale, self.expert_scale = weights.get("router.scale"), weights.get("expert_scale")
        self.router, self.router_bias = weights["router.weight"], weights.get("router.bias")
        self.score_bias = weights.get("score_bias")
        self.gate_up, self.gate_up_bias = weights["experts.gate_up.weight"], weights.get("experts.gate_up.bias")
        self.down, self.down_bias = weights["experts.down.weight"], weights.get("experts.down.bias")
        self.shared: MLP | None = None
        if spec.shared_intermediate_size:
            shared = {n.removeprefix("shared."): w for n, w in weights.items() if n.startswith("shared.")}
            self.shared = MLP(MlpSpec(spec.shared_intermediate_size, spec.activation), shared, ops)
        self.shared_gate = weights.get("shared_gate.weight")

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """``x`` [B, T, hidden] -> the same shape. ``routed_by``: what the router reads, if not ``x``."""
        s, flat = self.spec, x.reshape(-1, x.shape[-1])  # [N, hidden]
        scores, chosen = self._route(flat if routed_by is None else routed_by.reshape(flat.shape))
        scores = scores.to(x.dtype)[:, :, None]
        inputs = flat[:, None, :].expand(-1, s.top_k, -1)
        outputs = self.ops.experts(
            inputs * scores if s.scores_input else inputs,
            chosen, self.gate_up, self.down, s.activation, self.gate_up_bias, self.down_bias,
        )  # fmt: skip
        routed = (outputs if s.scores_input else outputs.mul_(scores)).sum(1).view_as(x)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.ops.linear(x, self.shared_gate))
        return shared.add_(routed)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores in the compute dtype and experts, [N, k] each. Without groups and bias the choice is made on the
        logits: scores may round to ties that logits are not."""
        s = self.spec
        if self.router_scale is not None:
            x = unit_norm(x, self.eps) * self.router_scale * x.shape[-1] ** -0.5
        logits = self.ops.linear(x, self.router, self.router_bias).to(compute_dtype(x.dtype))
        scores = torch.softmax(logits, -1) if s.scores == "softmax" else torch.sigmoid(logits)
        merit = logits if s.groups == 1 and self.score_bias is None else scores
        if self.score_bias is not None:
            merit = merit + self.score_bias.to(merit.dtype)
        if s.groups > 1:
            merit = self._within_best_groups(merit)
        _, chosen = self.ops.top_experts(merit, s.top_k)
        scores = scores.gather(1, chosen)
        if s.normalized:
            scores = scores / scores.sum(-1, keepdim=True)
        if self.expert_scale is not None:
            scores = scores * self.expert_scale.to(scores.dtype)[chosen]
        return scores * s.score_scale, chosen

    def _within_best_groups(self, merit: Tensor) -> Tensor:
        """``merit`` [N, E] with -inf outside the best groups (arXiv 2405.04434, section 2.2.2)."""
        s = self.spec
        grouped: Tensor = merit.unflatten(1, (s.groups, -1))
        best = grouped.topk(s.group_best, dim=-1).values.sum(-1)  # [N, groups]
        _, kept = self.ops.top_experts(best, s.top_groups)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
