"""Storing a row of a cache: what of it is new, in memory and on the disk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from exactkv.cache import checkpoint
from exactkv.cache import row as records
from exactkv.cache.cache import Cache
from exactkv.cache.checkpoint import Checkpoint
from exactkv.cache.recurrent import State
from exactkv.cache.row import Row
from exactkv.cache.run import Run
from exactkv.cache.store import pieces
from exactkv.cache.store.disk import DiskTier
from exactkv.cache.store.index import DiskPath, Entry
from exactkv.cache.store.memory import TOKEN_BYTES, MemoryTier
from exactkv.cache.store.tree import Namespace, Path

PIECE_TOKENS = 512
"""The most tokens of a piece: what is evicted, and read from the disk, at once."""


@dataclass(frozen=True)
class Place:
    """A position at which a row can stand only by what is filed for it, as runs and state; ``filed``: the checkpoint
    that the row has there."""

    position: int
    runs: Sequence[Run]
    state: State | None
    filed: Checkpoint | None = None
    label: str = ""


class Writer:
    """Stores the first ``length`` tokens of ``row``, a row of ``cache``, neither of which it changes."""

    def __init__(self, cache: Cache, row: Row, namespace: Namespace, tokens: array[int]):
        self.spec, self.storage, self.policy = cache.spec, cache.storage, cache._policy
        self.row, self.namespace, self.tokens = row, namespace, tokens
        self.places = list(self._places())

    def _places(self) -> Iterator[Place]:
        """Those worth filing, the most telling first: the end, from which a longer text goes on; the position before,
        from which the same text does, if the row can go back there; and the row's checkpoints."""
        length, filed = self.row.length, {c.position: c for c in self.row.checkpoints}
        before = records.standing(self.spec, self.row, length - 1) if length > 1 else 0
        for position in (length, before):
            if position not in filed and not checkpoint.is_free(self.spec, position):
                at = records.rewound(self.spec, self.policy, self.row, position)
                yield Place(position, at.runs, at.states[-1] if at.states else None)
        for own in sorted(filed.values(), key=lambda c: (bool(c.label), c.position), reverse=True):
            yield Place(own.position, pieces.runs_of(self.spec, own), own.state, own, own.label)

    def needed(self, start: int, filed: Iterable[int] = ()) -> int:
        """Bytes of memory for what comes from ``start`` on, with the checkpoint at the end if it is not ``filed``."""
        length = self.row.length
        rows = pieces.rows_nbytes(self.spec, self.storage, start, length) + TOKEN_BYTES * (length - start)
        missing = any(p.position == length for p in self.places) and length not in filed
        return rows + (pieces.checkpoint_nbytes(self.spec, self.storage, length) if missing else 0)

    # Memory.

    def into_memory(self, memory: MemoryTier, path: Path) -> bool:
        """Add to ``path`` what is missing. False, with nothing added or evicted, where it could not be held."""
        wanted = [p.position for p in self.places]
        there = [filed for filed in path.checkpoints() if filed.position in wanted]
        for filed in there:
            memory.stand_on(filed)
        if not memory.could_hold(self.needed(path.length, [filed.position for filed in there])):
            return False
        for low, high in self._spans(path.length):
            nbytes = pieces.rows_nbytes(self.spec, self.storage, low, high) + TOKEN_BYTES * (high - low)
            if not memory.make_room(nbytes):
                return False
            rows = pieces.cut(self.spec, self.storage, self.row.runs, low, high)
            node = memory.add(self.namespace, path, self.tokens[low:high], rows)
            path = Path((*path.steps, (node, high)), high, node)
        complete = True
        for place in self._in_order(memory):
            if any(place.position == filed.position for filed in there):
                continue
            if not self._file(memory, path, place) and place.position == self.row.length:
                complete = False
        return complete

    def _in_order(self, memory: MemoryTier) -> list[Place]:
        """The places, such that the one at the end can share the rows of the one before it, if both fit."""
        first = self.places[:2]
        both = sum(pieces.checkpoint_nbytes(self.spec, self.storage, p.position) for p in first)
        shares = len(first) == 2 and first[1].position < first[0].position and memory.could_hold(both)
        return [*reversed(first), *self.places[2:]] if shares else self.places

    def _file(self, memory: MemoryTier, path: Path, place: Place) -> bool:
        made = place.filed
        if made is None:
            if not memory.make_room(pieces.checkpoint_nbytes(self.spec, self.storage, place.position)):
                return False
            earlier = [f.checkpoint for f in path.checkpoints() if f.position < place.position]
            made = checkpoint.take(self.spec, self.storage, place.runs, place.state, place.position, earlier)
        if not memory.make_room(memory.missing(pieces.objects((), made))):
            return False
        memory.add_checkpoint(path.node_at(place.position), made)
        return True

    def _spans(self, start: int) -> Iterator[tuple[int, int]]:
        for low in range(start, self.row.length, PIECE_TOKENS):
            yield low, min(low + PIECE_TOKENS, self.row.length)

    # Disk.

    def onto_disk(self, disk: DiskTier, described: dict[str, str], pinned: tuple[set[int], set[int]]) -> bool:
        """Write what is missing. False where not all of the text could be held; what was written before stays.
        ``pinned``: pieces and checkpoints that stay."""
        path = disk.walk(self.namespace, self.tokens)
        disk.use(path)
        marks = disk.index.marks(path)
        if path.length < self.row.length and not disk.could_hold(self.needed(0)):
            return False
        held, kept = pinned[0], pinned[1] | {marks[p.position].id for p in self.places if p.position in marks}
        for low, high in self._spans(path.length):
            tensors = pieces.rows_as_tensors(self.spec, self.row.runs, low, high)
            entry = Entry(0, low, high, "", True)
            made = disk.put(self.namespace, described, self.tokens, entry, tensors, path, kept, held)
            if made is None:
                return False
            path = DiskPath((*path.steps, (entry._replace(id=made), high)), high)
        complete = True
        for place in self.places:
            if place.position in marks:
                continue
            tensors = pieces.checkpoint_as_tensors(self.spec, place.runs, place.state, place.position)
            piece = next(p for p, end in path.steps if p.start < place.position <= end)
            entry = Entry(piece.id, place.position, place.position, "", False)
            made = disk.put(self.namespace, described, self.tokens, entry, tensors, path, kept, held)
            if made is not None:
                kept.add(made)
            elif place.position == self.row.length:
                complete = False
        return complete
