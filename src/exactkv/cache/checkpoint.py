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
from exactkv.cache.checks import is_int, require
from exactkv.cache.recurrent import State
from exactkv.cache.run import Memory, Run, Segment, copy_rows
from exactkv.cache.storage import Storage

if TYPE_CHECKING:
    from exactkv.cache.layer import Zone
    from exactkv.cache.row import CacheSpec


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are filed by themselves, and how many are kept.

    ``every``: one at each multiple of so many tokens at which a call ends; None for none. ``max_bytes``: the most that
    one row's checkpoints may hold, shared memory counted once; None for no limit. Where they do not fit, older and
    unlabelled ones go first, such that the gaps grow with the distance from the end.
    Raises InputError where a value does not fit.
    """

    every: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        every, most = self.every, self.max_bytes
        require(every is None or (is_int(every) and every >= 1), "every", every, "an integer >= 1, or None")
        require(most is None or (is_int(most) and most >= 0), "max_bytes", most, "an integer >= 0, or None")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What it takes to stand at ``position``, beside the rows of unbounded zones.

    ``zones``: for each zone of the model, in order, the rows of [needed_from(position), position) as segments in
    position order; None where the zone is unbounded. ``state``: what recurrent layers hold after ``position``
    tokens; None for a model without them. ``label``: why it was asked for, such as "message" or "prompt"; labelled
    ones are kept longest.
    """

    position: int
    zones: tuple[tuple[Segment, ...] | None, ...]
    state: State | None = None
    label: str = ""


def bounded(zone: Zone) -> bool:
    """Whether a zone gives up rows, so that a checkpoint must hold them."""
    return zone.bound is not None


def is_free(spec: CacheSpec, position: int) -> bool:
    """Whether every layer stands at ``position`` with no checkpoint, whatever it has given up."""
    if position == 0:
        return True
    needed = any(bounded(zone) and zone.needed_from(position) < zone.clip(position) for zone in spec.zones)
    return not needed and not spec.recurrent


def take(
    spec: CacheSpec,
    storage: Storage,
    runs: Sequence[Run],
    state: State | None,
    position: int,
    earlier: Iterable[Checkpoint] = (),
    label: str = "",
) -> Checkpoint:
    """The checkpoint of a row that stands at ``position`` and holds ``runs``. Rows that one of ``earlier`` (of the same
    row) holds are shared with it, the others copied into memory of just their size."""
    kept = max(earlier, key=lambda c: c.position, default=None)
    zones = tuple(
        _rows(zone, storage, run, position, kept.zones[z] if kept else None) if bounded(zone) else None
        for z, (zone, run) in enumerate(zip(spec.zones, runs, strict=True))
    )
    return Checkpoint(position, zones, state, label)


def _rows(
    zone: Zone, storage: Storage, run: Run, position: int, held: tuple[Segment, ...] | None
) -> tuple[Segment, ...]:
    low, high = zone.needed_from(position), zone.clip(position)
    if low >= high:
        return ()
    segments = [replace(s, start=max(s.start, low)) for s in held or () if s.end > low and s.start < high]
    if segments and (segments[0].start > low or segments[-1].end > high):
        segments = []  # what is held does not begin where it must
    if 2 * sum(s.end - s.start for s in segments) < sum(s.memory.capacity for s in segments):
        segments = []  # few of its rows are needed: sharing would keep all of its memory alive
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


def thinned(checkpoints: Sequence[Checkpoint], max_bytes: int | None) -> tuple[Checkpoint, ...]:
    """Those of ``checkpoints``, in position order, that are kept so that they hold at most ``max_bytes``."""
    kept = list(checkpoints)
    while max_bytes is not None and kept and nbytes(kept) > max_bytes:
        del kept[_least_missed(kept)]
    return tuple(kept)


def _least_missed(kept: Sequence[Checkpoint]) -> int:
    """Which one to drop: an unlabelled one before a labelled one, the newest last; else that by which the least is
    lost for the memory it frees. Lost is the gap it leaves, relative to its distance from the end."""
    held: list[dict[int, int]] = [_objects(c) for c in kept]
    holders: dict[int, int] = {}
    for objects in held:
        for key in objects:
            holders[key] = holders.get(key, 0) + 1
    end = kept[-1].position

    def missed(i: int) -> tuple[int, float, int]:
        rank = 2 if i == len(kept) - 1 else bool(kept[i].label)
        before, after = kept[i - 1].position if i else 0, kept[i + 1].position if i + 1 < len(kept) else end
        freed = sum(size for key, size in held[i].items() if holders[key] == 1)
        return rank, (after - before) / (end - kept[i].position + 1) / max(1, freed), i

    return min(range(len(kept)), key=missed)


def _objects(given: Checkpoint) -> dict[int, int]:
    """What a checkpoint holds: the bytes of each memory and each state tensor."""
    found = {key: memory.nbytes for key, memory in memories([given]).items()}
    if given.state is not None:
        found |= {id(t): t.nbytes for t in recurrent.tensors([given.state]).values()}
    return found
