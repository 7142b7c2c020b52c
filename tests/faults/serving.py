"""Kinds R and S: schedulers, stopping."""

from __future__ import annotations

from tests.faults.fault import Patches, fault, full, recurrent, sliding, toy
from tests.verify.toy.generate import DRAFTS, Assisted, Lookup
from tests.verify.toy.scheduler import Running, Scheduler

SERVED = toy(full(), sliding(6), recurrent())


@fault("R", SERVED, ("steps", "requests"))
def stale_slot_of_a_preempted_row(patch: Patches) -> None:
    """A row that comes back takes a slot of the fixed buffer, in which the token of the one before still stands."""
    seat = Scheduler.seat

    def faulty(self: Scheduler, slot: int, request: Running) -> None:
        if request.steps or len(request.tokens) == 1:
            seat(self, slot, request)

    patch(Scheduler, "seat", faulty)


@fault("R", SERVED, ("steps", "requests"))
def preempted_row_loses_its_last_token(patch: Patches) -> None:
    """What is parked is the row as it was before the last step."""
    park = Scheduler.park

    def faulty(self: Scheduler, r: int) -> None:
        park(self, r)
        self.active[r].parked.rewind([1])

    patch(Scheduler, "park", faulty)


@fault("R", SERVED, ("steps", "requests"))
def slots_stay_when_rows_move_up(patch: Patches) -> None:
    """Rows move up when one has left; the buffer that the next step reads is not rewritten."""

    def faulty(self: Scheduler, rows: list[int]) -> None:
        if len(rows) < len(self.active):
            self.batch = self.batch.select(rows)
            self.active = [self.active[r] for r in rows]

    patch(Scheduler, "keep", faulty)


@fault("S", SERVED, ("steps", "stops"))
def tokens_after_a_stop_in_an_accepted_draft(patch: Patches) -> None:
    """An accepted draft is given out to its end, though a stop token stands within."""

    def faulty(self: Lookup, accepted):
        for token in accepted[: self.max_tokens - len(self.tokens)]:
            stopped = self.finish_reason
            self.emit(token)
            self.finish_reason = stopped or self.finish_reason
            yield token

    patch(Lookup, "emitted", faulty)


@fault("S", SERVED, ("steps", "caps"))
def cap_ignored_within_a_draft(patch: Patches) -> None:
    """The limit is looked at between drafts only."""
    drafts = Assisted.drafts

    def uncapped(self: Assisted) -> list[int]:
        limit, self.max_tokens = self.max_tokens, self.max_tokens + DRAFTS
        try:
            return drafts(self)
        finally:
            self.max_tokens = limit

    def faulty(self: Lookup, accepted):
        for token in accepted:
            self.emit(token)
            yield token

    patch(Assisted, "drafts", uncapped)
    patch(Lookup, "emitted", faulty)


@fault("S", SERVED, ("steps", "stops"))
def stop_tokens_of_one_row_end_another(patch: Patches) -> None:
    """The stop tokens of all rows of a batch are held in one set."""

    def faulty(self: Scheduler, request: Running) -> frozenset[int]:
        return frozenset().union(request.stop, *(r.stop for r in [*self.active, *self.waiting]))

    patch(Scheduler, "stops", faulty)


@fault("S", SERVED, ("steps", "stops", "caps"))
def stop_at_the_cap_reported_as_length(patch: Patches) -> None:
    """A stop token that is also the last one allowed is reported as cut off."""
    emit = Lookup.emit

    def faulty(self: Lookup, token: int) -> None:
        emit(self, token)
        if len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    patch(Lookup, "emit", faulty)
