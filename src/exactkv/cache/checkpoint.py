"""Checkpoints: what bounded and recurrent layers need in order to stand at one position again.

Full layers need none: their rows stay. A checkpoint's window rows are immutable segments; those that an earlier
checkpoint of the same row holds already are shared with it. A state is filed under the exact position it is the
state of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exactkv.cache import recurrent
from exactkv.cache.recurrent import State
from exactkv.cache.run import Memory, Run, Segment, copy_rows
from exactkv.cache.storage import DenseStorage

if TYPE_CHECKING:
    from exactkv.cache.cache import CacheSpec
    from exactkv.cache.layer import Zone


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What it takes to stand at ``position``, beside the rows of unbounded zones.

    ``zones``: for each zone of the model, in order, the rows of [needed_from(position), position) as segments in
    position order; None where the zone is unbounded. ``state``: what recurrent layers hold after ``position``
    tokens; None for a model without them.
    """

    position: int
    zones: tuple[tuple[Segment, ...] | None, ...]
    state: State | None = None


def bounded(zone: Zone) -> bool:
    """Whether a zone gives up rows, so that a checkpoint must hold them."""
    return zone.bound is not None


def take(
    spec: CacheSpec,
    storage: DenseStorage,
    runs: Sequence[Run],
    state: State | None,
    position: int,
    earlier: Iterable[Checkpoint] = (),
) -> Checkpoint:
    """The checkpoint of a row that stands at ``position`` and holds ``runs``. Rows that one of ``earlier`` (of the same
    row) holds are shared with it, the others copied into memory of just their size."""
    kept = max(earlier, key=lambda c: c.position, default=None)
    zones = tuple(
        _rows(zone, storage, run, position, kept.zones[z] if kept else None) if bounded(zone) else None
        for z, (zone, run) in enumerate(zip(spec.zones, runs, strict=True))
    )
    return Checkpoint(position, zones, state)


def _rows(
    zone: Zone, storage: DenseStorage, run: Run, position: int, held: tuple[Segment, ...] | None
) -> tuple[Segment, ...]:
    low, high = zone.needed_from(position), zone.clip(position)
    if low >= high:
        return ()
    segments = [replace(s, start=max(s.start, low)) for s in held or () if s.end > low and s.start < high]
    if segments and (segments[0].start > low or segments[-1].end > high):
        segments = []  # what is held does not begin where it must
    first = segments[-1].end if segments else low
    if first < high:
        memory = Memory(storage, zone.layers, high - first)
        copy_rows(run, first, high, memory, first)
        memory.shared = True
        segments.append(Segment(memory, first, first, high))
    return tuple(segments)


def memories(checkpoints: Iterable[Checkpoint]) -> dict[int, Memory]:
    """Every memory that checkpoints hold, each once, by identity."""
    return {id(s.memory): s.memory for c in checkpoints for zone in c.zones for s in zone or ()}


def nbytes(checkpoints: Iterable[Checkpoint]) -> int:
    """Bytes that checkpoints hold; what they share is counted once."""
    given = list(checkpoints)
    states = recurrent.tensors(c.state for c in given if c.state is not None)
    return sum(m.nbytes for m in memories(given).values()) + sum(t.nbytes for t in states.values())
