"""The one decoder, built from a spec: tokens -> embeddings -> layers -> logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.cache import CacheSpec, Step
from exactkv.errors import InputError
from exactkv.models.attention import Attention
from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.latent import LatentAttention
from exactkv.models.mlp import MLP
from exactkv.models.moe import MixtureOfExperts
from exactkv.models.norm import Norm, RMSNorm, make_norm
from exactkv.models.per_layer import PerLayerGate, PerLayerInputs
from exactkv.models.recurrent.mixer import make_recurrent
from exactkv.models.rope import Rotation, frequencies, rotation
from exactkv.models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, MlpSpec, MoeSpec, RopeSpec
from exactkv.models.streams import Laurel, StreamedLayer, Streams
from exactkv.ops import TORCH, Ops
from exactkv.ops.linear import embedding

LOGITS = ("all", "last", "none")


class Layer:
    """One layer, the ``number``-th of the decoder: see LayerSpec."""

    def __init__(self, decoder: DecoderSpec, number: int, weights: Mapping[str, Tensor], ops: Ops):
        self.spec = spec = decoder.layers[number]
        self.mlp_norm = make_norm(decoder, weights, "mlp.norm")
        self.attention_post_norm = make_norm(decoder, weights, "attention.post_norm")
        self.mlp_post_norm = make_norm(decoder, weights, "mlp.post_norm")
        own, slot = within(weights, "attention"), decoder.cache_slots[number]
        self.attention: Attention | LatentAttention | None = None
        if isinstance(spec.attention, AttentionSpec) and slot is not None:
            self.attention = Attention(spec.attention, decoder, own, ops, number, slot)
        elif isinstance(spec.attention, LatentAttentionSpec) and slot is not None:
            self.attention = LatentAttention(spec.attention, decoder, own, ops, slot)
        self.recurrent, slot = None, decoder.recurrent_slots[number]
        if spec.recurrent is not None and slot is not None:
            self.recurrent = make_recurrent(spec.recurrent, decoder, within(weights, "recurrent"), ops, slot)
        self.mlp: MLP | MixtureOfExperts | None = None
        if isinstance(spec.mlp, MlpSpec):
            self.mlp = MLP(spec.mlp, within(weights, "mlp"), ops)
        elif spec.mlp is not None:
            self.mlp = MixtureOfExperts(spec.mlp, within(weights, "mlp"), ops)
        self.beside: MixtureBeside | None = None
        if spec.beside is not None:
            self.beside = MixtureBeside(spec.beside, decoder, weights, ops)
        laurel = within(weights, "laurel")
        self.laurel = Laurel(laurel, decoder.norm_eps, ops) if laurel else None
        self.gate, self.number = None, number
        if decoder.per_layer is not None and decoder.streams == 1:
            self.gate = PerLayerGate(decoder.per_layer, within(weights, "per_layer"), decoder.norm_eps, ops)
        self.scale = weights.get("scale")

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor:
        """``x`` [B, T, hidden] -> the same; for ``queries`` "last" (see Attention) [B, 1, hidden]; for "none" it
        is left as it was."""
        added = self._mixed(x, call, queries)
        if added is None:
            return x
        if queries == "last":
            x = last_of_rows(x, call.step)
        y = x + self._scaled(added, self.attention_post_norm)
        if self.laurel is not None:
            y = y.add_(self.laurel(x)).mul_(2**-0.5)
        source = x if self.spec.parallel else y
        if isinstance(self.mlp, MLP) and self.beside is None:
            y = y.add_(*in_blocks(self._mlp, source))
        elif self.mlp is not None:
            y = y.add_(*self._mlp(source))
        if self.gate is not None and call.per_layer is not None:
            own = call.per_layer[:, :, self.number]
            y = y.add_(*in_blocks(self.gate, y, last_of_rows(own, call.step) if queries == "last" else own))
        return y if self.scale is None else y.mul_(self.scale)

    def _mixed(self, x: Tensor, call: Call, queries: str) -> Tensor | None:
        """What attention and recurrence give together."""
        attended = None if self.attention is None else self.attention(x, call, queries)
        carried = None if self.recurrent is None else self.recurrent(x, call, queries)
        if attended is None or carried is None:
            scale = self.spec.attention_scale if carried is None else self.spec.recurrent_scale
            one = attended if carried is None else carried
            return one if one is None or scale == 1.0 else one * scale
        return attended * self.spec.attention_scale + carried * self.spec.recurrent_scale

    def _mlp(self, x: Tensor) -> tuple[Tensor]:
        assert self.mlp is not None
        added = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        added = added if self.spec.mlp_scale == 1.0 else added * self.spec.mlp_scale
        if self.beside is not None:
            added = self.beside(x, added)
        return (self._scaled(added, self.mlp_post_norm),)

    def _scaled(self, added: Tensor, norm: Norm | None) -> Tensor:
        """What is added to the residual: normed and scaled, where the spec says so."""
        if norm is not None:
            added = norm(added)
        return added if self.spec.residual_scale == 1.0 else added * self.spec.residual_scale


class MixtureBeside:
    """A mixture of experts beside a layer's MLP (Gemma 4): norm(MLP's) + norm(experts(norm x))."""

    def __init__(self, spec: MoeSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops):
        names = ("mlp.own_norm", "beside.norm", "beside.own_norm")
        self.mlp_norm, self.norm, self.own_norm = (
            RMSNorm(weights[f"{n}.weight"], decoder.norm_eps, decoder.norm_offset) for n in names
        )
        self.experts = MixtureOfExperts(spec, within(weights, "beside"), ops, decoder.norm_eps)

    def __call__(self, x: Tensor, from_mlp: Tensor) -> Tensor:
        """``x`` [B, T, hidden], and what the MLP made of it -> the same shape."""
        return self.mlp_norm(from_mlp) + self.own_norm(self.experts(self.norm(x), routed_by=x))


def make_layer(decoder: DecoderSpec, number: int, weights: Mapping[str, Tensor], ops: Ops) -> Layer | StreamedLayer:
    """The ``number``-th layer; of several streams it computes one."""
    layer = Layer(decoder, number, weights, ops)
    if decoder.streams == 1:
        return layer
    gate, eps = None, decoder.norm_eps
    if decoder.per_layer is not None:
        gate = PerLayerGate(decoder.per_layer, within(weights, "per_layer"), eps, ops)
    return StreamedLayer(layer, gate, number, within(weights, "streams"), eps, ops)


class Decoder:
    """``weights``: every tensor of ``parameters(spec)`` by name, of one dtype and on one device."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops = TORCH):
        self.spec, self.weights, self.ops = spec, dict(weights), ops
        self.embedding, self.positions = weights["embedding.weight"], weights.get("positions.weight")
        self.head = self.embedding if spec.tied_head else weights["head.weight"]
        self.head_bias = weights.get("head.bias")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.final_norm = make_norm(spec, weights, "final_norm")
        self.layers = [make_layer(spec, i, within(weights, f"layers.{i}"), ops) for i in range(len(spec.layers))]
        self.streams = Streams(within(weights, "streams"), ops) if spec.streams > 1 else None
        self.per_layer: PerLayerInputs | None = None
        if spec.per_layer is not None:
            self.per_layer = PerLayerInputs(spec.per_layer, within(weights, "per_layer"), spec.norm_eps, ops)
        self.last_writer = max(i for i, layer in enumerate(spec.layers) if layer.shares is None)
        self.embedding_scale = (
            None if spec.embedding_scale is None else torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        )
        self.ropes = spec.ropes
        self._frequencies: dict[RopeSpec, Tensor] = {}

    def __call__(self, tokens: Tensor, step: Step, cache: CacheSpec, logits: str, max_length: int) -> Tensor | None:
        """Walk one call. ``tokens`` [B, T] int64 on the decoder's device, as wide as the step; ``cache``: its
        layers. ``logits``: "all" -> [B, T, V], "last" -> [B, V], each row's last valid position, "none" -> None.
        What stands at padded positions is NaN. ``max_length``: what rope variants follow that depend on length."""
        x = self._embedded(tokens, step)  # [B, T, hidden]
        rotations = self._rotations(step.positions, max_length)
        own = None if self.per_layer is None else self.per_layer(tokens, x)
        call = Call(step, step.positions, rotations, cache.layers, cache.recurrent, own)
        if self.streams is not None:
            x = self.streams.spread(x)
        for i, layer in enumerate(self.layers):
            # Once no layer writes to the cache any more, results are needed only where logits are.
            if i == self.last_writer:
                x = layer(x, call, logits)
                if logits == "none":
                    return None
                call = call.last() if logits == "last" else call
            else:
                x = layer(x, call)
        out = self._logits(x if self.streams is None else self.streams.merge(x))
        if min(step.counts) < step.width:
            counts = torch.tensor(step.counts, device=out.device)
            valid = counts[:, None] > torch.arange(out.shape[1], device=out.device)
            out.masked_fill_(~valid.unsqueeze(-1), torch.nan)
        return out[:, 0] if logits == "last" else out

    def _embedded(self, tokens: Tensor, step: Step) -> Tensor:
        x = embedding(tokens, self.embedding)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.positions is not None:  # a padded token's position may lie beyond the last one
            x = x + F.embedding(step.positions.clamp(max=self.positions.shape[0] - 1), self.positions)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        out = self.ops.linear(x if self.final_norm is None else self.final_norm(x), self.head, self.head_bias)
        if self.spec.logit_scale != 1.0:
            out.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return out if cap is None else out.div_(cap).tanh_().mul_(cap)

    def _rotations(self, positions: Tensor, max_length: int) -> dict[RopeSpec, Rotation]:
        """Each rope variant's rotations at ``positions``; frequencies are computed once."""
        found = {}
        for rope in self.ropes:
            settled = rope.settled(max_length)
            if settled not in self._frequencies:
                self._frequencies[settled] = frequencies(settled, self.dtype, self.device)
            found[rope] = rotation(settled, self._frequencies[settled], positions)
        return found


def check_logits(logits: str) -> None:
    """Raise InputError where ``logits`` names nothing that a call returns."""
    if logits not in LOGITS:
        raise InputError(f"logits is {logits!r}; expected one of: {', '.join(LOGITS)}")


def within(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights under ``prefix``, by the rest of their names."""
    return {n[len(prefix) + 1 :]: w for n, w in weights.items() if n.startswith(prefix + ".")}
