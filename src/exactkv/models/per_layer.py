"""An input of its own for every layer, beside the residual stream (Gemma 3n and Gemma 4, "per-layer embeddings")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.models.norm import RMSNorm
from exactkv.models.spec import PerLayerSpec
from exactkv.ops import Ops


class PerLayerInputs:
    """A token's input for each layer: its embedding there, scaled, and a projection of its first embedding."""

    def __init__(self, spec: PerLayerSpec, weights: Mapping[str, Tensor], eps: float, ops: Ops):
        self.spec, self.ops = spec, ops
        self.embedding, self.projection = weights["embedding.weight"], weights["projection.weight"]
        self.norm = RMSNorm(weights["norm.weight"], eps)
        self.scale = torch.tensor(spec.size**0.5, dtype=self.embedding.dtype).item()

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """``tokens`` [B, T] and their embeddings ``x`` [B, T, hidden] -> [B, T, layers, size]. Tokens outside the
        smaller vocabulary have the embedding of token 0."""
        known = tokens.masked_fill(tokens >= self.spec.vocab_size, 0)
        own: Tensor = F.embedding(known, self.embedding).unflatten(-1, (-1, self.spec.size)) * self.scale
        projected: Tensor = self.ops.linear(x, self.projection) * x.shape[-1] ** -0.5
        return (own + self.norm(projected.unflatten(-1, (-1, self.spec.size)))) * 2**-0.5


class PerLayerGate:
    """norm(out(act(gate x) · given)): what a layer's own input adds to it."""

    def __init__(self, spec: PerLayerSpec, weights: Mapping[str, Tensor], eps: float, ops: Ops):
        self.activation, self.ops = spec.activation, ops
        self.gate, self.out = weights["gate.weight"], weights["out.weight"]
        self.norm = RMSNorm(weights["post_norm.weight"], eps)

    def __call__(self, x: Tensor, given: Tensor) -> tuple[Tensor]:
        """``x`` [B, T, hidden], ``given`` [B, T, size] -> [B, T, hidden]."""
        gated = self.ops.gated(self.ops.linear(x, self.gate), given, self.activation)
        return (self.norm(self.ops.linear(gated, self.out)),)
