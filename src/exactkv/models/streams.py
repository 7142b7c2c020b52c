"""Several residual streams, of which each layer computes one (AltUp, arXiv 2301.13310, section 3, as in Gemma 3n),
and the low-rank path beside attention (LAuReL, arXiv 2411.07501, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import RMSNorm, compute_dtype
from exactkv.models.per_layer import PerLayerGate
from exactkv.ops import Ops

FLOOR = 1e-5  # of a mean square


class Streams:
    """The embeddings become the first stream and, projected to the same size, the others; at the end they are
    projected back and averaged."""

    def __init__(self, weights: Mapping[str, Tensor], ops: Ops):
        self.into, self.out, self.ops = weights["into.weight"], weights["out.weight"], ops

    def spread(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, streams, hidden]"""
        others = self.ops.linear(x, self.into).unflatten(-1, (-1, x.shape[-1]))
        return torch.cat((x.unsqueeze(2), as_large_as(x.unsqueeze(2), others)), dim=2)

    def merge(self, x: Tensor) -> Tensor:
        """[B, T, streams, hidden] -> [B, T, hidden]"""
        first, hidden = x[:, :, :1], x.shape[-1]
        projections = self.out.view(-1, hidden, hidden)
        others = [self.ops.linear(x[:, :, i + 1], w) for i, w in enumerate(projections)]
        return torch.cat((first, as_large_as(first, torch.stack(others, dim=2))), dim=2).mean(2)


def as_large_as(model: Tensor, x: Tensor) -> Tensor:
    """``x`` scaled to the root mean square of ``model``, over the last axis."""
    wanted, found = (t.square().mean(-1, keepdim=True) for t in (model, x))
    return x * (wanted.sqrt() / found.clamp(min=FLOOR).sqrt())


class StreamedLayer:
    """Predict all streams from all, compute the first one's layer, correct all by what it differs from its
    prediction; then give the other streams the layer's own input."""

    def __init__(
        self,
        inner: Callable[[Tensor, Call, str], Tensor],
        gate: PerLayerGate | None,
        number: int,
        weights: Mapping[str, Tensor],
        eps: float,
        ops: Ops,
    ):
        self.inner, self.gate, self.number, self.ops = inner, gate, number, ops
        self.norm, self.router = RMSNorm(weights["norm.weight"], eps), weights["router.weight"]
        self.prediction, self.correction = weights["predict.weight"], weights["correct.weight"]
        self.scale = weights["scale"]

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor:
        """``x`` [B, T, streams, hidden] -> the same; see Layer."""
        count = x.shape[2]
        mixing: Tensor = self.ops.linear(self._modes(x[:, :, 0]), self.prediction).unflatten(-1, (count, count))
        predicted = mixing @ x + x
        computed = self.inner(predicted[:, :, 0], call, queries)
        if queries == "none":
            return x
        if queries == "last":
            predicted = last_of_rows(predicted, call.step)
            call = call.last()
        innovation = (computed - predicted[:, :, 0]).unsqueeze(2)
        weights = self.ops.linear(self._modes(computed), self.correction).unsqueeze(-1) + 1.0
        corrected = innovation * weights + predicted
        if self.gate is not None and call.per_layer is not None:
            (added,) = self.gate(corrected[:, :, 0] * self.scale, call.per_layer[:, :, self.number])
            corrected[:, :, 1:] += added.unsqueeze(2)
        return corrected

    def _modes(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, streams]"""
        routed = self.ops.linear(self.norm(x) * x.shape[-1] ** -1.0, self.router)
        return torch.tanh(routed.to(compute_dtype(x.dtype))).to(x.dtype)


class Laurel:
    """normed + norm(up(down(normed))), where normed is the layer's input after a norm."""

    def __init__(self, weights: Mapping[str, Tensor], eps: float, ops: Ops):
        self.ops, self.down, self.up = ops, weights["down.weight"], weights["up.weight"]
        self.norm, self.post_norm = (RMSNorm(weights[f"{n}.weight"], eps) for n in ("norm", "post_norm"))

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return normed + self.post_norm(self.ops.linear(self.ops.linear(normed, self.down), self.up))
