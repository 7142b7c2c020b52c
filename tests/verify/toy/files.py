"""Saving and loading: a digest, a line of JSON that says what it is of, and the arrays."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np

from tests.verify.toy.cache import Cache, CacheError
from tests.verify.toy.model import Model


def save(cache: Cache, path: Path) -> None:
    arrays = {f"{i}/{name}": a for i, m in enumerate(cache.memories) if m for name, a in m.arrays().items()}
    buffer = io.BytesIO()
    np.savez(buffer, **packed(arrays))
    header = json.dumps(
        {
            "model": identity(cache.model),
            "kind": cache.kind,
            "lengths": cache.lengths,
            "max_length": cache.max_length,
            "facts": {str(i): m.facts() for i, m in enumerate(cache.memories) if m},
        }
    )
    body = header.encode() + b"\n" + buffer.getvalue()
    path.write_bytes(digest(body) + b"\n" + body)


def load(model: Model, path: Path) -> Cache:
    """Raises CacheError for a file that is damaged, or of another model."""
    said, _, body = path.read_bytes().partition(b"\n")
    if said != digest(body):
        raise CacheError("the file is damaged")
    line, _, content = body.partition(b"\n")
    header = json.loads(line)
    if header["model"] != identity(model):
        raise CacheError("the file is of another model")
    cache = Cache(model, header["kind"], len(header["lengths"]), max_length=header["max_length"])
    cache.lengths = header["lengths"]
    arrays = np.load(io.BytesIO(content))
    for i, memory in enumerate(cache.memories):
        if memory is not None:
            own = {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{i}/")}
            memory.restore(own, header["facts"][str(i)])
    return cache


def packed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays in the form in which they are written: as they are."""
    return arrays


def identity(model: Model) -> str:
    return model.fingerprint


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
