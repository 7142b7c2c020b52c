"""The cache of a batch of rows (often one), and the one way in which it is fed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.verify.toy.model import LayerConfig, Model, attend, padded
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows, View
from tests.verify.toy.storage import STORAGES

Array = np.ndarray
STEP = 16


class CacheError(Exception):
    """What was asked for cannot be done; the cache is as it was."""


class Cache:
    """``lengths``: tokens fed, a row. ``memories``: a layer's Rows or Recurrent; None where a layer has none."""

    def __init__(self, model: Model, kind: str = "default", rows: int = 1, slack: int | None = None, step: int = STEP,
                 max_length: int | None = None):  # fmt: skip
        self.model, self.kind = model, kind
        self.max_length = model.config.max_length if max_length is None else max_length
        slack = model.config.slack if slack is None else slack
        self.lengths = [0] * rows
        self.memories: list[Rows | Recurrent | None] = []
        for layer in model.config.layers:
            if layer.kind == "recurrent":
                self.memories.append(Recurrent(rows, slack))
            elif layer.shares is None:
                heads = model.config.kv_heads
                self.memories.append(Rows(layer, heads, STORAGES[kind], rows, slack, step, max_length))
            else:
                self.memories.append(None)

    @property
    def held(self) -> list[Rows | Recurrent]:
        return [m for m in self.memories if m is not None]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.held)

    # Rewinding.

    def can_stand(self, r: int, position: int) -> bool:
        """Whether every layer of a row can go on at ``position``."""
        return all(m.can_stand(r, position) for m in self.held)

    def rewind(self, counts: Sequence[int]) -> list[int]:
        """Take back so many tokens a row, in all rows or none; returns how many were taken back."""
        targets = [n - c for n, c in zip(self.lengths, counts, strict=True)]
        for r, (target, length) in enumerate(zip(targets, self.lengths, strict=True)):
            if not 0 <= target <= length or not (target == length or self.can_stand(r, target)):
                raise CacheError(f"row {r} of length {length} cannot go back to {target}")
        for r, target in enumerate(targets):
            if target < self.lengths[r]:
                self.rewind_row(r, target)
        return list(counts)

    def rewind_row(self, r: int, position: int) -> None:
        for memory in self.held:
            memory.rewind(r, position)
        self.lengths[r] = position

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)
        for memory in self.held:
            memory.clear()

    # Rows come and go.

    def like(self, memories: list[Rows | Recurrent | None], lengths: list[int]) -> Cache:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, memories=memories, lengths=lengths)
        return made

    def select(self, rows: Sequence[int]) -> Cache:
        """A cache of copies of these rows, in this order."""
        memories = [m and m.take(rows) for m in self.memories]
        return self.like(memories, [self.lengths[r] for r in rows])

    def fork(self) -> Cache:
        return self.select(range(len(self.lengths)))


def join(caches: Sequence[Cache]) -> Cache:
    """One cache of all rows, in order."""
    lengths = [c.lengths for c in caches]
    memories = []
    for parts in zip(*(c.memories for c in caches), strict=True):
        memories.append(None if parts[0] is None else type(parts[0]).joined(parts, lengths))
    return caches[0].like(memories, [n for own in lengths for n in own])


def feed(cache: Cache, rows: Sequence[Sequence[int]], positions: Array | None = None,
         seen: list[Array] | None = None) -> list[Array]:  # fmt: skip
    """Feed each row its own tokens, perhaps none: logits [n, V] a row. ``positions`` [B, T]: as named by a
    caller, who must be right. Raises CacheError, with nothing changed, past the cache's maximum."""
    counts = [len(row) for row in rows]
    check_room(cache, counts)
    ids = padded(rows)
    if not ids.size:
        return [np.zeros((0, cache.model.config.vocab_size)) for _ in rows]
    call = Call(cache, counts, ids.shape[1], positions)
    logits = cache.model.run(ids, call.mix, seen=seen)
    cache.lengths = [n + c for n, c in zip(cache.lengths, counts, strict=True)]
    return [one[:n] for one, n in zip(logits, counts, strict=True)]


def check_room(cache: Cache, counts: Sequence[int]) -> None:
    for r, (length, count) in enumerate(zip(cache.lengths, counts, strict=True)):
        if length + count > cache.max_length:
            raise CacheError(f"row {r} holds {length} of at most {cache.max_length} tokens and was given {count}")


class Call:
    """One pass through a cache: what its layers have in common."""

    def __init__(self, cache: Cache, counts: Sequence[int], width: int, positions: Array | None):
        self.cache, self.model, self.counts = cache, cache.model, counts
        self.lengths = list(cache.lengths)
        self.positions = positions_of(self.lengths, width) if positions is None else positions
        self.end = max(n + c for n, c in zip(self.lengths, counts, strict=True))
        self.views: dict[int, View] = {}

    def mix(self, i: int, h: Array) -> Array:
        layer, memory = self.model.config.layers[i], self.cache.memories[i]
        if isinstance(memory, Recurrent):
            return memory.feed(self.model, i, h @ self.model.weights[i]["in"], self.lengths, self.counts)
        places = self.places(i)
        if memory is not None:
            k, v = self.model.keys_values(i, h, places, self.end)
            self.views[i] = self.extend(memory, k, v)
        view = self.views[i] if memory is not None else self.shared_view(layer)
        q = self.model.queries(i, h, self.query_places(i), self.end)
        return attend(q, view.k, view.v, self.mask(layer, view))

    def extend(self, memory: Rows, k: Array, v: Array) -> View:
        memory.make_room(self.lengths, self.counts)
        view = memory.view(self.lengths, self.counts, k, v)
        memory.write(self.lengths, self.counts, k, v)
        return view

    def shared_view(self, layer: LayerConfig) -> View:
        """What the layer's owner saw in this very call."""
        return self.views[layer.shares]

    def places(self, i: int) -> Array:
        """Positions [B, T] at which layer i rotates keys."""
        return self.positions

    def query_places(self, i: int) -> Array:
        return self.places(i)

    def mask(self, layer: LayerConfig, view: View) -> Array:
        return sees(layer, self.positions, view.positions)


def positions_of(lengths: Sequence[int], width: int) -> Array:
    """Absolute positions [B, T] of the tokens of a call."""
    return np.array(lengths)[:, None] + np.arange(width)


def sees(layer: LayerConfig, queries: Array, keys: Array) -> Array:
    """[B, T, S]: whether the query at a position sees the key at another; a key at -1 is none."""
    q, k = queries[:, :, None], keys[:, None]
    seen = (k >= 0) & (k <= q)
    if layer.kind == "sliding":
        seen &= q - k < layer.size
    if layer.kind == "chunked":
        seen &= q // layer.size == k // layer.size
    return seen
