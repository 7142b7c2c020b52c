"""A step with nothing before it."""

from __future__ import annotations

from collections.abc import Sequence

from exactkv.cache import recurrent
from exactkv.cache.row import CacheSpec
from exactkv.cache.storage import Storage
from exactkv.cache.view import Fresh, Placement, Step


def uncached_step(spec: CacheSpec, storage: Storage, width: int, lengths: Sequence[int]) -> Step:
    """A step with nothing before it and nothing kept: one full forward pass."""
    counts = tuple(lengths)
    placements: list[list[Placement]] = []
    for zone in spec.zones:
        row_placements = []
        for count in counts:
            low, high = zone.clip(0), zone.clip(count)
            fresh = Fresh(low, low, high - low) if high > low else None
            row_placements.append(Placement((), None, fresh, None))
        placements.append(row_placements)
    starts = (0,) * len(counts)
    step = Step(starts, counts, width, placements, storage)
    step.before, step.stretches = (None,) * len(counts), recurrent.stretches((), counts, width)
    return step
