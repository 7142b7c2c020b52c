"""Caches that store with loss, each against its own one pass."""

from __future__ import annotations

from dataclasses import replace

from exactkv.verify.schedules import batching, feeding, files, rewinding

_TAKEN = (
    "steps", "allocation", "long", "random pieces", "warm pieces", "rewind", "fork", "save and load", "ragged batch",
    "leaving rows", "joining rows",
)  # fmt: skip

SCHEDULES = [
    replace(s, name=f"quantized: {s.name}", kinds="N", on="quantized")
    for module in (feeding, rewinding, files, batching)
    for s in module.SCHEDULES
    if s.name in _TAKEN
]
