"""The gated delta net (arXiv 2412.06464), as in Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import RMSNorm, compute_dtype, make_norm
from exactkv.models.recurrent.parts import Convolution, scanned
from exactkv.models.recurrent.spec import GatedDeltaSpec
from exactkv.models.spec import DecoderSpec
from exactkv.ops import Ops


class GatedDeltaNet:
    """See Recurrent."""

    def __init__(self, spec: GatedDeltaSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.conv = Convolution(weights, spec.activation, ops)
        self.gated_norm = RMSNorm(weights["gated_norm.weight"], spec.norm_eps)
        dtype = compute_dtype(weights["A_log"].dtype)
        self.a, self.dt_bias = -weights["A_log"].to(dtype).exp(), weights["dt_bias"].to(dtype)

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        s, before, dtype = self.spec, call.recurrent[self.slot].read(call.step), self.a.dtype
        mixed, gate, rate, step = in_blocks(self._project, x)
        rows = torch.cat((before["tail"], mixed), dim=1)
        q, k, v = self.conv(rows).to(dtype).split(s.sections, dim=-1)
        group = s.num_value_heads // s.num_key_heads
        q, k = (unit(t.unflatten(-1, (s.num_key_heads, -1))).repeat_interleave(group, dim=2) for t in (q, k))
        q, v = q * s.key_dim**-0.5, v.unflatten(-1, (s.num_value_heads, -1))
        beta = torch.sigmoid(rate.to(dtype))
        decay = self.a * F.softplus(step.to(dtype) + self.dt_bias)

        def scan(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
            y: tuple[Tensor, Tensor] = self.ops.gated_delta_rule(
                q[:, part], k[:, part], v[:, part], decay[:, part], beta[:, part], state
            )
            return y

        y = scanned(call, self.slot, rows, self.conv, before["state"], scan)  # [B, T, heads, V]
        if queries == "none":
            return None
        if queries == "last":
            y, gate = last_of_rows(y, call.step), last_of_rows(gate, call.step)
        y = self.ops.gated(gate.to(dtype), self.gated_norm(y), "silu").to(x.dtype)
        return self.ops.linear(y.flatten(2), self.weights["out.weight"])

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x`` [B, T, hidden] -> q, k and v side by side, which are convolved; the gate [B, T, heads, V]; β before
        the sigmoid and Δ before its bias [B, T, heads]. In the weights each key head's q, k, v and gate, and its β
        and Δ, stand together."""
        s, normed = self.spec, x if self.norm is None else self.norm(x)
        values = s.num_value_heads // s.num_key_heads
        each = self.ops.linear(normed, self.weights["qkvz.weight"]).unflatten(-1, (s.num_key_heads, -1))
        *qkv, gate = each.split((s.key_dim, s.key_dim, values * s.value_dim, values * s.value_dim), dim=-1)
        rates = self.ops.linear(normed, self.weights["ba.weight"]).unflatten(-1, (s.num_key_heads, 2, values))
        rate, step = (t.flatten(2) for t in rates.unbind(-2))
        return torch.cat([t.flatten(2) for t in qkv], dim=-1), gate.reshape(*x.shape[:2], -1, s.value_dim), rate, step


def unit(x: Tensor) -> Tensor:
    """``x`` of length 1 over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
