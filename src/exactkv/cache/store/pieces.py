"""From a row of a cache to pieces and back: where a model can stand, what a piece takes, a cache row from pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from exactkv.cache.checkpoint import Checkpoint, bounded
from exactkv.cache.run import Memory, Run, Segment, copy_rows
from exactkv.cache.storage import DenseStorage, PartShapes
from exactkv.cache.store.tree import Path

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache, CacheSpec

Rows = tuple[Segment | None, ...]
"""For each zone of a model, the rows of a piece; None where it has none."""
_NOWHERE = Memory(DenseStorage(torch.float32, torch.device("cpu")), (), 0)


def free_standing(spec: CacheSpec, position: int) -> int:
    """The greatest q <= ``position`` at which every layer stands without a checkpoint, given all rows of the
    unbounded zones: ``position`` where all are full, a chunk boundary where others are chunked, mostly else 0."""
    if spec.recurrent:
        return 0
    zones = [zone for zone in spec.zones if bounded(zone)]
    while True:
        holds_nothing = Run(position, position, _NOWHERE)
        lowest = min((zone.standing(holds_nothing, position) for zone in zones), default=position)
        if lowest == position:
            return position
        position = lowest


def standing(spec: CacheSpec, checkpoints: Iterable[int], position: int) -> int:
    """The greatest q <= ``position`` at which every layer stands, with checkpoints at those positions."""
    return max([free_standing(spec, position), *(q for q in checkpoints if q <= position)])


def nbytes(storage: DenseStorage, layers: Sequence[PartShapes], rows: int) -> int:
    """Bytes that memory for so many rows of these layers takes; nothing is allocated."""
    meta = replace(storage, device=torch.device("meta"), poison=False)
    return Memory(meta, layers, rows).nbytes if rows > 0 and layers else 0


def rows_nbytes(spec: CacheSpec, storage: DenseStorage, low: int, high: int) -> int:
    """Bytes of the unbounded zones' rows for the positions [low, high)."""
    return sum(
        nbytes(storage, zone.layers, zone.clip(high) - zone.clip(low)) for zone in spec.zones if not bounded(zone)
    )


def checkpoint_nbytes(spec: CacheSpec, storage: DenseStorage, position: int) -> int:
    """Bytes of a checkpoint at ``position`` that shares nothing, states included."""
    rows = sum(
        nbytes(storage, zone.layers, zone.clip(position) - zone.needed_from(position))
        for zone in spec.zones
        if bounded(zone)
    )
    states = (part.dtype(storage).itemsize * _product(part.shape) for r in spec.recurrent for part in r.parts.values())
    return rows + sum(states)


def cut(spec: CacheSpec, storage: DenseStorage, runs: Sequence[Run], low: int, high: int) -> Rows:
    """The unbounded zones' rows for the positions [low, high), copied into immutable memory of just their size."""
    made: list[Segment | None] = []
    for zone, run in zip(spec.zones, runs, strict=True):
        a, b = zone.clip(low), zone.clip(high)
        if bounded(zone) or a >= b:
            made.append(None)
            continue
        memory = Memory(storage, zone.layers, b - a)
        copy_rows(run, a, b, memory, a)
        memory.shared = True
        made.append(Segment(memory, a, a, b))
    return tuple(made)


def assemble(cache: Cache, path: Path, tokens: list[int], position: int) -> None:
    """Give ``cache``, which has no rows, the row of ``tokens[:position]``, where ``path`` stands: full layers refer
    to the pieces, bounded ones are copied from the checkpoint at ``position``; it goes on with the checkpoints of
    its path."""
    from exactkv.cache.cache import Owner, Row

    on_path = [filed.checkpoint for filed in path.checkpoints() if filed.position <= position]
    here = on_path[-1] if on_path and on_path[-1].position == position else None
    policy, runs = cache._policy, []
    for z, zone in enumerate(cache.spec.zones):
        end = zone.clip(position)
        segments: tuple[Segment, ...]
        if bounded(zone):
            start = origin = min(zone.needed_from(position), end)
            segments = (here.zones[z] or ()) if here is not None else ()
        else:
            start, origin = zone.low, end
            segments = tuple(
                replace(s, end=min(s.end, zone.clip(upto), end))
                for node, upto in path.steps
                if (s := node.rows[z]) is not None and s.start < min(zone.clip(upto), end)
            )
        reach = policy._reach(zone, origin) or 0
        memory = Memory(policy.storage, zone.layers, reach if policy.reserve else 0)
        run = Run(start, origin, memory, segments)
        if bounded(zone):
            run = Run(start, origin, memory)
            policy._ensure(zone, run, end - start, (0, 0))
            copy_rows(Run(start, end, _NOWHERE, segments), start, end, memory, start)
        runs.append(run)
    states = (here.state,) if here is not None and here.state is not None else ()
    cache._hold((Row(Owner(tokens[:position]), position, tuple(runs), states),))


def objects(rows: Iterable[Segment | None], checkpoint: Checkpoint | None = None) -> dict[int, tuple[object, int]]:
    """What is kept alive, each once: identity -> (it, bytes)."""
    found: dict[int, tuple[object, int]] = {id(s.memory): (s.memory, s.memory.nbytes) for s in rows if s is not None}
    if checkpoint is not None:
        for zone in checkpoint.zones:
            found |= {id(s.memory): (s.memory, s.memory.nbytes) for s in zone or ()}
        for layer in checkpoint.state.layers if checkpoint.state is not None else ():
            found |= {id(t): (t, t.untyped_storage().nbytes()) for t in layer.values()}
    return found


def _product(shape: Iterable[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
