"""Kind A of fault: the allocated size taken for the live length. The seed of this project, as a patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from exactkv.cache import ChunkedAttention
from exactkv.cache.layer import Zone
from exactkv.cache.place import Policy


@contextmanager
def allocated_size_taken_for_length() -> Iterator[None]:
    """Within, chunked layers behave as they did in a widely used engine: their memory grows in steps of 256 rows,
    and what to drop is decided by the *allocated* rows, so that live rows go and padding stays."""
    place, capacity_limit = Policy.place, Zone.capacity_limit

    def faulty_place(self, zone, run, length, count):
        run, placement = place(self, zone, run, length, count)
        after = placement.after
        if isinstance(zone.pattern, ChunkedAttention) and after is not None:
            allocated = after.memory.capacity
            if allocated >= zone.pattern.chunk_size:
                kept_from = after.origin + allocated - zone.pattern.chunk_size
                after = after.advanced(min(kept_from, zone.clip(length + count)))
        return run, placement._replace(after=after)

    def padded_limit(self, slack, max_length):
        limit = capacity_limit(self, slack, max_length)
        return None if limit is None else -(-limit // 256) * 256

    Policy.place, Zone.capacity_limit = faulty_place, padded_limit
    try:
        yield
    finally:
        Policy.place, Zone.capacity_limit = place, capacity_limit
