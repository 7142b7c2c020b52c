"""Where a text can stand with what is in memory and on the disk, and the row of a cache made of both."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exactkv.cache.cache import Cache
from exactkv.cache.checkpoint import Checkpoint
from exactkv.cache.store.disk import DiskTier
from exactkv.cache.store.files import Broken
from exactkv.cache.store.index import DiskPath, Entry
from exactkv.cache.store.memory import TOKEN_BYTES, MemoryTier
from exactkv.cache.store.pieces import (
    Builder,
    Rows,
    checkpoint_from,
    checkpoint_nbytes,
    free_standing,
    objects,
    rows_from,
    rows_nbytes,
)
from exactkv.cache.store.tree import Namespace, Path


@dataclass(frozen=True)
class Standing:
    """Where a text can stand: at ``position``, with what ``path`` has in memory and ``disk`` on the disk."""

    path: Path
    disk: DiskPath
    marks: Mapping[int, Entry]
    position: int

    @property
    def stored(self) -> int:
        """How many of its first tokens are stored."""
        return max(self.path.length, self.disk.length)

    @property
    def from_disk(self) -> bool:
        """Whether the disk is needed in order to stand there."""
        return self.position > self.path.length or self.mark is not None

    @property
    def mark(self) -> Entry | None:
        """The checkpoint that must be read."""
        if any(filed.position == self.position for filed in self.path.checkpoints()):
            return None
        return self.marks.get(self.position)


def find(cache: Cache, path: Path, disk: DiskPath, marks: Mapping[int, Entry], limit: int) -> Standing:
    """The greatest position <= ``limit`` at which every layer of ``cache``'s model can stand."""
    reach = min(limit, max(path.length, disk.length))
    filed = (*(f.position for f in path.checkpoints()), *marks)
    position = max([free_standing(cache.spec, reach), *(p for p in filed if p <= reach)])
    return Standing(path, disk, marks, position)


class Source:
    """Builds the row. What is read from the disk goes into memory too, where there is room. Raises what
    ``DiskTier.load`` raises; then ``cache`` still is empty, and what was read stays in memory."""

    def __init__(self, memory: MemoryTier, disk: DiskTier | None, namespace: Namespace, tokens: array[int]):
        self.memory, self.disk, self.namespace, self.tokens = memory, disk, namespace, tokens

    def build(self, cache: Cache, at: Standing, merge: bool) -> None:
        """Give ``cache``, of one row and empty, the row of ``tokens[:at.position]``."""
        builder = Builder(cache, at.position, len(self.tokens) - at.position, merge)
        self.path = at.path
        for rows, upto in self._rows(cache, at):
            builder.add(rows, upto)
        here = self._checkpoint(cache, at)
        kept = [f.checkpoint for f in self.path.checkpoints() if f.position <= at.position]
        if here is not None and all(c is not here for c in kept):
            kept.append(here)
        builder.finish(self.tokens[: at.position].tolist(), here, kept)

    def _rows(self, cache: Cache, at: Standing) -> Iterator[tuple[Rows, int]]:
        for node, end in at.path.steps:
            if node.start < at.position:
                yield node.rows, min(end, at.position)
        reached = at.path.length
        for entry, end in at.disk.steps:
            if end > reached and reached < at.position:
                yield self._read(cache, entry, reached, end), min(end, at.position)
                reached = end

    def _read(self, cache: Cache, entry: Entry, low: int, high: int) -> Rows:
        """The rows of [low, high) of a piece on the disk."""
        assert self.disk is not None
        nbytes = rows_nbytes(cache.spec, cache.storage, low, high) + TOKEN_BYTES * (high - low)
        fits = self.path.length == low and self.memory.make_room(nbytes)
        tensors = self.disk.load(entry, self.namespace, self.tokens)
        try:
            rows = rows_from(cache.spec, cache.storage, tensors, entry.start, entry.stop, low, high)
        except Broken:
            self.disk.drop(entry)
            raise
        if fits:
            node = self.memory.add(self.namespace, self.path, self.tokens[low:high], rows)
            self.path = Path((*self.path.steps, (node, high)), high, node)
        return rows

    def _checkpoint(self, cache: Cache, at: Standing) -> Checkpoint | None:
        filed = next((f for f in self.path.checkpoints() if f.position == at.position), None)
        if filed is not None:
            self.memory.stand_on(filed)
            return filed.checkpoint
        mark = at.mark
        if mark is None:
            return None
        assert self.disk is not None
        fits = self.memory.make_room(checkpoint_nbytes(cache.spec, cache.storage, at.position))
        tensors = self.disk.load(mark, self.namespace, self.tokens)
        try:
            made = checkpoint_from(cache.spec, cache.storage, tensors, at.position)
        except Broken:
            self.disk.drop(mark)
            raise
        if fits and self.path.length >= at.position and self.memory.make_room(self.memory.missing(objects((), made))):
            self.memory.add_checkpoint(self.path.node_at(at.position), made)
        return made
