"""One row of a cache as an immutable record, and where it can stand; what a model's cache must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor

from exactkv.cache import checkpoint, recurrent
from exactkv.cache.checkpoint import Checkpoint, CheckpointPolicy
from exactkv.cache.layer import Zone, arrange
from exactkv.cache.pattern import AttentionPattern
from exactkv.cache.place import Policy
from exactkv.cache.recurrent import RecurrentLayer, State, StateParts
from exactkv.cache.run import Memory, Run
from exactkv.cache.storage import PartShapes, Storage
from exactkv.cache.view import NOTHING, Placement, Step
from exactkv.errors import IntegrityError

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache


class CacheSpec:
    """What a model's cache must hold.

    ``layers``: each attention layer's pattern and parts, in the model's order. ``identity``: names the model, so
    that another model's cache is refused. ``max_length``: the most tokens a row may have, None for no limit.
    ``recurrent``: the parts of each recurrent layer's state, in the model's order. ``described``: the model in words,
    for people who look into a saved cache; its "config" is compared too.
    """

    def __init__(
        self,
        layers: Sequence[tuple[AttentionPattern, PartShapes]],
        identity: str,
        max_length: int | None = None,
        recurrent: Sequence[StateParts] = (),
    ):
        self.layers, self.zones = arrange(layers)
        self.recurrent = tuple(RecurrentLayer(i, parts) for i, parts in enumerate(recurrent))
        self.identity = identity
        self.max_length = max_length
        self.described: Mapping[str, str] = {}

    @property
    def forgets(self) -> bool:
        """Whether some layer gives up what earlier positions need, so that checkpoints are of use."""
        return bool(self.recurrent) or any(zone.bound is not None for zone in self.zones)


class Owner:
    """What is one row's own, whichever states of it exist: the log of its tokens, and who refers to it."""

    __slots__ = ("caches", "log")

    def __init__(self, log: list[int]):
        self.log = log
        self.caches: WeakSet[Cache] = WeakSet()


@dataclass(frozen=True, slots=True)
class Row:
    """The state of one row: its length, what it holds in each zone, and of its recurrent layers the states at its
    newest positions, its length's the last. Tokens are ``owner.log[:length]``. ``checkpoints``: in position order,
    none beyond the length; rows that fork refer to the same."""

    owner: Owner
    length: int
    runs: tuple[Run, ...]
    states: tuple[State, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()


def placed(
    spec: CacheSpec, policy: Policy, rows: Iterable[Row], counts: Iterable[int]
) -> tuple[tuple[Row, ...], list[list[Placement]]]:
    """``rows``, their content unchanged, with room for ``counts`` more tokens, and placements[zone][row] for those."""
    placements: list[list[Placement]] = [[] for _ in spec.zones]
    made = []
    for row, count in zip(rows, counts, strict=True):
        runs = []
        for z, zone in enumerate(spec.zones):
            run, placement = row.runs[z], NOTHING
            if count:
                run, placement = policy.place(zone, run, row.length, count)
            runs.append(run)
            placements[z].append(placement)
        made.append(replace(row, runs=tuple(runs)))
    return tuple(made), placements


def poison(spec: CacheSpec, storage: Storage, rows: Iterable[Row]) -> None:
    """Fill what private memory holds beside live rows."""
    for row in rows:
        for zone, run in zip(spec.zones, row.runs, strict=True):
            live_to = max(0, zone.clip(row.length) - run.origin)
            live_from = min(run.first - run.origin, live_to)
            for buffers in run.memory.buffers:
                storage.fill_dead(buffers, live_from, live_to)


def fed(spec: CacheSpec, policy: Policy, row: Row, step: Step, r: int) -> Row:
    """Row ``r`` after a step that all layers have written. Raises IntegrityError where something is missing."""
    count = step.counts[r]
    if len(step.tokens[r]) != count:
        raise IntegrityError(f"row {r} was fed {count} rows for {len(step.tokens[r])} token ids")
    del row.owner.log[row.length :]
    row.owner.log.extend(step.tokens[r])
    runs = tuple(p[r].after or row.runs[z] for z, p in enumerate(step.placements))
    length, states = row.length + count, row.states
    if spec.recurrent:
        states = recurrent.advanced(states, step, r, length, policy.slack, len(spec.recurrent))
    return Row(row.owner, length, runs, states, row.checkpoints)


def standing(spec: CacheSpec, row: Row, position: int) -> int:
    """The greatest q <= ``position`` where every layer stands with what the row itself holds, or a checkpoint is."""
    filed = max((c.position for c in row.checkpoints if c.position <= position), default=0)
    while position > filed:
        lowest = min((zone.standing(run, position) for zone, run in zip(spec.zones, row.runs, strict=True)),
                     default=position)  # fmt: skip
        if spec.recurrent:
            lowest = min(lowest, recurrent.standing(row.states, position))
        if lowest == position:
            return position
        position = lowest
    return filed


def rewound(spec: CacheSpec, policy: Policy, row: Row, position: int) -> Row:
    """``row`` at ``position``, where it stands. Layers that cannot go back by themselves get copies of what the
    checkpoint there holds; the row given is as it was."""
    if position == row.length:
        return row
    kept = tuple(c for c in row.checkpoints if c.position <= position)
    filed = kept[-1] if kept and kept[-1].position == position else None
    runs = []
    for z, (zone, run) in enumerate(zip(spec.zones, row.runs, strict=True)):
        if zone.standing(run, position) == position:
            runs.append(zone.rewound(run, position))
        else:
            assert filed is not None
            runs.append(policy.restored(zone, filed.zones[z] or (), position))
    states = recurrent.rewound(row.states, position)
    if spec.recurrent and recurrent.standing(states, position) != position:
        assert filed is not None and filed.state is not None
        states = (filed.state,)
    return Row(row.owner, position, tuple(runs), states, kept)


def checkpointed(spec: CacheSpec, policy: Policy, row: Row, label: str, wanted: CheckpointPolicy) -> Row:
    """``row`` with a checkpoint at its length, unless it can go back there without one; then as few as fit
    ``wanted.max_bytes``."""
    if checkpoint.is_free(spec, row.length):
        return row
    filed = row.checkpoints
    if filed and filed[-1].position == row.length:
        if not label or filed[-1].label:
            return row
        made = replace(filed[-1], label=label)
        filed = filed[:-1]
    else:
        state = row.states[-1] if row.states else None
        made = checkpoint.take(spec, policy.storage, row.runs, state, row.length, filed, label)
    return replace(row, checkpoints=checkpoint.thinned((*filed, made), wanted.max_bytes))


def most_nbytes(spec: CacheSpec, policy: Policy, length: int) -> int:
    """The most bytes that a row of ``length`` tokens holds under ``policy``, however it was fed, checkpoints apart."""
    total = states_nbytes(spec, policy.storage) * (policy.slack + 3)
    for zone in spec.zones:
        rows = zone.clip(length) - zone.low
        limit = zone.capacity_limit(policy.slack, policy.max_length)
        if policy.reserve and limit is not None:
            rows = limit
        elif rows:
            rows += max(policy.step, rows // 8)
            rows = rows if limit is None else min(rows, limit)
        total += rows * row_nbytes(zone, policy.storage)
    return total


def most_checkpoint_nbytes(spec: CacheSpec, storage: Storage) -> int:
    """The most bytes that one checkpoint holds, wherever it is."""
    rows = sum((zone.bound or 0) * row_nbytes(zone, storage) for zone in spec.zones)
    return rows + states_nbytes(spec, storage)


def row_nbytes(zone: Zone, storage: Storage) -> int:
    """Bytes of one position in all layers of a zone."""
    return sum(map(storage.row_nbytes, zone.layers))


def states_nbytes(spec: CacheSpec, storage: Storage) -> int:
    """Bytes of the states of all recurrent layers at one position."""
    parts = [part for layer in spec.recurrent for part in layer.parts.values()]
    return sum(prod(part.shape) * part.dtype(storage).itemsize for part in parts)


def memories(rows: Iterable[Row]) -> list[Memory]:
    """Every memory that rows hold, their checkpoints' among them, each once."""
    found: dict[int, Memory] = {}
    for row in rows:
        for run in row.runs:
            for memory in (run.memory, *(s.memory for s in run.segments)):
                found[id(memory)] = memory
        found |= checkpoint.memories(row.checkpoints)
    return list(found.values())


def state_tensors(rows: Iterable[Row]) -> list[Tensor]:
    """Every tensor of recurrent state that rows hold, their checkpoints' among them, each once."""
    given = list(rows)
    held = [s for row in given for s in row.states]
    held += [c.state for row in given for c in row.checkpoints if c.state is not None]
    return list(recurrent.tensors(held).values())
