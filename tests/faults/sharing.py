"""Kinds P and Q: state that crosses from one text to another, and bounds."""

from __future__ import annotations

from exactkv.cache import Cache as ExactCache
from tests.faults.fault import Patches, fault, full, recurrent, sliding, tiny, toy
from tests.tiny import FULL, window
from tests.verify.toy import cache
from tests.verify.toy.cache import Cache, CacheError, Call
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows, View
from tests.verify.toy.store import Store


@fault("P", toy(full(), sliding(6)), ("steps", "fork"))
def fork_shares_its_arrays(patch: Patches) -> None:
    """A copy has counters of its own, and writes into the same rows."""

    def faulty(self: Cache) -> Cache:
        made = self.select(range(len(self.lengths)))
        for memory, mine in zip(made.held, self.held, strict=True):
            if isinstance(memory, Rows):
                memory.k, memory.v = mine.k, mine.v
        return made

    patch(Cache, "fork", faulty)


@fault("P", tiny(FULL, window(6)), ("steps", "fork"))
def forked_rows_written_in_place(patch: Patches) -> None:
    """Whoever writes to rows that others refer to does not take memory of its own."""
    patch(ExactCache, "_take_ownership", lambda self: None)


@fault("P", toy(full(), recurrent()), ("steps", "reset"))
def reset_keeps_the_recurrent_state(patch: Patches) -> None:
    """A cache emptied for another text still has the recurrent state of the one before."""
    patch(Recurrent, "clear", lambda self: None)


@fault("P", toy(full(), recurrent()), ("steps", "two caches"))
def convolution_tail_kept_in_the_model(patch: Patches) -> None:
    """The tail is the layer's, not the cache's: two texts in turn read each other's last inputs."""
    feed = Recurrent.feed

    def faulty(self: Recurrent, model, i, u, lengths, counts):
        tails = model.__dict__.setdefault("tails", {})
        if any(lengths) and i in tails and tails[i].shape == self.tail.shape:
            self.tail = tails[i]
        out = feed(self, model, i, u, lengths, counts)
        tails[i] = self.tail
        return out

    patch(Recurrent, "feed", faulty)


@fault("Q", toy(full(), full()), ("steps", "capacity"))
def one_token_too_many_is_taken(patch: Patches) -> None:
    """A cache made for L tokens takes L + 1, and the last one overwrites the first before it is read."""
    extend = Call.extend

    def faulty(self: Call, memory: Rows, k, v) -> View:
        if self.end <= self.cache.max_length:
            return extend(self, memory, k, v)
        memory.write(self.lengths, self.counts, k, v)
        held = memory.held([n + c for n, c in zip(self.lengths, self.counts, strict=True)])
        return View(memory.k["x"], memory.v["x"], held)

    def check(cache: Cache, counts) -> None:
        if any(n + c > cache.max_length + 1 for n, c in zip(cache.lengths, counts, strict=True)):
            raise CacheError("full")

    patch(Call, "extend", faulty)
    patch(cache, "check_room", check)


@fault("Q", toy(full(), sliding(6)), ("steps", "capacity"))
def last_token_that_fits_is_refused(patch: Patches) -> None:
    """A cache made for L tokens fails at the Lth."""

    def check(cache: Cache, counts) -> None:
        for length, count in zip(cache.lengths, counts, strict=True):
            if length + count >= cache.max_length:
                raise CacheError(f"{length} + {count} tokens do not fit into {cache.max_length}")

    patch(cache, "check_room", check)


@fault("Q", toy(sliding(6), sliding(4)), ("steps", "long"))
def ring_that_grows(patch: Patches) -> None:
    """A windowed layer never drops a row: right, but its memory has no bound."""
    patch(Rows, "limit", None)


@fault("Q", toy(recurrent(), sliding(6)), ("steps", "long"))
def states_kept_for_ever(patch: Patches) -> None:
    """The states by which a rewind goes back are never given up."""
    patch(Recurrent, "forget", lambda self, r, length: None)


@fault("Q", toy(full(), full()), ("steps", "random prefixes"))
def bytes_of_evicted_entries_still_counted(patch: Patches) -> None:
    """A store's total only grows, until nothing more is let in."""
    patch(Store, "account", lambda self, change: None)
