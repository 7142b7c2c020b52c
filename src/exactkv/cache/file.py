"""Save and load: a cache in one file, with what it is the cache of.

Saved is where each row lies as well as what lies there: the same runs, segments and capacities at the same indices, so
that going on is bit for bit what it would have been. What rows and checkpoints share is saved, and shared again, once.
Memory that holds no live row is not saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from exactkv.cache import container
from exactkv.cache.checkpoint import Checkpoint, CheckpointPolicy
from exactkv.cache.checks import as_path
from exactkv.cache.recurrent import State
from exactkv.cache.row import CacheSpec, Owner, Row
from exactkv.cache.run import Memory, Run, Segment
from exactkv.cache.storage import Storage
from exactkv.errors import InputError, IntegrityError, LoadError

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache


class CacheMaker(Protocol):
    """What loading asks of a model."""

    def new_cache(self, batch_size: int, storage: str, slack: int, max_length: int | None, step: int,
                  checkpoints: CheckpointPolicy | None) -> Cache: ...  # fmt: skip


def save(cache: Cache, path: str | os.PathLike[str]) -> None:
    """Write ``cache`` to ``path``; a file that is there is replaced when all is written.
    Raises InputError where there is no such directory, OSError where it cannot be written."""
    file = as_path("path", path)
    layout = _Layout(cache)
    content = {"exactkv": _version(), **_described(cache), **layout.content()}
    container.write(file, content, layout.tensors)


def load_cache(path: str | os.PathLike[str], model: CacheMaker) -> Cache:
    """The cache that ``Cache.save`` wrote to ``path``, on the model's device, as if it had never been away.

    ``model`` must be the one that it was saved from: the same weights, config, dtype and kind of rope. Raises LoadError
    where it is another, and where the file is missing, truncated, altered, of a newer format or none of ours.
    """
    file = as_path("path", path)
    content, tensors = container.read(file)
    cache = _empty(file, content, model)
    try:
        cache._hold(_Loaded(cache, content, tensors).rows())
        cache._exclusive = False
        cache.check_integrity()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, IntegrityError) as error:
        raise LoadError(f"{file} does not hold what its header says: {error}; save the cache again") from error
    return cache


def describe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved cache is, from its header alone: "file", "bytes", "exactkv" (the version that wrote it), "model",
    "identity", "storage", "dtype", "slack", "step", "max_length", "layers", "rows" (of each its "length", and the
    "position" and "label" of its "checkpoints"). Raises LoadError as ``load_cache`` does; rows are not read."""
    file = as_path("path", path)
    content = container.read_content(file)
    try:
        return {"file": str(path), "bytes": file.stat().st_size, **_told(content)}
    except (KeyError, IndexError, TypeError) as error:
        raise LoadError(f"{file} does not hold what its header says: {error}; save the cache again") from error


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    filed = [{"position": c["position"], "label": c["label"]} for c in content["checkpoints"]]
    rows = [{"length": r["length"], "checkpoints": [filed[i] for i in r["checkpoints"]]} for r in content["rows"]]
    kept = ("exactkv", "model", "identity", "storage", "dtype", "slack", "step", "max_length", "layers", "recurrent")
    return {**{k: content[k] for k in kept}, "rows": rows}


def _version() -> str:
    from exactkv import __version__

    return __version__


def _described(cache: Cache) -> dict[str, Any]:
    """What a model must have in common with the cache, and how the cache was made."""
    policy, wanted = cache._policy, cache.checkpoint_policy
    return {
        **_of_model(cache),
        "slack": policy.slack, "step": policy.step, "max_length": cache.max_length, "reserve": policy.reserve,
        "every": wanted.every, "max_bytes": wanted.max_bytes,
    }  # fmt: skip


def _of_model(cache: Cache) -> dict[str, Any]:
    spec, storage = cache.spec, cache.storage
    return {
        "model": dict(spec.described),
        "layers": [[str(layer.pattern), _parts(layer.parts)] for layer in spec.layers],
        "recurrent": [{name: list(p.shape) for name, p in layer.parts.items()} for layer in spec.recurrent],
        "dtype": str(storage.dtype).removeprefix("torch."),
        "storage": storage.name,
        "identity": spec.identity,
    }


def _parts(parts: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {name: list(sizes) for name, sizes in parts.items()}


def _empty(file: Path, content: Mapping[str, Any], model: CacheMaker) -> Cache:
    """A cache of no rows, made as the saved one was. Raises LoadError where the model is another one."""
    given = content["max_length"] if content["reserve"] else None
    wanted = CheckpointPolicy(content["every"], content["max_bytes"])
    try:
        cache = model.new_cache(0, content["storage"], content["slack"], given, content["step"], wanted)
    except InputError as error:
        raise LoadError(f"{file} does not fit this model: {error}; load it with the model it was saved from") from error
    mine = _of_model(cache)
    advice = "load it with the model that it was saved from, or feed its tokens to a new cache"
    saved, own = content["model"], mine["model"]
    for what, theirs, ours in (
        ("layers", content["layers"], mine["layers"]),
        ("recurrent layers", content["recurrent"], mine["recurrent"]),
        ("dtype", content["dtype"], mine["dtype"]),
        ("config", saved.get("config"), own.get("config")),
    ):
        if theirs != ours:
            raise LoadError(f"{file} is of a model with other {what}: {_brief(theirs, ours)}; {advice}")
    theirs, ours = content["identity"].partition(" "), mine["identity"].partition(" ")
    if theirs[0] != ours[0]:
        raise LoadError(f"{file} is of a model with other weights: {theirs[0][:12]}, this has {ours[0][:12]}; {advice}")
    if theirs != ours or content["max_length"] != cache.max_length:
        raise LoadError(
            f"{file} was made for another kind of rope: max_length {content['max_length']}, this model takes "
            f"{cache.max_length}; {advice}"
        )
    return cache


def _brief(theirs: object, ours: object) -> str:
    if isinstance(theirs, Sequence) and isinstance(ours, Sequence) and not isinstance(theirs, str):
        if len(theirs) != len(ours):
            return f"{len(theirs)}, this one has {len(ours)}"
        i = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        return f"layer {i} is {theirs[i]}, here {ours[i]}"
    return f"{theirs}, this one has {ours}"


class _Layout:
    """A cache as JSON, its objects by number, and the tensors beside it."""

    def __init__(self, cache: Cache):
        self._memories: dict[int, tuple[int, int, Memory, list[tuple[int, int]]]] = {}
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []  # what is numbered by its identity must live as long
        self._states: list[dict[str, Any]] = []
        self._checkpoints: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor | list[Tensor]] = {}
        lengths: dict[int, int] = {}
        owners: dict[int, Owner] = {}
        for row in cache._rows:
            owners[id(row.owner)] = row.owner
            lengths[id(row.owner)] = max(row.length, lengths.get(id(row.owner), 0))
        self._owners = {key: i for i, key in enumerate(owners)}
        for key, i in self._owners.items():
            self.tensors[f"tokens.{i}"] = torch.tensor(owners[key].log[: lengths[key]], dtype=torch.int64)
        self._rows = [self._row(cache, r, row) for r, row in enumerate(cache._rows)]
        for i, _, memory, live in self._memories.values():
            for slot, parts in enumerate(memory.buffers):
                for name, buffer in parts.items():
                    self.tensors[f"rows.{i}.{slot}.{name}"] = [buffer[:, a:b] for a, b in merged(live)] or [
                        buffer[:, :0]
                    ]

    def content(self) -> dict[str, Any]:
        memories = [
            {"zone": zone, "capacity": memory.capacity, "shared": memory.shared, "live": merged(live)}
            for _, zone, memory, live in self._memories.values()
        ]
        return {
            "memories": memories, "states": self._states, "checkpoints": self._checkpoints, "rows": self._rows
        }  # fmt: skip

    def _row(self, cache: Cache, r: int, row: Row) -> dict[str, Any]:
        runs = []
        for z, (zone, run) in enumerate(zip(cache.spec.zones, row.runs, strict=True)):
            low, high = run.first - run.origin, zone.clip(row.length) - run.origin
            memory = self._memory(z, run.memory, low, high)
            segments = [self._segment(z, s) for s in run.segments]
            runs.append({"start": run.start, "origin": run.origin, "memory": memory, "segments": segments})
        return {
            "owner": self._owners[id(row.owner)], "length": row.length, "runs": runs,
            "states": [self._state(s) for s in row.states],
            "checkpoints": [self._checkpoint(c) for c in row.checkpoints],
            "detach": cache._is_shared(r),
        }  # fmt: skip

    def _memory(self, zone: int, memory: Memory, low: int, high: int) -> int:
        number, _, _, live = self._memories.setdefault(id(memory), (len(self._memories), zone, memory, []))
        if low < high:
            live.append((low, high))
        return number

    def _segment(self, zone: int, s: Segment) -> list[int]:
        return [self._memory(zone, s.memory, s.start - s.origin, s.end - s.origin), s.origin, s.start, s.end]

    def _state(self, state: State) -> int:
        if id(state) not in self._numbers:
            number = self._numbers[id(state)] = len(self._states)
            self._held.append(state)
            self._states.append({"position": state.position})
            for i, parts in enumerate(state.layers):
                for name, tensor in parts.items():
                    self.tensors[f"state.{number}.{i}.{name}"] = tensor
        return self._numbers[id(state)]

    def _checkpoint(self, filed: Checkpoint) -> int:
        if id(filed) not in self._numbers:
            self._numbers[id(filed)] = len(self._checkpoints)
            self._held.append(filed)
            zones = [None if z is None else [self._segment(i, s) for s in z] for i, z in enumerate(filed.zones)]
            state = None if filed.state is None else self._state(filed.state)
            self._checkpoints.append({"position": filed.position, "label": filed.label, "zones": zones, "state": state})
        return self._numbers[id(filed)]


class _Loaded:
    """The way back: objects made once each, by number."""

    def __init__(self, cache: Cache, content: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        self._content, self._tensors, self._device = content, tensors, cache.storage.device
        self._spec: CacheSpec = cache.spec
        self._memories = [self._memory(cache.storage, i, m) for i, m in enumerate(content["memories"])]
        self._states = [self._state(i, s["position"]) for i, s in enumerate(content["states"])]
        self._checkpoints = [self._checkpoint(c) for c in content["checkpoints"]]

    def rows(self) -> tuple[Row, ...]:
        owners = [
            Owner(self._tensors[f"tokens.{i}"].tolist()) for i in sorted({r["owner"] for r in self._content["rows"]})
        ]
        return tuple(self._row(row, owners) for row in self._content["rows"])

    def _row(self, row: Mapping[str, Any], owners: Sequence[Owner]) -> Row:
        runs = tuple(
            Run(run["start"], run["origin"], self._memories[run["memory"]], self._segments(run["segments"]))
            for run in row["runs"]
        )
        if row["detach"]:  # another cache referred to it too: it takes memory of its own, as it would have
            for run in runs:
                run.memory.shared = True
        states = tuple(self._states[i] for i in row["states"])
        checkpoints = tuple(self._checkpoints[i] for i in row["checkpoints"])
        return Row(owners[row["owner"]], row["length"], runs, states, checkpoints)

    def _memory(self, storage: Storage, number: int, saved: Mapping[str, Any]) -> Memory:
        memory = Memory(storage, self._spec.zones[saved["zone"]].layers, saved["capacity"])
        memory.shared = saved["shared"]
        for slot, parts in enumerate(memory.buffers):
            for name, buffer in parts.items():
                rows, at = self._tensors[f"rows.{number}.{slot}.{name}"], 0
                if rows.dtype != buffer.dtype or rows.shape[::2] != buffer.shape[::2]:
                    raise ValueError(f"{name} is {rows.dtype} {list(rows.shape)}, not {buffer.dtype}")
                for low, high in saved["live"]:
                    buffer[:, low:high] = rows[:, at : at + high - low]
                    at += high - low
        return memory

    def _segments(self, saved: Iterable[Sequence[int]]) -> tuple[Segment, ...]:
        return tuple(Segment(self._memories[m], origin, start, end) for m, origin, start, end in saved)

    def _state(self, number: int, position: int) -> State:
        layers = tuple(
            {name: self._tensors[f"state.{number}.{layer.index}.{name}"].to(self._device) for name in layer.parts}
            for layer in self._spec.recurrent
        )
        return State(position, layers)

    def _checkpoint(self, saved: Mapping[str, Any]) -> Checkpoint:
        zones = tuple(None if z is None else self._segments(z) for z in saved["zones"])
        state = None if saved["state"] is None else self._states[saved["state"]]
        return Checkpoint(saved["position"], zones, state, saved["label"])


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """[low, high) spans in order, those that touch or overlap made one."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if made and low <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return made
