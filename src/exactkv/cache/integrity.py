"""The cache's contract as code: what must hold between any two operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exactkv.cache.checkpoint import bounded, memories
from exactkv.cache.recurrent import kept_from
from exactkv.errors import IntegrityError

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache
    from exactkv.cache.checkpoint import Checkpoint
    from exactkv.cache.layer import Zone
    from exactkv.cache.recurrent import State
    from exactkv.cache.row import Row
    from exactkv.cache.run import Memory, Run, Segment


def check(cache: Cache) -> None:
    """Raise IntegrityError, naming row, zone and rule, where ``cache`` breaks its contract."""
    for r, row in enumerate(cache._rows):
        where = f"row {r}"
        _require(row.length >= 0, where, f"its length is {row.length}")
        _require(len(row.owner.log) >= row.length, where, f"{row.length} tokens but {len(row.owner.log)} ids")
        _require(cache in row.owner.caches, where, "the cache is not registered with the row's owner")
        limit = cache.max_length
        _require(limit is None or row.length <= limit, where, f"length {row.length} exceeds {limit}")
        _require(len(row.runs) == len(cache.spec.zones), where, "not one run a zone")
        for zone, run in zip(cache.spec.zones, row.runs, strict=True):
            _check_run(cache, zone, run, row.length, f"{where}, {zone.pattern} from {zone.low}")
        _check_states(cache, row.states, row.length, f"{where}, recurrent")
        _check_checkpoints(cache, row, where)
    # One cache, one writer of each run: rows that share private memory must be due to detach.
    if cache._exclusive:
        written = [id(run.memory) for row in cache._rows for run in row.runs]
        _require(len(set(written)) == len(written), "batch", "two rows would write to the same memory")
        filed = memories(c for row in cache._rows for c in row.checkpoints)
        _require(not filed.keys() & set(written), "batch", "a row would write to the memory of a checkpoint")


def _check_run(cache: Cache, zone: Zone, run: Run, length: int, where: str) -> None:
    end = zone.clip(length)
    _require(zone.low <= run.start <= end, where, f"start {run.start} outside [{zone.low}, {end}]")
    held = list(run.pieces(run.start, end))
    position = run.start
    for piece in held:
        _require(piece.position == position, where, f"rows at {piece.position}, expected {position}")
        inside = piece.at >= 0 and piece.at + piece.rows <= piece.memory.capacity
        _require(inside, where, f"{piece.rows} rows at index {piece.at} of {piece.memory.capacity}")
        position += piece.rows
    _require(position == end, where, f"rows end at {position}, expected {end}")
    for segment in run.segments:
        _require(segment.memory.shared, where, "a segment's memory is not marked as shared")
        _require(segment.start < segment.end <= run.origin, where, "a segment reaches into the run")
    _check_memory(cache, zone, run.memory, where)
    if zone.bound is not None:
        _require(not run.segments, where, "a bounded layer shares memory, which its bound does not count")
        kept = zone.bound + cache.slack
        most = kept + max(1, kept // 4)
        _require(end - run.start <= kept, where, f"{end - run.start} rows retained, at most {kept}")
        _require(run.memory.capacity <= most, where, f"capacity {run.memory.capacity}, at most {most}")
    else:
        _require(run.start == zone.low, where, f"start is {run.start}: a row was given up")


def _check_memory(cache: Cache, zone: Zone, memory: Memory, where: str) -> None:
    for buffers, parts in zip(memory.buffers, zone.layers, strict=True):
        layout = cache.storage.layout(parts)
        _require(buffers.keys() == layout.keys(), where, f"buffers {list(buffers)} instead of {list(layout)}")
        for name, buffer in buffers.items():
            heads, size, dtype = layout[name]
            fits = buffer.dtype == dtype and buffer.shape[::2] == (heads, size) and buffer.shape[1] >= memory.capacity
            _require(fits, where, f"buffer {name!r} is {buffer.dtype} {list(buffer.shape)}")


def _check_checkpoints(cache: Cache, row: Row, where: str) -> None:
    at = [c.position for c in row.checkpoints]
    _require(at == sorted(set(at)), where, f"checkpoints at {at}: not in order")
    _require(not at or 0 < at[0] <= at[-1] <= row.length, where, f"checkpoints at {at}, the row has {row.length}")
    for filed in row.checkpoints:
        _check_checkpoint(cache, filed, f"{where}, checkpoint at {filed.position}")


def _check_checkpoint(cache: Cache, filed: Checkpoint, where: str) -> None:
    _require(len(filed.zones) == len(cache.spec.zones), where, "not one entry a zone")
    for zone, segments in zip(cache.spec.zones, filed.zones, strict=True):
        _require((segments is not None) == bounded(zone), where, f"rows of {zone.pattern}: {segments is not None}")
        position, end = zone.needed_from(filed.position), zone.clip(filed.position)
        for segment in segments or ():
            _require(position == segment.start < segment.end, where, f"rows at {segment.start}, expected {position}")
            _check_segment(cache, zone, segment, where)
            position = segment.end
        _require(segments is None or position >= end, where, f"rows end at {position}, expected {end}")
        _require(not segments or position == end, where, f"rows end at {position}, expected {end}")
    _require((filed.state is not None) == bool(cache.spec.recurrent), where, "a state too much or too few")
    if filed.state is not None:
        _require(filed.state.position == filed.position, where, f"its state is that of {filed.state.position} tokens")
        _check_state(cache, filed.state, where)


def _check_segment(cache: Cache, zone: Zone, segment: Segment, where: str) -> None:
    memory, low, high = segment.memory, segment.start - segment.origin, segment.end - segment.origin
    _require(memory.shared, where, "its memory is not marked as shared")
    _require(low >= 0 and high <= memory.capacity, where, f"rows at {low} to {high} of {memory.capacity}")
    _check_memory(cache, zone, memory, where)
    if cache.storage.poison:
        dead = any(bool(b[:, low:high].isnan().any()) for layer in memory.buffers for b in layer.values())
        _require(not dead, where, "it holds dead rows")


def _check_states(cache: Cache, states: tuple[State, ...], length: int, where: str) -> None:
    layers = cache.spec.recurrent
    if not layers or not length:
        _require(not states, where, "there are states of no tokens or no layers")
        return
    at = [state.position for state in states]
    _require(at == sorted(set(at)) and at[:1] >= [1], where, f"states at {at}: not in order")
    _require(at[-1:] == [length], where, f"states at {at}: none of the row's {length} tokens")
    _require(at[0] >= kept_from(length, cache.slack), where, f"states at {at}: more than slack {cache.slack} asks for")
    for state in states:
        _check_state(cache, state, where)


def _check_state(cache: Cache, state: State, where: str) -> None:
    layers = cache.spec.recurrent
    _require(len(state.layers) == len(layers), where, f"{len(state.layers)} states at {state.position}")
    for layer, parts in zip(layers, state.layers, strict=True):
        _require(parts.keys() == layer.parts.keys(), where, f"parts {list(parts)}")
        for name, part in layer.parts.items():
            fits = parts[name].shape == part.shape and parts[name].dtype == part.dtype(cache.storage)
            _require(fits, where, f"part {name!r} is {parts[name].dtype} {list(parts[name].shape)}")
            whole = parts[name].untyped_storage().nbytes() == parts[name].nbytes
            _require(whole, where, f"part {name!r} keeps memory alive that is not its own")


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise IntegrityError(f"{where}: {what}")
