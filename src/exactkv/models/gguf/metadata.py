"""An architecture's metadata, read so that no key which changes the arithmetic is passed over in silence."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from exactkv.errors import LoadError

_REQUIRED = object()

# Keys that change nothing; the vocabulary's size is that of the embedding.
_HARMLESS = ("tensor_data_layout", "vocab_size")


class Metadata:
    """The keys of an architecture, without its prefix, each taken once; ``finish`` refuses what nobody took.

    ``shapes``: GGUF tensor name -> shape in torch order. ``floats``: reads a small tensor.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        floats: Callable[[str], list[float]] = lambda name: [],
    ) -> None:
        self._values, self.shapes, self.floats = values, shapes, floats
        self._taken = set(_HARMLESS)
        self._parts = {name.split(".", 2)[2] for name in shapes if name.startswith("blk.")}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value, which may be stored once or once a layer: layers that differ are refused. Floats are turned from
        float32 to the shortest decimal that means the same float32, as config.json has it (1e-05)."""
        value = self.raw(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise LoadError(f"metadata {key} differs between layers ({str(value)[:60]}), which is not supported.")
            value = value[0]
        return _shortest(value) if isinstance(value, float) else value

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as it is stored. Raises LoadError where it must be there."""
        self._taken.add(key)
        if key not in self._values and default is _REQUIRED:
            raise LoadError(
                f"metadata {key} is missing; the file is damaged or incomplete, or was written by an old converter. "
                "Convert the model again with a current llama.cpp."
            )
        return self._values.get(key, default)

    def peek(self, key: str, default: Any = None) -> Any:
        """The value as it is stored; somebody else takes it."""
        return self._values.get(key, default)

    def by_layer(self, key: str, count: int, default: Any = _REQUIRED) -> list[Any]:
        """A value a layer, for the first ``count`` layers; one value is that of all."""
        value = self.raw(key, default)
        if isinstance(value, list) and len(value) < count:
            raise LoadError(f"metadata {key} has {len(value)} values, expected one for each of the {count} layers.")
        return value[:count] if isinstance(value, list) else [value] * count

    def check(self, key: str, *supported: Any) -> None:
        """A key that may be absent, but else must have one of these values."""
        if key in self and (value := self.take(key)) not in supported:
            raise LoadError(
                f"metadata {key} = {value} is not supported for this architecture; "
                f"supported: {', '.join(map(str, supported))}."
            )

    def ignore(self, *keys: str) -> None:
        """Keys that do not change the arithmetic here."""
        self._taken.update(keys)

    def has(self, part: str) -> bool:
        """Whether some layer has the tensor, as in "attn_q.bias"."""
        return part in self._parts

    def size(self, tensor: str, axis: int) -> int:
        """A tensor's size. Raises LoadError if there is no such tensor."""
        if tensor not in self.shapes or len(self.shapes[tensor]) <= axis:
            raise LoadError(f"the file holds no tensor {tensor}; it is damaged or holds a vocabulary only.")
        return self.shapes[tensor][axis]

    def finish(self) -> None:
        """Raise LoadError where a key is unknown."""
        if unknown := sorted(self._values.keys() - self._taken):
            shown = ", ".join(f"{key} = {str(self._values[key])[:60]}" for key in unknown)
            raise LoadError(
                f"metadata {shown} is not known for this architecture and may change what the model computes, so the "
                "file is refused."
            )


def _shortest(value: float) -> float:
    if not math.isfinite(value):
        return value
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
