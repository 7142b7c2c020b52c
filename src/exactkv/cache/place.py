"""Making room: before a call, for one row and one zone, decide where the call's rows go.

Whatever is reorganised here leaves the row's content as it was, so that a call given up midway costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from exactkv.cache.layer import Zone
from exactkv.cache.run import Memory, Run, Segment, copy_rows
from exactkv.cache.storage import Storage
from exactkv.cache.view import Fresh, Placement, Write


@dataclass(frozen=True)
class Policy:
    """How memory is allocated. ``step``: rows by which a run grows at least; ``max_length``: tokens a row may
    have, None if no limit is set; ``reserve``: allocate for ``max_length`` at once."""

    storage: Storage
    step: int
    slack: int
    max_length: int | None
    reserve: bool

    def new_run(self, zone: Zone) -> Run:
        """The run of a new row."""
        capacity = (self._reach(zone, zone.low) or 0) if self.reserve else 0
        return Run(zone.low, zone.low, self._allocate(zone, capacity))

    def place(self, zone: Zone, run: Run, length: int, count: int) -> tuple[Run, Placement]:
        """Place ``count`` more tokens of a row that has ``length``. Returns the run as it now is, its content
        unchanged, and the placement."""
        low, high = zone.clip(length), zone.clip(length + count)
        seen = max(run.start, zone.needed_from(length))
        kept_from = max(run.start, min(high, zone.retained_from(length + count, self.slack)))
        if low == high:  # nothing of the call belongs to this zone
            return run, Placement(tuple(run.pieces(seen, high)), None, None, run.advanced(kept_from))
        offset = low - length
        if high - run.origin > run.memory.capacity:
            run = self._with_room(zone, run, low, high)
        if high - run.origin <= run.memory.capacity:
            write = Write(run.memory, low - run.origin, offset, high - low)
            return run, Placement(tuple(run.pieces(seen, high)), write, None, run.advanced(kept_from))
        # More than a bounded run may hold: read the call's rows from the call, keep the newest.
        reach = self._reach(zone, kept_from) or 0
        target = self._allocate(zone, reach if self.reserve else min(max(high - kept_from, self.step), reach))
        copy_rows(run, kept_from, low, target, kept_from)
        tail = max(kept_from, low)
        write = Write(target, tail - kept_from, tail - length, high - tail)
        after = Run(kept_from, kept_from, target)
        return run, Placement(tuple(run.pieces(seen, low)), write, Fresh(low, offset, high - low), after)

    def detached(self, zone: Zone, run: Run, length: int) -> Run:
        """The same content without private memory that another row refers to. Short runs are copied, and so are
        bounded ones, whose memory must stay within their bound; a long run of a full layer becomes a segment that
        both share. What grows from there grows by steps, also where the first row's memory was reserved."""
        end = zone.clip(length)
        first = min(run.first, end)
        if end - first < self.step or zone.bound is not None or zone.high is not None:
            fresh = Run(run.start, first, self._allocate(zone, 0), run.segments)
            self._ensure(zone, fresh, end - first, (0, 0))
            copy_rows(run, first, end, fresh.memory, first)
            return fresh
        run.memory.shared = True
        segment = Segment(run.memory, run.origin, first, end)
        return Run(run.start, end, self._allocate(zone, 0), (*run.segments, segment))

    def restored(self, zone: Zone, segments: tuple[Segment, ...], position: int) -> Run:
        """A run of a bounded zone at ``position``: copies of the rows it needs there, in memory of its own."""
        low, high = zone.needed_from(position), zone.clip(position)
        held = Run(low, high, segments[0].memory, segments)
        fresh = Run(low, low, self._allocate(zone, 0))
        self._ensure(zone, fresh, high - low, (0, 0))
        copy_rows(held, low, high, fresh.memory, low)
        return fresh

    def _with_room(self, zone: Zone, run: Run, low: int, high: int) -> Run:
        """Room for the rows up to ``high`` in private memory if it may be had: by moving to the front what is
        held, where that frees enough, else by growing."""
        held, freed, needed = low - run.first, run.first - run.origin, high - run.first
        limit = self._reach(zone, run.origin)
        fits = limit is None or high - run.origin <= limit
        if needed <= run.memory.capacity and (not fits or 4 * freed >= held):
            return self._moved(zone, run, low, run.memory.capacity)
        if fits:
            self._ensure(zone, run, high - run.origin, (run.first - run.origin, low - run.origin))
            return run
        limit = self._reach(zone, run.first)
        if limit is not None and needed <= limit:
            return self._moved(zone, run, low, self._enlarged(run.memory.capacity, needed, limit))
        return run

    def _moved(self, zone: Zone, run: Run, end: int, capacity: int) -> Run:
        """What is held, at the front of memory: of the same one, if source and destination lie apart."""
        first = min(run.first, end)
        apart = end - first <= first - run.origin and capacity <= run.memory.capacity
        target = run.memory if apart else self._allocate(zone, capacity)
        copy_rows(Run(first, run.origin, run.memory), first, end, target, first)
        return Run(run.start, first, target, run.segments)

    def _ensure(self, zone: Zone, run: Run, rows: int, live: tuple[int, int]) -> None:
        if rows > run.memory.capacity:
            capacity = self._enlarged(run.memory.capacity, rows, self._reach(zone, run.origin))
            run.memory.grow(self.storage, zone.layers, capacity, live)

    def _enlarged(self, capacity: int, rows: int, limit: int | None) -> int:
        """By a step or an eighth, whichever is more; at least ``rows``; at most ``limit``."""
        wanted = max(rows, capacity + max(self.step, capacity // 8))
        return wanted if limit is None else max(rows, min(wanted, limit))

    def _reach(self, zone: Zone, origin: int) -> int | None:
        """The most rows that memory beginning at ``origin`` may hold."""
        limit = zone.capacity_limit(self.slack, self.max_length)
        if limit is None or zone.bound is not None:
            return limit
        return limit - (origin - zone.low)

    def _allocate(self, zone: Zone, capacity: int) -> Memory:
        return Memory(self.storage, zone.layers, capacity)
