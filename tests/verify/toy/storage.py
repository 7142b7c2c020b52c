"""How rows of keys or values are kept: as they are, or in groups of four with a scale each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Parts = dict[str, Array]
GROUP = 4


@dataclass(frozen=True)
class Dense:
    """``encode`` makes parts whose leading axes are those of the rows; ``decode`` undoes it."""

    name: str = "default"

    def encode(self, x: Array) -> Parts:
        return {"x": x}

    def decode(self, parts: Parts, dim: int) -> Array:
        return parts["x"]


@dataclass(frozen=True)
class Quantized:
    """Each group of four neighbours as codes of ``bits`` bits between its least and its greatest value."""

    name: str
    bits: int

    def encode(self, x: Array) -> Parts:
        missing = -x.shape[-1] % GROUP
        x = np.concatenate([x, x[..., -1:].repeat(missing, -1)], -1) if missing else x
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
        low, high = groups.min(-1), groups.max(-1)
        scale = np.where(high > low, (high - low) / (2**self.bits - 1), 1.0)
        codes = np.rint((groups - low[..., None]) / scale[..., None]).astype(np.uint8)
        return {"codes": codes, "scale": scale, "low": low}

    def decode(self, parts: Parts, dim: int) -> Array:
        groups = parts["codes"] * parts["scale"][..., None] + parts["low"][..., None]
        return groups.reshape(*groups.shape[:-2], groups.shape[-2] * GROUP)[..., :dim]


STORAGES = {s.name: s for s in (Dense(), Quantized("q8", 8), Quantized("q4", 4))}
