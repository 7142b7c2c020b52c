"""The schedules: what is done with a target, a file a subject."""

from __future__ import annotations

from exactkv.verify.schedules import batching, feeding, files, generation, quantized, rewinding, storing
from exactkv.verify.schedules.world import Case, Schedule, World

SCHEDULES: tuple[Schedule, ...] = (
    *feeding.SCHEDULES,
    *rewinding.SCHEDULES,
    *files.SCHEDULES,
    *batching.SCHEDULES,
    *storing.SCHEDULES,
    *generation.SCHEDULES,
    *quantized.SCHEDULES,
)

__all__ = ["SCHEDULES", "Case", "Schedule", "World"]
