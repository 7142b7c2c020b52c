"""What an attention layer remembers, for all rows of a batch: keys and values by slot.

A full layer keeps position p in slot p, a bounded one (sliding, chunked) in slot p modulo its capacity, which
grows up to its size plus the slack. ``starts`` says from which position on a row is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.verify.toy.model import LayerConfig
from tests.verify.toy.storage import Dense, Parts, Quantized

Array = np.ndarray


@dataclass(frozen=True)
class View:
    """Keys and values [B, S, kv_heads, D] with the position of each, -1 where a slot holds nothing: [B, S]."""

    k: Array
    v: Array
    positions: Array


class Rows:
    def __init__(self, layer: LayerConfig, kv_heads: int, storage: Dense | Quantized, rows: int, slack: int,
                 step: int, reserve: int | None):  # fmt: skip
        self.layer, self.kv_heads, self.storage, self.slack, self.step = layer, kv_heads, storage, slack, step
        self.starts = [0] * rows
        self.k, self.v = self._allocated(rows, 0), self._allocated(rows, 0)
        self.capacity = 0
        if reserve is not None:
            self.resize([0] * rows, reserve if self.limit is None else min(reserve, self.limit))

    def _allocated(self, rows: int, capacity: int) -> Parts:
        return self.storage.encode(np.zeros((rows, capacity, self.kv_heads, self.layer.head_dim)))

    @property
    def limit(self) -> int | None:
        """The most slots a row needs."""
        return None if self.layer.size is None else self.layer.size + self.slack

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in (self.k, self.v) for part in parts.values())

    # Where things lie.

    def slots(self, positions: Array) -> Array:
        return positions % self.capacity

    def held(self, lengths: Sequence[int]) -> Array:
        """The position in each slot [B, capacity], -1 where there is none: the last one below the length that
        falls into the slot, if it is still held."""
        last = np.array(lengths)[:, None] - 1
        if not self.capacity:
            return np.zeros((len(lengths), 0), dtype=np.int64)
        positions = last - (last - np.arange(self.capacity)) % self.capacity
        return np.where(positions >= np.array(self.starts)[:, None], positions, -1)

    def first_needed(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        if self.layer.kind == "sliding":
            return max(0, position - self.layer.size + 1)
        return position // self.layer.size * self.layer.size if self.layer.kind == "chunked" else 0

    # A call: make room, read, write.

    def make_room(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        needed = max((n + c for n, c in zip(lengths, counts, strict=True)), default=0)
        wanted = needed if self.limit is None else min(needed, self.limit)
        if wanted > self.capacity:
            stepped = -(-wanted // self.step) * self.step
            self.resize(lengths, stepped if self.limit is None else min(stepped, self.limit))

    def view(self, lengths: Sequence[int], counts: Sequence[int], k: Array, v: Array) -> View:
        """What is held, then the call's own rows as they would be stored; padded ones have no position."""
        dim, width = self.layer.head_dim, k.shape[1]
        held_k, held_v = self.storage.decode(self.k, dim), self.storage.decode(self.v, dim)
        new_k = self.storage.decode(self.storage.encode(k), dim)
        new_v = self.storage.decode(self.storage.encode(v), dim)
        column = np.arange(width)
        new = np.where(column < np.array(counts)[:, None], np.array(lengths)[:, None] + column, -1)
        return View(
            np.concatenate([held_k, new_k], 1),
            np.concatenate([held_v, new_v], 1),
            np.concatenate([self.held(lengths), new], 1),
        )

    def write(self, lengths: Sequence[int], counts: Sequence[int], k: Array, v: Array) -> None:
        """Put the valid ones of the call's rows into their slots; of more than fit, the newest."""
        for target, source in ((self.k, self.storage.encode(k)), (self.v, self.storage.encode(v))):
            for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
                first = self.first_written(count)
                if first < count:
                    self.put(target, source, r, self.slots(np.arange(length + first, length + count)), first, count)
        for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.starts[r] = max(self.starts[r], length + count - self.capacity)

    def first_written(self, count: int) -> int:
        return max(0, count - self.capacity)

    def put(self, target: Parts, source: Parts, r: int, slots: Array, first: int, end: int) -> None:
        for name, part in target.items():
            part[r, slots] = source[name][r, first:end]

    # The whole of it.

    def resize(self, lengths: Sequence[int], capacity: int) -> None:
        """Other slots for the same rows."""
        old, held = self.capacity, self.held(lengths)
        k, v = self._allocated(len(lengths), capacity), self._allocated(len(lengths), capacity)
        self.capacity = capacity
        for r in range(len(lengths) if old else 0):
            (slots,) = np.nonzero(held[r] >= 0)
            places = self.slots(held[r, slots])
            for new, parts in ((k, self.k), (v, self.v)):
                for name, part in new.items():
                    part[r, places] = parts[name][r, slots]
        self.k, self.v = k, v

    def can_stand(self, r: int, position: int) -> bool:
        """Whether going on at ``position`` is exact with what is held."""
        return position == 0 or self.starts[r] <= self.first_needed(position)

    def rewind(self, r: int, position: int) -> None:
        self.starts[r] = min(self.starts[r], position)

    def clear(self) -> None:
        self.starts = [0] * len(self.starts)

    def like(self, k: Parts, v: Parts, starts: list[int]) -> Rows:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, k=k, v=v, starts=starts)
        return made

    def take(self, rows: Sequence[int]) -> Rows:
        """These rows, copied, in this order."""
        order = list(rows)
        return self.like(
            {name: part[order] for name, part in self.k.items()},
            {name: part[order] for name, part in self.v.items()},
            [self.starts[r] for r in order],
        )

    @staticmethod
    def joined(parts: Sequence[Rows], lengths: Sequence[Sequence[int]]) -> Rows:
        """All rows of all, brought to the same slots."""
        slack, step = max(p.slack for p in parts), max(p.step for p in parts)
        capacity = max(p.capacity for p in parts)
        unified = []
        for part, own in zip(parts, lengths, strict=True):
            one = part.take(range(len(own)))
            one.slack, one.step = slack, step
            if one.capacity != capacity:
                one.resize(own, capacity)
            unified.append(one)
        return unified[0].like(
            {name: np.concatenate([p.k[name] for p in unified]) for name in unified[0].k},
            {name: np.concatenate([p.v[name] for p in unified]) for name in unified[0].v},
            [s for p in unified for s in p.starts],
        )

    # As plain values, for files.

    def arrays(self) -> dict[str, Array]:
        return {
            f"{which}.{name}": part for which, parts in (("k", self.k), ("v", self.v)) for name, part in parts.items()
        }

    def facts(self) -> dict[str, object]:
        return {"starts": self.starts, "capacity": self.capacity, "slack": self.slack, "step": self.step}

    def restore(self, arrays: dict[str, Array], facts: dict[str, object]) -> None:
        self.k = {name: arrays[f"k.{name}"] for name in self.k}
        self.v = {name: arrays[f"v.{name}"] for name in self.v}
        self.__dict__.update(facts)
