"""The files of the disk tier: safetensors, written whole or not at all, with their identity inside."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from exactkv.cache.checkpoint import Checkpoint
from exactkv.cache.recurrent import State
from exactkv.cache.run import Memory, Segment
from exactkv.cache.storage import DenseStorage
from exactkv.cache.store.pieces import Rows

FORMAT, VERSION = "exactkv prompt store", 1
SUFFIX, UNFINISHED = ".safetensors", ".tmp"


class Broken(Exception):
    """A file is missing, altered or not what the index says."""


def digest(tokens: array[int]) -> str:
    """Names a text, in a file that is about what follows it."""
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def write(directory: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> tuple[str, int, str]:
    """A new file: its name, its bytes, its sha256. It has its name only when it is all on the disk."""
    said = {"format": FORMAT, "version": VERSION, **about}
    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    data = safetensors.torch.save(ready, {"about": json.dumps(said, sort_keys=True)})
    name = uuid.uuid4().hex + SUFFIX
    unfinished = directory / (name + UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, directory / name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(directory)
    return name, len(data), hashlib.sha256(data).hexdigest()


def read(path: Path, sha256: str, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file. Raises Broken where it is not, to the byte, what was written, or about another thing."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Broken(f"{path.name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Broken(f"{path.name} is not what was written: its sha256 differs")
    try:
        said = json.loads(header(data)["about"])
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise Broken(f"{path.name} is no file of a prompt store: {error}") from error
    for key, expected in {"format": FORMAT, "version": VERSION, **about}.items():
        if said.get(key) != expected:
            raise Broken(f"{path.name} has the {key} {said.get(key)!r}; the index says {expected!r}")
    return dict(tensors)


def header(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file. Raises ValueError where it has none."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= len(data) - 8:
        raise ValueError("its header is cut off")
    found: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return found


def _sync(directory: Path) -> None:
    """Make a new name in the directory last, where the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# What is kept, as named tensors, and back.


def of_rows(rows: Rows, low: int, high: int) -> dict[str, Tensor]:
    """The rows of a piece for the positions [low, high): "zone.layer.part" -> [H, n, D]."""
    out = {}
    for z, segment in enumerate(rows):
        if segment is None:
            continue
        a, b = max(low, segment.start), min(high, segment.end)
        for slot, parts in enumerate(segment.memory.buffers if a < b else ()):
            for name, buffer in parts.items():
                out[f"{z}.{slot}.{name}"] = buffer.narrow(1, a - segment.origin, b - a)
    return out


def of_checkpoint(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Rows as "zone.layer.part" -> [H, n, D], states as "state.layer.part"."""
    out: dict[str, Tensor] = {}
    for z, zone in enumerate(checkpoint.zones):
        for slot in range(len(zone[0].memory.buffers) if zone else 0):
            for name in zone[0].memory.buffers[slot] if zone else ():
                held = [s.memory.buffers[slot][name].narrow(1, s.start - s.origin, s.end - s.start) for s in zone or ()]
                out[f"{z}.{slot}.{name}"] = torch.cat(held, dim=1) if len(held) > 1 else held[0]
    for i, parts in enumerate(checkpoint.state.layers if checkpoint.state is not None else ()):
        out |= {f"state.{i}.{name}": t for name, t in parts.items()}
    return out


def segment(
    tensors: Mapping[str, Tensor], z: int, layers: int, start: int, low: int, high: int, storage: DenseStorage
) -> Segment | None:
    """A zone's rows for [low, high) from a file whose rows begin at ``start``; None for none."""
    if low >= high:
        return None
    memory = Memory(storage, (), 0)
    for slot in range(layers):
        prefix, parts = f"{z}.{slot}.", {}
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                kept = tensor.narrow(1, low - start, high - low)
                whole = kept.shape == tensor.shape
                parts[name.removeprefix(prefix)] = (kept if whole else kept.clone()).to(storage.device)
        memory.buffers.append(parts)
    memory.capacity, memory.shared = high - low, True
    return Segment(memory, low, low, high)


def state(tensors: Mapping[str, Tensor], position: int, layers: int, device: torch.device) -> State | None:
    """The recurrent layers' state of a file of a checkpoint; None for a model without any."""
    if not layers:
        return None
    found = []
    for i in range(layers):
        prefix = f"state.{i}."
        found.append({n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)})
    return State(position, tuple(found))
