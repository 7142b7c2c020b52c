"""Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import RMSNorm, compute_dtype, make_norm
from exactkv.models.recurrent.parts import Convolution, scanned
from exactkv.models.recurrent.spec import Mamba2Spec, MambaSpec
from exactkv.models.spec import DecoderSpec
from exactkv.ops import Ops


class Mamba:
    """See Recurrent."""

    def __init__(self, spec: MambaSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.conv = Convolution(weights, spec.activation, ops)
        dtype = compute_dtype(weights["A_log"].dtype)
        self.a = -weights["A_log"].to(dtype).exp()
        self.d, self.dt_bias = weights["D"].to(dtype), weights["dt_bias"].to(dtype)
        self.inner_norms: list[RMSNorm] = []
        if spec.inner_norm_eps is not None:
            names = ("dt_norm.weight", "B_norm.weight", "C_norm.weight")
            self.inner_norms = [RMSNorm(weights[name], spec.inner_norm_eps) for name in names]

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        s, weights, before = self.spec, self.weights, call.recurrent[self.slot].read(call.step)
        u, gate = in_blocks(self._project, x)  # [B, T, I] each
        rows = torch.cat((before["tail"], u), dim=1)
        u = self.conv(rows)
        selected = self.ops.linear(u, weights["select.weight"]).split((s.dt_rank, s.state_size, s.state_size), dim=-1)
        if self.inner_norms:
            selected = tuple(norm(t) for norm, t in zip(self.inner_norms, selected, strict=True))
        dt = self.ops.linear(selected[0], weights["dt.weight"]).to(self.a.dtype)
        dt = F.softplus(dt + self.dt_bias)
        u, b, c = (t.to(self.a.dtype) for t in (u, *selected[1:]))

        def scan(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
            y: tuple[Tensor, Tensor] = self.ops.selective_scan(
                u[:, part], dt[:, part], self.a, b[:, part], c[:, part], self.d, state
            )
            return y

        y = scanned(call, self.slot, rows, self.conv, before["state"], scan)
        if queries == "none":
            return None
        if queries == "last":
            y, gate = last_of_rows(y, call.step), last_of_rows(gate, call.step)
        y = self.ops.gated(gate.to(y.dtype), y, "silu").to(x.dtype)
        return self.ops.linear(y, weights["out.weight"], weights.get("out.bias"))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = x if self.norm is None else self.norm(x)
        return self.ops.linear(normed, self.weights["in.weight"], self.weights.get("in.bias")).chunk(2, dim=-1)


class Mamba2:
    """See Recurrent."""

    def __init__(self, spec: Mamba2Spec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.conv = Convolution(weights, spec.activation, ops)
        dtype = compute_dtype(weights["A_log"].dtype)
        self.a = -weights["A_log"].to(dtype).exp()
        self.d, self.dt_bias = weights["D"].to(dtype), weights["dt_bias"].to(dtype)
        self.norm_weight = weights["gated_norm.weight"].to(dtype) if spec.gated_norm else None
        self.scales: Tensor | None = None
        if spec.scales is not None:
            each = torch.tensor(spec.scales, dtype=weights["in.weight"].dtype, device=self.a.device)
            self.scales = each.repeat_interleave(torch.tensor(spec.sections, device=self.a.device))

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        s, before = self.spec, call.recurrent[self.slot].read(call.step)
        gate, mixed, dt = in_blocks(self._project, x)
        rows = torch.cat((before["tail"], mixed), dim=1)
        u, b, c = self.conv(rows).to(self.a.dtype).split(s.sections[1:4], dim=-1)
        u, b, c = u.unflatten(-1, (s.num_heads, -1)), *(t.unflatten(-1, (s.num_groups, -1)) for t in (b, c))
        dt = F.softplus(dt.to(self.a.dtype) + self.dt_bias).clamp(s.dt_min, s.dt_max)

        def scan(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
            y: tuple[Tensor, Tensor] = self.ops.ssd_scan(
                u[:, part], dt[:, part], self.a, b[:, part], c[:, part], self.d, state
            )
            return y

        y = scanned(call, self.slot, rows, self.conv, before["state"], scan).flatten(2)
        if queries == "none":
            return None
        if queries == "last":
            y, gate = last_of_rows(y, call.step), last_of_rows(gate, call.step)
        y = self._gated(y, gate.to(y.dtype)).to(x.dtype)
        return self.ops.linear(y, self.weights["out.weight"], self.weights.get("out.bias"))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x`` [B, T, hidden] -> gate [B, T, I], what is convolved, and Δ before its bias [B, T, H]."""
        normed = x if self.norm is None else self.norm(x)
        both = self.ops.linear(normed, self.weights["in.weight"], self.weights.get("in.bias"))
        if self.scales is not None:
            both = both * self.scales
        inner, heads = self.spec.inner_size, self.spec.num_heads
        sections: tuple[Tensor, ...] = both.split((inner, both.shape[-1] - inner - heads, heads), dim=-1)
        return sections

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """``y`` times its gate, normed before or after."""
        if self.norm_weight is None:
            out: Tensor = self.ops.gated(gate, y, "silu")
            return out
        if self.spec.gated_norm == "after":
            y = self.ops.gated(gate, y, "silu")
        grouped = y.unflatten(-1, (self.spec.norm_groups, -1))
        y = F.rms_norm(grouped, grouped.shape[-1:], None, self.spec.norm_eps).flatten(-2) * self.norm_weight
        return self.ops.gated(gate, y, "silu") if self.spec.gated_norm == "before" else y
