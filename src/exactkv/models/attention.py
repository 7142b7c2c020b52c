"""An attention layer: project, norm, rotate, extend the cache, attend, project."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.cache import KVView
from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import RMSNorm, compute_dtype, make_norm, unit_norm
from exactkv.models.rope import rotate
from exactkv.models.spec import AttentionSpec, DecoderSpec, QueryTemperature
from exactkv.ops import Ops


class Attention:
    """``weights``: by name within the layer, such as "qkv.weight"; see parameters.py. The norm before the
    projections is part of it. ``number``: the layer's in the decoder; ``slot``: its place among the cache's layers,
    that of the layer whose rows it shares if it has none."""

    def __init__(
        self, spec: AttentionSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, number: int, slot: int
    ):
        self.spec, self.ops, self.eps, self.number, self.slot = spec, ops, decoder.norm_eps, number, slot
        self.norm = make_norm(decoder, weights, "norm")
        self.qkv, self.qkv_bias = weights["qkv.weight"], weights.get("qkv.bias")
        self.out, self.out_bias = weights["out.weight"], weights.get("out.bias")
        self.sinks = weights.get("sinks")
        self.qk_heads = (spec.num_heads, spec.num_kv_heads if spec.shares is None else 0)
        norms = [
            RMSNorm(weights[f"{name}.weight"], decoder.norm_eps, decoder.norm_offset).weight
            for name in ("q_norm", "k_norm")
            if f"{name}.weight" in weights
        ]
        self.qk_weight: Tensor | None = None  # [Hq + H, D]: q's norm and k's, done as one
        if norms and spec.qk_norm == "head":
            self.qk_weight = torch.cat([w.expand(n, -1) for w, n in zip(norms, self.qk_heads, strict=False)])
        elif norms:
            self.qk_weight = torch.cat(norms).view(-1, spec.head_dim)

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        """``x`` [B, T, hidden] -> [B, T, hidden]. ``queries``: for which positions there is a result; all are
        written to the cache. "last": each row's last valid one, [B, 1, hidden]; "none": None."""
        s = self.spec
        rotation = call.rotations[s.rope] if s.rope is not None else ()
        qk, *v = in_blocks(self._project, x, *rotation)
        gate = v.pop() if s.gated else None
        q, k = qk.split(self.qk_heads, dim=2)  # [B, T, heads, D]
        if s.temperature is not None:
            q = q * temperature(s.temperature, call.positions, q.dtype)
        view = self._view(call, k, *v)
        if queries == "none":
            return None
        if queries == "last":
            q, view = last_of_rows(q, call.step), view.last()
            gate = gate if gate is None else last_of_rows(gate, call.step)
        attended = self.ops.attend(q.transpose(1, 2), view, s.scale, s.softcap, self.sinks)  # [B, Hq, T or 1, D]
        attended = attended.transpose(1, 2)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.ops.linear(attended.flatten(2), self.out, self.out_bias)

    def _view(self, call: Call, k: Tensor, *v: Tensor) -> KVView:
        """What the queries see, with these keys and values written first, or as the layer that has them showed it."""
        if self.spec.shares is None:
            rows = {"k": k.transpose(1, 2), "v": v[0].transpose(1, 2)}
            call.views[self.number] = call.layers[self.slot].extend(call.step, rows)
            return call.views[self.number]
        return call.views[self.spec.shares]

    def _project(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> tuple[Tensor, ...]:
        """``x`` [B, T, hidden] -> queries and keys side by side, [B, T, Hq + H, D], and values [B, T, H, D]; without
        rows of its own, the queries alone; the gate [B, T, Hq, D] last, if there is one."""
        s = self.spec
        qkv = self.ops.linear(x if self.norm is None else self.norm(x), self.qkv, self.qkv_bias)
        qkv = qkv.view(*x.shape[:2], -1, s.head_dim)
        gate: list[Tensor] = []
        if s.gated:
            q, *gate, kv = qkv.split((s.num_heads, s.num_heads, 2 * s.num_kv_heads), dim=2)
            qkv = torch.cat((q, kv), dim=2)
        heads = sum(self.qk_heads)
        qk, v = qkv[:, :, :heads], qkv[:, :, s.num_heads if s.keys_as_values else heads :]
        if self.qk_weight is not None:
            qk = self._normed(qk.to(self.qk_weight.dtype)).mul_(self.qk_weight).to(x.dtype)
        if cos is not None and sin is not None and s.rope is not None:
            qk = rotate(qk, cos, sin, s.rope.interleaved)
        if s.qk_norm == "unit":
            qk = unit_norm(qk, self.eps)
        if s.shares is not None:
            return (qk,)
        return qk, unit_norm(v, self.eps) if s.v_norm else v, *gate

    def _normed(self, qk: Tensor) -> Tensor:
        if self.spec.qk_norm == "head":
            return unit_norm(qk, self.eps)
        both = qk.split(self.qk_heads, dim=2)
        return torch.cat([unit_norm(t.flatten(2), self.eps).view_as(t) for t in both], dim=2)


def temperature(spec: QueryTemperature, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each query, [B, T, 1, 1] in ``dtype``, for ``positions`` [B, T] (arXiv 2501.19399, as in
    Llama 4)."""
    p = positions.to(compute_dtype(dtype)) + float(spec.first)
    scale = torch.log1p(torch.floor(p / spec.floor_scale)) * spec.scale + 1.0
    return scale[:, :, None, None].to(dtype)
