"""Rows in position order: the segments and the run of one row of a batch, for the layers of one zone.

Layers with the same pattern always hold the same positions, so they share one record of *where* rows lie,
and have buffers of their own for *what* lies there. Position p of a run is at index p - origin of its
memory. Nothing here knows how long a row is: that is the cache's one length, and is passed in as ``end``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from exactkv.cache.storage import PartShapes, Storage

_STAMPS = count()


class Memory:
    """Buffers for one run: ``buffers[i][part]`` is [H, capacity, D] for the i-th layer of the zone.

    ``shared`` is set when a second row refers to rows in it; from then on nobody writes to it again. ``stamp``: a
    number that no other memory ever has, a new one whenever a buffer is replaced: who keeps addresses of buffers
    compares it, as an address alone may have been given up and given out again.
    """

    __slots__ = ("buffers", "capacity", "shared", "stamp")

    def __init__(self, storage: Storage, layers: Sequence[PartShapes], capacity: int):
        self.buffers = [storage.allocate(parts, capacity) for parts in layers]
        self.capacity = capacity
        self.shared = False
        self.stamp = next(_STAMPS)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.untyped_storage().nbytes() for layer in self.buffers for t in layer.values())

    def grow(self, storage: Storage, layers: Sequence[PartShapes], capacity: int, live: tuple[int, int]) -> None:
        """Make room for ``capacity`` rows, keeping the indices ``live`` where they are. Layer by layer, so
        that the peak is one layer's; interrupted between two layers it has changed nothing that is read."""
        low, high = live
        for i, parts in enumerate(layers):
            larger = storage.allocate(parts, capacity)
            for name, buffer in self.buffers[i].items():
                larger[name][:, low:high] = buffer[:, low:high]
            self.stamp = next(_STAMPS)  # before the buffer: whoever saw it under the old number must look again
            self.buffers[i] = larger
        self.capacity = capacity


class Piece(NamedTuple):
    """``rows`` rows from ``position`` on, at the index ``at`` of ``memory``."""

    memory: Memory
    at: int
    position: int
    rows: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Immutable rows for the positions [start, end), shared with other rows. ``origin``: position of index 0."""

    memory: Memory
    origin: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one row holds in one zone: the positions from ``start`` up to the row's length.

    The shared ``segments`` come first; what follows them is private, in ``memory``, whose index 0 is the
    position ``origin``.
    """

    start: int
    origin: int
    memory: Memory
    segments: tuple[Segment, ...] = ()

    @property
    def first(self) -> int:
        """The first position held in private memory (if the row is that long)."""
        return max(self.origin, self.start)

    def pieces(self, low: int, high: int) -> Iterator[Piece]:
        """Where the held positions of [low, high) lie, in position order. ``high`` is at most the row's length."""
        for segment in self.segments:
            a, b = max(low, segment.start, self.start), min(high, segment.end)
            if a < b:
                yield Piece(segment.memory, a - segment.origin, a, b - a)
        a = max(low, self.first)
        if a < high:
            yield Piece(self.memory, a - self.origin, a, high - a)

    def advanced(self, start: int) -> Run:
        """The same with every row before ``start`` given up. (A pure decode step changes nothing here.)"""
        if start <= self.start:
            return self
        segments = self.segments
        if segments:
            segments = tuple(s for s in segments if s.end > start)
        return Run(start, self.origin, self.memory, segments)

    def cut(self, end: int) -> Run:
        """The same with every row from ``end`` on given up; ``end`` >= start."""
        if end >= self.first:
            return self
        segments = tuple(s if s.end <= end else replace(s, end=end) for s in self.segments if s.start < end)
        return Run(self.start, end, self.memory, segments)

    def restarted(self, position: int) -> Run:
        """Nothing held; the next row to come is ``position``."""
        return Run(position, position, self.memory)


def copy_rows(run: Run, low: int, high: int, target: Memory, origin: int) -> None:
    """Copy the held positions [low, high) of ``run`` into ``target``, whose index 0 is ``origin``."""
    for memory, index, position, rows in run.pieces(low, high):
        at = position - origin
        for source, destination in zip(memory.buffers, target.buffers, strict=True):
            for name, buffer in source.items():
                destination[name][:, at : at + rows] = buffer[:, index : index + rows]
