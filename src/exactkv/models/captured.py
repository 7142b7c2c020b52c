"""One batch size's decode step as a CUDA graph: its buffers, its kernels in order, its replay. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.cache import CacheSpec, RowTables, Step
from exactkv.models.attention import Attention
from exactkv.models.decoder import Decoder, Layer
from exactkv.models.mlp import MLP
from exactkv.models.moe import MixtureOfExperts
from exactkv.models.norm import RMSNorm
from exactkv.models.rope import frequencies
from exactkv.models.spec import AttentionSpec, RopeSpec
from exactkv.ops.triton import launch
from exactkv.ops.triton.launch import Heads, Scratch

PROGRAMS = 264
"""Programs that an attention kernel is split into at most: two a multiprocessor of an H200."""


class CapturedStep:
    """A step of ``rows`` rows of ``decoder``. ``logits`` [rows, V] and ``chosen`` [rows], the best token of each row,
    are overwritten by every replay."""

    def __init__(self, decoder: Decoder, cache: CacheSpec, rows: int, capture: bool = True):
        self.decoder, self.rows = decoder, rows
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        self.tables = RowTables(cache, rows, device)
        self.zones = [layer.places[0][0] for layer in cache.layers]
        layers = [layer for layer in decoder.layers if isinstance(layer, Layer)]
        self.layers = [(layer, _attention(layer)) for layer in layers]
        found = [attention.spec for _, attention in self.layers]
        self.ropes = {rope: i for i, rope in enumerate(decoder.ropes)}
        width = max(16, 1 << (max(a.head_dim for a in found) - 1).bit_length())

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.freqs = empty(len(self.ropes), width, dtype=torch.float32)
        self.amplitudes = torch.ones_like(self.freqs)
        self.cos, self.sin = (empty(len(self.ropes), rows, width, dtype=torch.float32) for _ in range(2))
        self.settled: tuple[RopeSpec, ...] | None = None
        self.x, self.other, self.normed = (empty(rows, spec.hidden_size) for _ in range(3))
        self.norms = [_norm_weight(attention) for _, attention in self.layers]
        self.splits = [_splits(rows, a.num_kv_heads) for a in found]
        self.scratch = [
            Scratch.make(rows, a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim, splits, device)
            for a, splits in dict.fromkeys(zip(found, self.splits, strict=True))
        ]
        kinds = list(dict.fromkeys(zip(found, self.splits, strict=True)))
        self.kinds = [kinds.index(kind) for kind in zip(found, self.splits, strict=True)]
        self.logits, self.chosen = empty(rows, spec.vocab_size), torch.zeros(rows, dtype=torch.int64, device=device)
        parts = -(-spec.vocab_size // launch.PART)
        self.values = empty(rows, parts, dtype=torch.float32)
        self.places = empty(rows, parts, dtype=torch.int32)
        self.graph: torch.cuda.CUDAGraph | None = None
        if capture:
            self._capture()

    def replay(self, step: Step, tokens: Sequence[int], settled: tuple[RopeSpec, ...]) -> None:
        """Tables for ``step``, then the graph. ``settled``: the rope variants of the cache."""
        if settled != self.settled:
            self.settled = None
            for i, rope in enumerate(settled):
                self._settle(i, rope)
            self.settled = settled
        self.tables.describe(step, tokens)
        if self.graph is None:
            self.forward()
        else:
            self.graph.replay()

    def _settle(self, i: int, rope: RopeSpec) -> None:
        """A variant's frequencies for each number of a head, negative where the sine is subtracted."""
        found = frequencies(rope, self.decoder.dtype, self.decoder.device)
        both = torch.stack((-found, found), -1).flatten() if rope.interleaved else torch.cat((-found, found))
        self.freqs[i].zero_()
        self.freqs[i, : rope.dim] = both
        self.amplitudes[i].fill_(1.0)
        self.amplitudes[i, : rope.dim] = rope.amplitude

    def _capture(self) -> None:
        """Run once, so that kernels are compiled, then capture; both with every row idle, which touches no row."""
        self.freqs.zero_()
        stream = torch.cuda.Stream(self.decoder.device)
        stream.wait_stream(torch.cuda.current_stream(self.decoder.device))
        with torch.cuda.stream(stream):
            self.forward()
        torch.cuda.current_stream(self.decoder.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        self.graph = graph

    def forward(self) -> None:
        """Launch every kernel of the step, in order."""
        d, t = self.decoder, self.tables
        launch.begin(t.tokens, self.chosen, t.positions, d.embedding, d.embedding_scale, self.freqs, self.amplitudes,
                     self.cos, self.sin, self.x)  # fmt: skip
        for i, (layer, attention) in enumerate(self.layers):
            q = self._project(attention)
            self._add(self._attended(i, attention, q), attention.out, attention.out_bias, layer.attention_post_norm,
                      layer.spec.attention_scale, layer.spec.residual_scale)  # fmt: skip
            if isinstance(layer.mlp, MixtureOfExperts):
                self._add_experts(layer, layer.mlp)
            elif layer.mlp is not None:
                self._add(self._gated(layer, layer.mlp), layer.mlp.down, layer.mlp.down_bias, layer.mlp_post_norm,
                          layer.spec.mlp_scale, layer.spec.residual_scale)  # fmt: skip
        self._product(self.x, d.final_norm, d.head, d.head_bias, self.logits)
        if d.spec.logit_scale != 1.0:
            self.logits.mul_(d.spec.logit_scale)
        if d.spec.logit_softcap is not None:
            self.logits.div_(d.spec.logit_softcap).tanh_().mul_(d.spec.logit_softcap)
        launch.choose(self.logits, self.values, self.places, self.chosen)

    def _project(self, attention: Attention) -> Tensor:
        """Queries, keys and values side by side, before norm and rope: [rows, (Hq + 2 H) D]."""
        out = self.x.new_empty(self.rows, attention.qkv.shape[0])
        self._product(self.x, attention.norm, attention.qkv, attention.qkv_bias, out)
        return out

    def _attended(self, i: int, attention: Attention, qkv: Tensor) -> Tensor:
        a, t, zone = attention.spec, self.tables, self.zones[i]
        rope = 0 if a.rope is None else self.ropes[a.rope]
        rotation = (self.cos[rope], self.sin[rope]) if self.ropes else (self.cos, self.sin)
        out = self.x.new_empty(self.rows, a.num_heads * a.head_dim)
        launch.attend(
            qkv, self.norms[i], rotation, (t.positions, t.counts[zone], t.spans[zone], t.addresses[i]),
            attention.sinks, self.scratch[self.kinds[i]], out, _heads(a, attention.eps), self.splits[i],
        )  # fmt: skip
        return out

    def _gated(self, layer: Layer, mlp: MLP) -> Tensor:
        size, activation, norm = mlp.spec.intermediate_size, mlp.spec.activation, layer.mlp_norm
        out = self.x.new_empty(self.rows, size)
        if self.rows == 1:
            assert isinstance(norm, RMSNorm)
            launch.gemv(self.x, mlp.up, out, bias=mlp.up_bias, norm=norm.weight, eps=norm.eps, activation=activation,
                        gate_scale=mlp.spec.gate_scale)  # fmt: skip
        else:
            both = self.x.new_empty(self.rows, 2 * size)
            self._product(self.x, norm, mlp.up, mlp.up_bias, both)
            launch.gated(both, activation, mlp.spec.gate_scale, out)
        return out

    def _add_experts(self, layer: Layer, moe: MixtureOfExperts) -> None:
        """x += what the chosen experts, and the shared one, give of norm x."""
        s, rows, norm, post = moe.spec, self.rows, layer.mlp_norm, layer.mlp_post_norm
        assert isinstance(norm, RMSNorm)
        launch.add_norm(self.x, None, None, norm.weight, self.normed, 1.0, norm.eps)
        logits = self.x.new_empty(rows, s.num_experts)
        self._linear(self.normed, moe.router, logits)
        chosen = torch.empty(rows, s.top_k, dtype=torch.int32, device=self.x.device)
        scores = self.x.new_empty(rows, s.top_k)
        launch.route(logits, moe.router_bias, chosen, scores, s.score_scale, s.scores == "sigmoid", s.normalized)
        inner = self.x.new_empty(rows, s.top_k, s.intermediate_size)
        launch.experts_up(self.normed, moe.gate_up, chosen, scores if s.scores_input else None, s.activation, inner)
        shared = self._shared(moe.shared) if moe.shared is not None else None
        scale = layer.spec.mlp_scale * (layer.spec.residual_scale if post is None else 1.0)
        launch.experts_down(inner, moe.down, chosen, None if s.scores_input else scores, shared,
                            self.x if post is None else None, scale, self.other)  # fmt: skip
        if post is None:
            self.x, self.other = self.other, self.x
        else:
            assert isinstance(post, RMSNorm)
            launch.add_norm(self.x, self.other, post.weight, None, None, layer.spec.residual_scale, post.eps)

    def _shared(self, mlp: MLP) -> Tensor:
        """The shared expert of the normed rows."""
        inner = self.x.new_empty(self.rows, mlp.spec.intermediate_size)
        if self.rows == 1:
            launch.gemv(self.normed, mlp.up, inner, activation=mlp.spec.activation)
        else:
            launch.gated(F.linear(self.normed, mlp.up), mlp.spec.activation, 1.0, inner)
        out = torch.empty_like(self.x)
        self._linear(inner, mlp.down, out)
        return out

    def _linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.rows == 1:
            launch.gemv(x, weight, out)
        else:
            torch.mm(x, weight.t(), out=out)

    def _product(self, x: Tensor, norm: object, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``out`` = W norm(x) + bias."""
        assert isinstance(norm, RMSNorm)
        if self.rows == 1:
            launch.gemv(x, weight, out, bias=bias, norm=norm.weight, eps=norm.eps)
            return
        launch.add_norm(x, None, None, norm.weight, self.normed, 1.0, norm.eps)
        out.copy_(F.linear(self.normed, weight, bias)) if bias is not None else torch.mm(
            self.normed, weight.t(), out=out
        )

    def _add(
        self, value: Tensor, weight: Tensor, bias: Tensor | None, post: object, scale: float, residual_scale: float
    ) -> None:
        """x += residual_scale · [post norm of] scale · (W value + bias)."""
        if self.rows == 1 and post is None:
            launch.gemv(value, weight, self.other, bias=bias, residual=self.x, scale=scale * residual_scale)
            self.x, self.other = self.other, self.x
            return
        added = F.linear(value, weight, bias)
        if scale != 1.0:
            added = added * scale
        weights, eps = (post.weight, post.eps) if isinstance(post, RMSNorm) else (None, 0.0)
        launch.add_norm(self.x, added, weights, None, None, residual_scale, eps)


def _attention(layer: Layer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def _norm_weight(attention: Attention) -> Tensor | None:
    """[Hq + H, D], what q's and k's heads are normed with; a norm after the rotation is the same before it."""
    a = attention.spec
    if a.qk_norm == "unit":
        return torch.ones(a.num_heads + a.num_kv_heads, a.head_dim, device=attention.qkv.device)
    return attention.qk_weight


def _heads(a: AttentionSpec, eps: float) -> Heads:
    rope, interleaved = (0, False) if a.rope is None else (a.rope.dim, a.rope.interleaved)
    group = a.num_heads // a.num_kv_heads
    t = a.temperature
    warmth = None if t is None else (t.scale, t.floor_scale, float(t.first))
    return Heads(a.num_kv_heads, group, a.head_dim, a.scale, rope, interleaved, a.softcap, eps, warmth)


def _splits(rows: int, heads: int) -> int:
    """Programs that share the rows of one key head: a power of two, so that all together fill the device."""
    return 1 << max(0, min(6, (PROGRAMS // max(1, rows * heads)).bit_length() - 1))
