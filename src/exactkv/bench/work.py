"""What a forward pass has to do, by formula: bytes to read, and operations of its matrix products.

These are the least: every weight that is used is read once a call, every row that some query sees once a layer, and
only what is wanted is computed. Activations and writes are left out, as are the recurrences of recurrent layers beside
their projections and states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from exactkv.cache import AttentionPattern, make_storage
from exactkv.models.parameters import Parameter, parameters
from exactkv.models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, MoeSpec

TABLES = ("embedding.weight", "positions.weight", "per_layer.embedding.weight")
"""Parameters of which a token reads one row; the first is read whole where it is the head as well."""


@dataclass(frozen=True)
class Work:
    """``weight_bytes``: read of the weights, ``cache_bytes``: of the cache; ``flops``: two a multiplication."""

    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class Formula:
    """The work of a decoder whose weights and cache are of one dtype."""

    spec: DecoderSpec
    dtype: torch.dtype

    def steps(self, batch: int, start: int, count: int) -> Work:
        """``count`` steps of one token for each of ``batch`` rows, the first at position ``start``."""
        return sum((self.call(batch, start + i, 1, "last") for i in range(count)), Work())

    def prompt(self, batch: int, pieces: Sequence[int]) -> Work:
        """``batch`` prompts from position 0, fed in ``pieces`` of so many tokens, logits of the last token only."""
        found, start = Work(), 0
        for number, width in enumerate(pieces, 1):
            found += self.call(batch, start, width, "last" if number == len(pieces) else "none")
            start += width
        return found

    def call(self, batch: int, start: int, width: int, logits: str) -> Work:
        """One call: ``width`` tokens for each of ``batch`` rows that hold ``start``; ``logits``: "last" or "none"."""
        found = Work()
        for name, parameter in self._parameters.items():
            found += self._of_weight(name, parameter, batch, width, logits)
        return found + self._of_cache(batch, start, width, logits)

    def _of_weight(self, name: str, parameter: Parameter, batch: int, width: int, logits: str) -> Work:
        size, used = prod(parameter.shape), self._positions(name, width, logits)
        tokens, share = batch * used, 1.0
        if name in TABLES:
            read = min(tokens, parameter.shape[0]) * prod(parameter.shape[1:])
            head = batch if name == TABLES[0] and self.spec.tied_head and logits == "last" else 0
            return Work((size if head else read) * self.dtype.itemsize, flops=2.0 * size * head)
        if moe := self._experts(name):
            share = reached(moe.num_experts, moe.top_k, tokens) / moe.num_experts
            size_for_a_token = size * moe.top_k / moe.num_experts
        else:
            size_for_a_token = size
        if used < width and "attention.qkv." in name:
            return self._of_projection(parameter, batch, width, used)
        multiplied = 2.0 * size_for_a_token * tokens if name.endswith("weight") and len(parameter.shape) > 1 else 0.0
        return Work(size * share * self.dtype.itemsize if tokens else 0.0, flops=multiplied)

    def _of_projection(self, parameter: Parameter, batch: int, width: int, used: int) -> Work:
        """Queries, keys and values of the last layer that writes to the cache: keys and values are wanted of every
        token, queries of as many as ``used``."""
        queries = parameter.parts[0] if parameter.parts else parameter.shape[0]
        each = prod(parameter.shape[1:])
        kept = (parameter.shape[0] - queries) * each
        read = (kept + (queries * each if used else 0)) * self.dtype.itemsize
        matrix = 2.0 * batch * (kept * width + queries * each * used) if len(parameter.shape) > 1 else 0.0
        return Work(read, flops=matrix)

    def _positions(self, name: str, width: int, logits: str) -> int:
        """Of how many of a row's tokens a parameter is used: once no layer writes to the cache any more, of the last
        one, or of none."""
        wanted = 1 if logits == "last" else 0
        layer = re.match(r"layers\.(\d+)\.(.*)", name)
        if layer is None:
            return wanted if name.startswith(("final_norm", "head", "streams.out")) else width
        number, part = int(layer[1]), layer[2]
        if number < self._last_writer:
            return width
        before_rows = ("recurrent.", "attention.norm", "attention.kv_", "attention.k_norm")
        return width if number == self._last_writer and part.startswith(before_rows) else wanted

    def _of_cache(self, batch: int, start: int, width: int, logits: str) -> Work:
        read, products = 0.0, 0.0
        for number, layer in enumerate(self.spec.layers):
            a = layer.attention
            if a is None:
                continue
            queries = width if number < self._last_writer else 1 if logits == "last" else 0
            if not queries:
                continue
            rows, pairs = _seen(a.pattern, start + width - queries, queries)
            row = sum(heads * size for heads, size in a.parts.values())
            read += rows * row * self.dtype.itemsize
            products += 2.0 * pairs * a.num_heads * _products(a)
        states = 0 if start == 0 else self._state_bytes
        return Work(0.0, batch * (read + states), batch * products)

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return parameters(self.spec)

    @cached_property
    def _last_writer(self) -> int:
        return max(i for i, layer in enumerate(self.spec.layers) if layer.shares is None)

    @cached_property
    def _state_bytes(self) -> int:
        storage = make_storage("dense", self.dtype, torch.device("cpu"), False)
        layers = self.spec.cache_spec("").recurrent
        return sum(prod(p.shape) * p.dtype(storage).itemsize for layer in layers for p in layer.parts.values())

    def _experts(self, name: str) -> MoeSpec | None:
        found = re.match(r"layers\.(\d+)\.(mlp|beside)\.experts\.", name)
        if found is None:
            return None
        layer = self.spec.layers[int(found[1])]
        moe = layer.mlp if found[2] == "mlp" else layer.beside
        return moe if isinstance(moe, MoeSpec) else None


def reached(experts: int, top_k: int, tokens: int) -> float:
    """How many experts are expected to be chosen by ``tokens`` that choose ``top_k`` each, all equally likely and
    independently."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def _seen(pattern: AttentionPattern, start: int, queries: int) -> tuple[int, int]:
    """What the queries at positions from ``start`` see: rows that any of them does, and pairs of query and row."""
    positions = torch.arange(start, start + queries)
    first = pattern.first_visible(positions)
    hidden = first.clamp(max=pattern.anchors)  # anchors that the pattern itself no longer shows
    pairs = positions - first + 1 + hidden
    lowest = int(first[0])
    return start + queries - lowest + min(lowest, pattern.anchors), int(pairs.sum())


def _products(a: AttentionSpec | LatentAttentionSpec) -> int:
    """Multiplications for one head, query and row: of the score, and of the value."""
    if isinstance(a, LatentAttentionSpec):
        return a.nope_dim + a.rope_dim + a.v_dim
    return 2 * a.head_dim
