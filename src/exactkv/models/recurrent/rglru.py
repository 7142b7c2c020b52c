"""Griffin's recurrent block (arXiv 2402.19427, section 2.4), as in RecurrentGemma."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import compute_dtype, make_norm
from exactkv.models.recurrent.parts import Convolution, scanned
from exactkv.models.recurrent.spec import RgLruSpec
from exactkv.models.spec import DecoderSpec
from exactkv.ops import Ops


class RgLru:
    """See Recurrent."""

    def __init__(self, spec: RgLruSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.conv = Convolution(weights, None, ops)
        self.rate = weights["rate"].to(compute_dtype(weights["rate"].dtype))

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        weights, before, dtype = self.weights, call.recurrent[self.slot].read(call.step), self.rate.dtype
        u, y_branch = in_blocks(self._project, x)  # [B, T, size] each
        rows = torch.cat((before["tail"], u), dim=1)
        u = self.conv(rows)
        recurrence, gate = (self._gate(u, name).to(dtype) for name in ("recurrence", "input"))
        u, first = u.to(dtype), call.positions == 0

        def scan(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
            h: tuple[Tensor, Tensor] = self.ops.rg_lru(
                u[:, part], recurrence[:, part], gate[:, part], self.rate, first[:, part], state
            )
            return h

        h = scanned(call, self.slot, rows, self.conv, before["state"], scan)
        if queries == "none":
            return None
        if queries == "last":
            h, y_branch = last_of_rows(h, call.step), last_of_rows(y_branch, call.step)
        return self.ops.linear(h.to(x.dtype) * y_branch, weights["out.weight"], weights["out.bias"])

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        w, normed = self.weights, x if self.norm is None else self.norm(x)
        y = self.ops.activate(self.ops.linear(normed, w["y.weight"], w["y.bias"]), self.spec.activation)
        return self.ops.linear(normed, w["x.weight"], w["x.bias"]), y

    def _gate(self, u: Tensor, name: str) -> Tensor:
        """A gate before its sigmoid: each block of ``u`` [B, T, size] times its own matrix [in, out]."""
        blocks = u.unflatten(-1, (self.spec.num_blocks, -1))
        weight, bias = self.weights[f"{name}_gate.weight"], self.weights[f"{name}_gate.bias"]
        return (torch.einsum("bthi,hio->btho", blocks, weight) + bias).flatten(2)
