"""From a row of a cache to pieces and back: where a model can stand, what a piece takes, a cache row from pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exactkv.cache import checkpoint
from exactkv.cache.checkpoint import Checkpoint, bounded
from exactkv.cache.layer import Zone
from exactkv.cache.recurrent import State
from exactkv.cache.row import CacheSpec, Owner, Row
from exactkv.cache.run import Memory, Run, Segment, copy_rows
from exactkv.cache.storage import PartShapes, Storage
from exactkv.cache.store.files import Broken

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache

Rows = tuple[Segment | None, ...]
"""For each zone of a model, the rows of a piece; None where it has none."""
_NOWHERE = Memory(Storage(torch.float32, torch.device("cpu")), (), 0)


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


# Bytes, before anything is allocated.


def _memory_nbytes(storage: Storage, layers: Sequence[PartShapes], rows: int) -> int:
    return Memory(_meta(storage), layers, rows).nbytes if rows > 0 and layers else 0


def _meta(storage: Storage) -> Storage:
    return replace(storage, device=torch.device("meta"), poison=False)


def rows_nbytes(spec: CacheSpec, storage: Storage, low: int, high: int) -> int:
    """Bytes of the unbounded zones' rows for the positions [low, high)."""
    spans = ((z.layers, z.clip(high) - z.clip(low)) for z in spec.zones if not bounded(z))
    return sum(_memory_nbytes(storage, *span) for span in spans)


def checkpoint_nbytes(spec: CacheSpec, storage: Storage, position: int) -> int:
    """Bytes of a checkpoint at ``position`` that shares nothing, states included."""
    spans = ((z.layers, z.clip(position) - z.needed_from(position)) for z in spec.zones if bounded(z))
    states = (part.dtype(storage).itemsize * prod(part.shape) for r in spec.recurrent for part in r.parts.values())
    return sum(_memory_nbytes(storage, *span) for span in spans) + sum(states)


def objects(rows: Iterable[Segment | None], filed: Checkpoint | None = None) -> dict[int, tuple[object, int]]:
    """What is kept alive, each once: identity -> (it, bytes)."""
    found: dict[int, tuple[object, int]] = {id(s.memory): (s.memory, s.memory.nbytes) for s in rows if s is not None}
    if filed is not None:
        found |= {key: (memory, memory.nbytes) for key, memory in checkpoint.memories([filed]).items()}
        for layer in filed.state.layers if filed.state is not None else ():
            found |= {id(t): (t, t.untyped_storage().nbytes()) for t in layer.values()}
    return found


# From a row.


def cut(spec: CacheSpec, storage: Storage, runs: Sequence[Run], low: int, high: int) -> Rows:
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


def rows_as_tensors(spec: CacheSpec, runs: Sequence[Run], low: int, high: int) -> dict[str, Tensor | list[Tensor]]:
    """The same as views: "zone.layer.part" -> those of [H, n, D] that lie one behind the other."""
    out: dict[str, Tensor | list[Tensor]] = {}
    for z, (zone, run) in enumerate(zip(spec.zones, runs, strict=True)):
        if not bounded(zone):
            out |= _views(z, zone, run, zone.clip(low), zone.clip(high))
    return out


def checkpoint_as_tensors(
    spec: CacheSpec, runs: Sequence[Run], state: State | None, position: int
) -> dict[str, Tensor | list[Tensor]]:
    """What a checkpoint at ``position`` holds, as views: rows as above, states as "state.layer.part"."""
    out: dict[str, Tensor | list[Tensor]] = {}
    for z, (zone, run) in enumerate(zip(spec.zones, runs, strict=True)):
        if bounded(zone):
            out |= _views(z, zone, run, zone.needed_from(position), zone.clip(position))
    for i, parts in enumerate(state.layers if state is not None else ()):
        out |= {f"state.{i}.{name}": tensor for name, tensor in parts.items()}
    return out


def runs_of(spec: CacheSpec, filed: Checkpoint) -> list[Run]:
    """The rows of a checkpoint as runs that have nothing of their own."""
    made = []
    for zone, segments in zip(spec.zones, filed.zones, strict=True):
        end = zone.clip(filed.position)
        made.append(Run(min(zone.needed_from(filed.position), end), end, _NOWHERE, segments or ()))
    return made


def _views(z: int, zone: Zone, run: Run, low: int, high: int) -> dict[str, Tensor | list[Tensor]]:
    held = list(run.pieces(low, high)) if low < high else []
    return {
        f"{z}.{slot}.{name}": [p.memory.buffers[slot][name].narrow(1, p.at, p.rows) for p in held]
        for slot, parts in enumerate(held[0].memory.buffers if held else ())
        for name in parts
    }


# From tensors.


def rows_from(
    spec: CacheSpec, storage: Storage, tensors: Mapping[str, Tensor], start: int, stop: int, low: int, high: int
) -> Rows:
    """Of a piece [start, stop) that was written with ``rows_as_tensors``, the rows of [low, high). Raises Broken where
    the tensors are not those of such a piece."""
    return tuple(
        None if bounded(zone)
        else _segment(storage, zone, z, tensors, (zone.clip(start), zone.clip(stop)), (zone.clip(low), zone.clip(high)))
        for z, zone in enumerate(spec.zones)
    )  # fmt: skip


def checkpoint_from(spec: CacheSpec, storage: Storage, tensors: Mapping[str, Tensor], position: int) -> Checkpoint:
    """The way back from ``checkpoint_as_tensors``. Raises Broken where the tensors are not those of such a one."""
    zones: list[tuple[Segment, ...] | None] = []
    for z, zone in enumerate(spec.zones):
        span = (zone.needed_from(position), zone.clip(position))
        held = _segment(storage, zone, z, tensors, span, span) if bounded(zone) else None
        zones.append(((held,) if held is not None else ()) if bounded(zone) else None)
    layers = []
    for i, layer in enumerate(spec.recurrent):
        found = {name: tensors.get(f"state.{i}.{name}") for name in layer.parts}
        for name, part in layer.parts.items():
            _fits(f"state.{i}.{name}", found[name], tuple(part.shape), part.dtype(storage))
        layers.append({name: t.to(storage.device) for name, t in found.items() if t is not None})
    return Checkpoint(position, tuple(zones), State(position, tuple(layers)) if layers else None)


def _segment(
    storage: Storage, zone: Zone, z: int, tensors: Mapping[str, Tensor], held: tuple[int, int],
    wanted: tuple[int, int],
) -> Segment | None:  # fmt: skip
    (start, stop), (low, high) = held, wanted
    if low >= high:
        return None
    memory = Memory(storage, (), 0)
    for slot, parts in enumerate(zone.layers):
        made = {}
        for name, expected in _meta(storage).allocate(parts, stop - start).items():
            tensor = tensors.get(f"{z}.{slot}.{name}")
            _fits(f"{z}.{slot}.{name}", tensor, tuple(expected.shape), expected.dtype)
            assert tensor is not None
            kept = tensor if (low, high) == (start, stop) else tensor.narrow(1, low - start, high - low).clone()
            made[name] = kept.to(storage.device)
        memory.buffers.append(made)
    memory.capacity, memory.shared = high - low, True
    return Segment(memory, low, low, high)


def _fits(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        given = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise Broken(f"its tensor {name} is {given}; this model's is {dtype} {list(shape)}")


# To a row.


class Builder:
    """Gives ``cache``, of one row and empty, a row of ``position`` tokens, piece by piece.

    ``merge``: copy unbounded zones' rows into one run of the cache's own, with room for ``more`` tokens and a step
    (where one contiguous run is the faster to read); else the row refers to the pieces.
    """

    def __init__(self, cache: Cache, position: int, more: int, merge: bool):
        self.cache, self.position, self.merge = cache, position, merge
        self._segments: list[list[Segment]] = [[] for _ in cache.spec.zones]
        self._memories = [self._memory(zone, more) for zone in cache.spec.zones]

    def add(self, rows: Rows, upto: int) -> None:
        """The next piece, of which the row has what lies before ``upto``."""
        for z, (zone, held) in enumerate(zip(self.cache.spec.zones, rows, strict=True)):
            end = zone.clip(min(upto, self.position))
            if held is None or bounded(zone) or held.start >= end:
                continue
            segment = replace(held, end=min(held.end, end))
            if self.merge:
                run = Run(segment.start, segment.end, _NOWHERE, (segment,))
                copy_rows(run, segment.start, segment.end, self._memories[z], zone.low)
            else:
                self._segments[z].append(segment)

    def finish(self, tokens: list[int], here: Checkpoint | None, kept: Iterable[Checkpoint] = ()) -> None:
        """The row is whole: bounded zones are copied from the checkpoint ``here``; ``kept``: those that it goes on
        with, in order of position."""
        position, policy, runs = self.position, self.cache._policy, []
        for z, zone in enumerate(self.cache.spec.zones):
            end = zone.clip(position)
            if bounded(zone):
                held = (here.zones[z] or ()) if here is not None else ()
                if held:
                    runs.append(policy.restored(zone, held, position))
                else:
                    runs.append(replace(policy.new_run(zone), start=end, origin=end))
            else:
                origin = zone.low if self.merge else end
                runs.append(Run(zone.low, origin, self._memories[z], tuple(self._segments[z])))
        states = (here.state,) if here is not None and here.state is not None else ()
        wanted = self.cache.checkpoint_policy.max_bytes
        row = Row(Owner(tokens), position, tuple(runs), states, checkpoint.thinned(list(kept), wanted))
        self.cache._hold((row,))

    def _memory(self, zone: Zone, more: int) -> Memory:
        policy, end = self.cache._policy, zone.clip(self.position)
        if bounded(zone):
            return _NOWHERE
        origin = zone.low if self.merge else end
        reach = policy._reach(zone, origin)
        if policy.reserve:
            return Memory(policy.storage, zone.layers, reach or 0)
        rows = end - origin + more + policy.step if self.merge else 0
        return Memory(policy.storage, zone.layers, rows if reach is None else min(rows, reach))


def tensor_bytes(found: Iterable[object]) -> int:
    """Bytes that memories and tensors really hold: every storage, once."""
    tensors = chain.from_iterable(
        (t for layer in o.buffers for t in layer.values()) if isinstance(o, Memory) else (o,) for o in found
    )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())
