"""An attention layer: project, norm, rotate, extend the cache, attend, project."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.cache import AttentionLayer, Step
from exactkv.models.norm import RMSNorm, compute_dtype, unit_norm
from exactkv.models.rope import Rotation
from exactkv.models.spec import AttentionSpec, DecoderSpec, QueryTemperature, RopeSpec
from exactkv.ops import Ops


class Attention:
    """``weights``: by name within the layer, such as "qkv.weight"; see spec.parameters."""

    def __init__(self, spec: AttentionSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops):
        self.spec, self.ops, self.eps = spec, ops, decoder.norm_eps
        self.qkv, self.qkv_bias = weights["qkv.weight"], weights.get("qkv.bias")
        self.out, self.out_bias = weights["out.weight"], weights.get("out.bias")
        if spec.qk_norm == "weighted":
            self.q_norm = RMSNorm(weights["q_norm.weight"], decoder.norm_eps, decoder.norm_offset)
            self.k_norm = RMSNorm(weights["k_norm.weight"], decoder.norm_eps, decoder.norm_offset)

    def __call__(
        self, x: Tensor, step: Step, layer: AttentionLayer, rotations: Mapping[RopeSpec, Rotation]
    ) -> Tensor:
        """``x`` [B, T, hidden] -> [B, T, hidden]."""
        s = self.spec
        batch, width = x.shape[:2]
        qkv = self.ops.linear(x, self.qkv, self.qkv_bias).view(batch, width, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        qk, v = qkv.split((s.num_heads + s.num_kv_heads, s.num_kv_heads), dim=2)
        if s.qk_norm == "weighted":
            q, k = qk.split((s.num_heads, s.num_kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        if s.rope is not None:
            qk = rotations[s.rope](qk)
        if s.qk_norm == "unit":
            qk = unit_norm(qk, self.eps)
        q, k = qk.split((s.num_heads, s.num_kv_heads), dim=2)
        if s.temperature is not None:
            q = q * temperature(s.temperature, step.positions, q.dtype)
        view = layer.extend(step, {"k": k.transpose(1, 2), "v": v.transpose(1, 2)})
        attended = self.ops.attend(q.transpose(1, 2), view, s.scale)  # [B, Hq, T, D]
        return self.ops.linear(attended.transpose(1, 2).reshape(batch, width, -1), self.out, self.out_bias)


def temperature(spec: QueryTemperature, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each query, [B, T, 1, 1] in ``dtype``, for ``positions`` [B, T] (arXiv 2501.19399, as in
    Llama 4)."""
    p = positions.to(compute_dtype(dtype)) + 1.0
    scale = torch.log1p(torch.floor(p / spec.floor_scale)) * spec.scale + 1.0
    return scale[:, :, None, None].to(dtype)
