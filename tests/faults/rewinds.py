"""Kinds E and I, and H by a rewind: rewinds that claim more than they do, speculation that leaves a trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exactkv.cache import row as records
from exactkv.cache.row import CacheSpec, Row
from tests.faults.fault import Patches, fault, full, recurrent, sliding, tiny, toy
from tests.tiny import FULL, chunk, window
from tests.verify.toy.cache import Cache
from tests.verify.toy.generate import DRAFTS, Lookup
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows, View


@fault("E", tiny(FULL, window(6), chunk(5)), ("steps", "rewind"))
def only_the_first_layer_is_asked(patch: Patches) -> None:
    """How far a rewind reaches is what layer 0 can do; windowed and chunked layers have lost their front."""

    def standing(spec: CacheSpec, row: Row, position: int) -> int:
        return spec.zones[0].standing(row.runs[0], position)

    def rewound(spec: CacheSpec, policy: object, row: Row, position: int) -> Row:
        runs = tuple(zone.rewound(run, position) for zone, run in zip(spec.zones, row.runs, strict=True))
        return replace(row, length=position, runs=runs)

    patch(records, "standing", standing)
    patch(records, "rewound", rewound)


@fault("E", toy(full(), sliding(6)), ("steps", "rewind"))
def ring_claims_any_rewind(patch: Patches) -> None:
    """A ring lowers its counter however far it is taken back, with rows that it no longer holds."""
    patch(Rows, "can_stand", lambda self, r, position: True)


@fault("H", toy(full(), recurrent()), ("steps", "rewind"))
def recurrent_layer_stays_where_it_was(patch: Patches) -> None:
    """Attention layers are taken back, the recurrent ones are not: the layers are out of step."""
    patch(Recurrent, "can_stand", lambda self, r, position: True)
    patch(Recurrent, "rewind", lambda self, r, position: None)


@fault("E", toy(full(), sliding(6)), ("steps", "rewind"))
def reports_what_was_asked_for(patch: Patches) -> None:
    """More than the slack is silently cut to the slack, and reported as done in full."""
    rewind = Cache.rewind

    def faulty(self: Cache, counts):
        rewind(self, [min(c, 4) for c in counts])
        return list(counts)

    patch(Cache, "rewind", faulty)


@fault("I", toy(full(), full()), ("steps", "generate", "caps"))
def rejected_drafts_zeroed(patch: Patches) -> None:
    """Rejected rows stay as zeros: each weighs exp(0) in every later attention."""
    roll_back, view = Lookup.roll_back, Rows.view

    def faulty(self: Lookup, rejected: int) -> None:
        roll_back(self, rejected)
        for memory in self.cache.held:
            memory.ghosts = getattr(memory, "ghosts", 0) + rejected

    def with_ghosts(self: Rows, lengths, counts, k, v) -> View:
        seen, ghosts = view(self, lengths, counts, k, v), getattr(self, "ghosts", 0)
        zeros = np.zeros((len(lengths), ghosts, *k.shape[2:]))
        positions = np.zeros((len(lengths), ghosts), dtype=np.int64)
        return View(
            *(
                np.concatenate(pair, 1)
                for pair in zip((zeros, zeros, positions), (seen.k, seen.v, seen.positions), strict=True)
            )
        )

    patch(Lookup, "roll_back", faulty)
    patch(Rows, "view", with_ghosts)


@fault("I", toy(full(), sliding(6)), ("steps", "generate", "caps"))
def first_rejected_draft_kept(patch: Patches) -> None:
    """When all drafts are rejected, one of them stays in the cache."""
    roll_back = Lookup.roll_back
    patch(Lookup, "roll_back", lambda self, rejected: roll_back(self, rejected - (rejected == DRAFTS)))


@fault("I", toy(full(), recurrent()), ("steps", "generate", "caps"))
def recurrent_state_not_rolled_back(patch: Patches) -> None:
    """Rows of rejected drafts are removed; the recurrent state has seen them for good."""

    def faulty(self: Lookup, rejected: int) -> None:
        for memory in self.cache.held:
            if isinstance(memory, Rows):
                memory.rewind(0, self.cache.lengths[0] - rejected)
        self.cache.lengths[0] -= rejected

    patch(Lookup, "roll_back", faulty)
    patch(Lookup, "settle", lambda self: None)


@fault("I", toy(full(), sliding(6)), ("steps", "closed streams"))
def closed_stream_keeps_accepted_drafts(patch: Patches) -> None:
    """A stream closed within an accepted draft leaves a cache with tokens that were never given out."""
    patch(Lookup, "settle", lambda self: None)


@fault("I", toy(full(), recurrent()), ("steps", "rewound rows"))
def all_rows_taken_back_by_the_first_rows_count(patch: Patches) -> None:
    """Rows accept different numbers of drafts; the recurrent states all go back by the first row's number."""
    rewind, one = Cache.rewind, Recurrent.rewind

    def faulty(self: Cache, counts):
        before = self.fork()
        done = rewind(self, counts)
        for memory, old in zip(self.held, before.held, strict=True):
            if isinstance(memory, Recurrent):
                for r, length in enumerate(before.lengths):
                    one(old, r, max(0, length - counts[0]))
                memory.state, memory.tail = old.state, old.tail
        return done

    patch(Cache, "rewind", faulty)
