"""The one decoder, built from a spec: tokens -> embeddings -> layers -> logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.cache import AttentionLayer, Step
from exactkv.errors import InputError
from exactkv.models.attention import Attention, last_of_rows
from exactkv.models.blocks import in_blocks
from exactkv.models.mlp import GatedMLP
from exactkv.models.moe import MixtureOfExperts
from exactkv.models.norm import RMSNorm
from exactkv.models.rope import Rotation, frequencies, rotation
from exactkv.models.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from exactkv.ops import TORCH, Ops

LOGITS = ("all", "last", "none")


class Layer:
    """One layer: x + attention(norm x), then x + mlp(norm x), with norms on what is added if the spec says so."""

    def __init__(self, spec: LayerSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights[f"{name}.weight"], decoder.norm_eps, decoder.norm_offset)

        self.mlp_norm = norm("mlp.norm")
        self.attention_post_norm = norm("attention.post_norm") if spec.post_norms else None
        self.mlp_post_norm = norm("mlp.post_norm") if spec.post_norms else None
        self.attention = Attention(spec.attention, decoder, within(weights, "attention"), ops)
        self.mlp: GatedMLP | MixtureOfExperts
        if isinstance(spec.mlp, MlpSpec):
            self.mlp = GatedMLP(spec.mlp.activation, within(weights, "mlp"), ops)
        else:
            self.mlp = MixtureOfExperts(spec.mlp, within(weights, "mlp"), ops)

    def __call__(
        self,
        x: Tensor,
        step: Step,
        layer: AttentionLayer,
        rotations: Mapping[RopeSpec, Rotation],
        queries: str = "all",
    ) -> Tensor:
        """``x`` [B, T, hidden] -> the same; for ``queries`` "last" (see Attention) [B, 1, hidden]; for "none" it
        is left as it was."""
        added = self.attention(x, step, layer, rotations, queries)
        if added is None:
            return x
        if queries == "last":
            x = last_of_rows(x, step)
        x = x + (self.attention_post_norm(added) if self.attention_post_norm else added)
        if isinstance(self.mlp, GatedMLP):
            return x.add_(*in_blocks(self._mlp, x))
        return x.add_(*self._mlp(x))

    def _mlp(self, x: Tensor) -> tuple[Tensor]:
        added = self.mlp(self.mlp_norm(x))
        return (self.mlp_post_norm(added) if self.mlp_post_norm else added,)


class Decoder:
    """``weights``: every tensor of ``spec.parameters(spec)`` by name, of one dtype and on one device."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops = TORCH):
        self.spec, self.weights, self.ops = spec, dict(weights), ops
        self.embedding = weights["embedding.weight"]
        self.head = self.embedding if spec.tied_head else weights["head.weight"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.final_norm = RMSNorm(weights["final_norm.weight"], spec.norm_eps, spec.norm_offset)
        self.layers = [Layer(layer, spec, within(weights, f"layers.{i}"), ops) for i, layer in enumerate(spec.layers)]
        self.frequencies = {rope: frequencies(rope, self.dtype, self.device) for rope in spec.ropes}
        self.embedding_scale = (
            None if spec.embedding_scale is None else torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        )

    def __call__(self, tokens: Tensor, step: Step, layers: tuple[AttentionLayer, ...], logits: str) -> Tensor | None:
        """Walk one call. ``tokens`` [B, T] int64 on the decoder's device, as wide as the step; ``layers`` the
        cache's. ``logits``: "all" -> [B, T, V], "last" -> [B, V], each row's last valid position, "none" -> None.
        What stands at padded positions is NaN."""
        rotations = {rope: rotation(rope, freqs, step.positions) for rope, freqs in self.frequencies.items()}
        x = F.embedding(tokens, self.embedding)  # [B, T, hidden]
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        for mine, cached in zip(self.layers, layers, strict=True):
            # The last layer's results are needed only where logits are.
            queries = logits if mine is self.layers[-1] else "all"
            x = mine(x, step, cached, rotations, queries)
        if logits == "none":
            return None
        out = self.ops.linear(self.final_norm(x), self.head)
        if min(step.counts) < step.width:
            counts = torch.tensor(step.counts, device=out.device)
            valid = counts[:, None] > torch.arange(out.shape[1], device=out.device)
            out.masked_fill_(~valid.unsqueeze(-1), torch.nan)
        return out[:, 0] if logits == "last" else out


def check_logits(logits: str) -> None:
    """Raise InputError where ``logits`` names nothing that a call returns."""
    if logits not in LOGITS:
        raise InputError(f"logits is {logits!r}; expected one of: {', '.join(LOGITS)}")


def within(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights under ``prefix``, by the rest of their names."""
    return {n[len(prefix) + 1 :]: w for n, w in weights.items() if n.startswith(prefix + ".")}
