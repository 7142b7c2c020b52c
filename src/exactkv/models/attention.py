"""An attention layer: project, norm, rotate, extend the cache, attend, project."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.cache import AttentionLayer, Step
from exactkv.models.blocks import in_blocks
from exactkv.models.norm import RMSNorm, compute_dtype, unit_norm
from exactkv.models.rope import Rotation, rotate
from exactkv.models.spec import AttentionSpec, DecoderSpec, QueryTemperature, RopeSpec
from exactkv.ops import Ops


class Attention:
    """``weights``: by name within the layer, such as "qkv.weight"; see spec.parameters. The norm before the
    projections is part of it."""

    def __init__(self, spec: AttentionSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops):
        self.spec, self.ops, self.eps = spec, ops, decoder.norm_eps
        self.norm = RMSNorm(weights["norm.weight"], decoder.norm_eps, decoder.norm_offset)
        self.qkv, self.qkv_bias = weights["qkv.weight"], weights.get("qkv.bias")
        self.out, self.out_bias = weights["out.weight"], weights.get("out.bias")
        self.qk_weight: Tensor | None = None  # [Hq + H, D]: q's norm and k's, done as one
        if spec.qk_norm == "weighted":
            q, k = (
                RMSNorm(weights[f"{name}.weight"], decoder.norm_eps, decoder.norm_offset).weight
                for name in ("q_norm", "k_norm")
            )
            self.qk_weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def __call__(
        self,
        x: Tensor,
        step: Step,
        layer: AttentionLayer,
        rotations: Mapping[RopeSpec, Rotation],
        queries: str = "all",
    ) -> Tensor | None:
        """``x`` [B, T, hidden] -> [B, T, hidden]. ``queries``: for which positions there is a result; all are
        written to the cache. "last": each row's last valid one, [B, 1, hidden]; "none": None."""
        s = self.spec
        rotation = rotations[s.rope] if s.rope is not None else ()
        qk, v = in_blocks(self._project, x, *rotation)
        q, k = qk.split((s.num_heads, s.num_kv_heads), dim=2)  # [B, T, heads, D]
        if s.temperature is not None:
            q = q * temperature(s.temperature, step.positions, q.dtype)
        view = layer.extend(step, {"k": k.transpose(1, 2), "v": v.transpose(1, 2)})
        if queries == "none":
            return None
        if queries == "last":
            q, view = last_of_rows(q, step), view.last()
        attended = self.ops.attend(q.transpose(1, 2), view, s.scale)  # [B, Hq, T or 1, D]
        return self.ops.linear(attended.transpose(1, 2).flatten(2), self.out, self.out_bias)

    def _project(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, hidden] -> queries and keys side by side, [B, T, Hq + H, D], and values [B, T, H, D]."""
        s = self.spec
        heads = s.num_heads + s.num_kv_heads
        qkv = self.ops.linear(self.norm(x), self.qkv, self.qkv_bias)
        qkv = qkv.view(*x.shape[:2], heads + s.num_kv_heads, s.head_dim)
        qk, v = qkv.split((heads, s.num_kv_heads), dim=2)
        if self.qk_weight is not None:
            qk = unit_norm(qk.to(self.qk_weight.dtype), self.eps).mul_(self.qk_weight).to(x.dtype)
        if cos is not None and sin is not None and s.rope is not None:
            qk = rotate(qk, cos, sin, s.rope.interleaved)
        if s.qk_norm == "unit":
            qk = unit_norm(qk, self.eps)
        return qk, v


def last_of_rows(x: Tensor, step: Step) -> Tensor:
    """Each row's last valid position of ``x`` [B, T, ...]: [B, 1, ...]. Of a row without any, position 0."""
    if step.width == 1:
        return x
    last = torch.tensor(step.counts, device=x.device).sub(1).clamp(min=0)
    return x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)


def temperature(spec: QueryTemperature, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each query, [B, T, 1, 1] in ``dtype``, for ``positions`` [B, T] (arXiv 2501.19399, as in
    Llama 4)."""
    p = positions.to(compute_dtype(dtype)) + 1.0
    scale = torch.log1p(torch.floor(p / spec.floor_scale)) * spec.scale + 1.0
    return scale[:, :, None, None].to(dtype)
