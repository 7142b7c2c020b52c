"""Kinds J and K: padding, and rows that join and leave."""

from __future__ import annotations

import numpy as np

from tests.faults.fault import Patches, fault, full, recurrent, sliding, toy
from tests.verify.toy.cache import Cache
from tests.verify.toy.model import Model
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows, View


@fault("J", toy(sliding(6), full(), slack=0), ("steps", "ragged pieces", "empty rows"))
def padding_written_into_the_ring(patch: Patches) -> None:
    """Padded tokens are written like others: in a wrapped ring they take the slots of live rows."""
    write = Rows.write

    def faulty(self: Rows, lengths, counts, k, v) -> None:
        if self.limit is not None:
            starts = [max(s, n + c - self.capacity) for s, n, c in zip(self.starts, lengths, counts, strict=True)]
            write(self, lengths, [k.shape[1]] * len(counts), k, v)
            self.starts = starts
        write(self, lengths, counts, k, v)

    patch(Rows, "write", faulty)


@fault("J", toy(recurrent(), full()), ("steps", "ragged batch"))
def padding_runs_through_the_recurrence(patch: Patches) -> None:
    """The state of a shorter row goes on over its padding."""
    patch(Recurrent, "valid", lambda self, counts, t: np.ones(len(counts), dtype=bool))


@fault("J", toy(full(), full()), ("steps", "ragged batch"))
def padded_key_seen_by_the_last_token(patch: Patches) -> None:
    """The mask of a ragged batch lets each row's last token see the padding after it."""
    view = Rows.view

    def faulty(self: Rows, lengths, counts, k, v) -> View:
        seen = view(self, lengths, counts, k, v)
        new = seen.positions[:, -k.shape[1] :]
        last = np.array(lengths)[:, None] + np.array(counts)[:, None] - 1
        new[...] = np.where(new < 0, last, new)
        return seen

    patch(Rows, "view", faulty)


@fault("J", toy(full(), full()), ("steps", "one pass", "batch"))
def rows_scaled_by_the_largest_of_the_batch(patch: Patches) -> None:
    """What a layer adds is scaled by a maximum over the batch instead of the row's own."""
    run = Model.run

    def faulty(self: Model, ids, mix, noise=None, seen=None):
        def scaled(i: int, h: np.ndarray) -> np.ndarray:
            out = mix(i, h)
            size = np.abs(out).max((1, 2), keepdims=True)
            return out * (1 + 0.05 * (size.max() - size))

        return run(self, ids, scaled, noise, seen)

    patch(Model, "run", faulty)


@fault("K", toy(full(), full()), ("steps", "leaving rows"))
def append_place_of_the_row_that_left(patch: Patches) -> None:
    """The longest row has left; the place to append is moved by as much for all, onto live rows."""
    select, put = Cache.select, Rows.put

    def faulty(self: Cache, rows) -> Cache:
        made = select(self, rows)
        for memory in made.held:
            shift = max(self.lengths) - max(made.lengths, default=0) if len(rows) > 1 else 0
            memory.shift = min(shift, 1) + memory.__dict__.get("shift", 0)
        return made

    def shifted(self: Rows, target, source, r, slots, first, end) -> None:
        put(self, target, source, r, (slots - self.__dict__.get("shift", 0)) % self.capacity, first, end)

    patch(Cache, "select", faulty)
    patch(Rows, "put", shifted)


@fault("K", toy(recurrent(), full()), ("steps", "leaving rows"))
def convolution_tails_not_reordered(patch: Patches) -> None:
    """Rows change places; the tails of the convolution stay where they were."""
    take = Recurrent.take

    def faulty(self: Recurrent, rows) -> Recurrent:
        made = take(self, rows)
        if len(made.tail) <= len(self.tail):
            made.tail = self.tail[: len(made.tail)].copy()
        return made

    patch(Recurrent, "take", faulty)


@fault("K", toy(sliding(6), full()), ("steps", "joining rows"))
def starts_of_joined_rows_in_another_order(patch: Patches) -> None:
    """From which position on a row is held is listed guests first; the rows themselves are not."""
    joined = Rows.joined

    def faulty(parts, lengths) -> Rows:
        made = joined(parts, lengths)
        made.starts = [s for part in reversed(parts) for s in part.starts]
        return made

    patch(Rows, "joined", staticmethod(faulty))
