"""Kinds F, G, H and T: prefix stores."""

from __future__ import annotations

import numpy as np

from tests.faults.fault import Patches, fault, full, recurrent, sliding, toy
from tests.verify.toy import files
from tests.verify.toy.cache import Cache, feed
from tests.verify.toy.generate import Plain
from tests.verify.toy.model import CONV
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows
from tests.verify.toy.scheduler import Running, Scheduler
from tests.verify.toy.store import Entry, Found, Store


@fault("F", toy(full(), full()), ("steps", "prefix store", "random prefixes"))
def rest_of_a_block_not_compared(patch: Patches) -> None:
    """Prefixes are looked up and confirmed by whole blocks of four tokens; what is beyond is taken on trust."""
    keys = Store.keys

    def by_blocks(self: Store, tokens, salt):
        found = list(keys(self, tokens, salt))
        return iter([found[n // 4 * 4] + n % 4 for n in range(len(found))])

    def confirmed(self: Store, entry: Entry, label: int, tokens, salt: str) -> bool:
        whole = label // 4 * 4
        return entry.salt == salt and label == len(tokens) and entry.tokens[:whole] == tokens[:whole]

    patch(Store, "keys", by_blocks)
    patch(Store, "confirmed", confirmed)


@fault("F", toy(full(), sliding(6)), ("steps", "prefix store"))
def last_token_of_an_exact_hit_fed_twice(patch: Patches) -> None:
    """An exact hit leaves nothing to compute, so its last token is fed again, onto a cache that has it."""
    get = Store.get

    def faulty(self: Store, tokens, salt="") -> Found:
        found = get(self, tokens, salt)
        if found.length == len(tokens) > 0:
            return Found(found.cache, found.length - 1, found.length - 1)
        return found

    patch(Store, "get", faulty)


@fault("F", toy(full(), full()), ("steps", "prefix store", "random prefixes"))
def shorter_prompt_gets_the_longer_cache(patch: Patches) -> None:
    """The cache found is handed out as it is, with the counter lowered and the rows beyond still read."""
    held = Rows.held

    def copied(self: Store, entry: Entry, length: int) -> Cache:
        cache = entry.cache.fork()
        cache.lengths = [length]
        for memory in cache.held:
            memory.surplus = (length, len(entry.tokens))
        return cache

    def with_surplus(self: Rows, lengths):
        positions = held(self, lengths)
        low, high = self.__dict__.get("surplus", (0, 0))
        if lengths[0] == low < high:
            positions[:, low:high] = low - 1
        return positions

    patch(Store, "copied", copied)
    patch(Rows, "held", with_surplus)


@fault("G", toy(full(), full()), ("steps", "owners"))
def owners_not_told_apart(patch: Patches) -> None:
    """What was stored for one tenant or adapter is given to another."""
    patch(Store, "seed", lambda self, salt: 0)
    patch(
        Store, "confirmed", lambda self, entry, label, tokens, salt: entry.tokens[:label] == tokens
    )  # the salt is not looked at


@fault("G", toy(full(), sliding(6)), ("steps", "damaged files"))
def file_known_by_its_config_only(patch: Patches) -> None:
    """A saved cache names the shape of its model, not its weights."""
    patch(files, "identity", lambda model: repr(model.config))


@fault("G", toy(full(), full()), ("steps", "random prefixes"))
def weak_hash_not_confirmed(patch: Patches) -> None:
    """Prefixes are known by a hash of which collisions occur, and the tokens are not compared."""
    patch(Store, "extended", lambda self, key, token: (31 * key + token + 1) % 251)
    patch(Store, "confirmed", lambda self, entry, label, tokens, salt: label == len(tokens))


@fault("H", toy(full(), recurrent()), ("steps", "prefix store"))
def state_of_the_whole_entry_under_a_shorter_label(patch: Patches) -> None:
    """An entry is found by any prefix of its tokens; rows are cut to it, the recurrent state is that of all."""

    def copied(self: Store, entry: Entry, length: int) -> Cache:
        cache = entry.cache.fork()
        for memory in cache.held:
            if isinstance(memory, Rows):
                memory.rewind(0, length)
        cache.lengths = [length]
        return cache

    patch(Store, "standing", lambda self, entry: list(range(1, len(entry.tokens) + 1)))
    patch(Store, "copied", copied)


@fault("H", toy(full(), recurrent()), ("steps", "prefix store", "prefix reuse"))
def short_pieces_written_into_the_shared_prefix(patch: Patches) -> None:
    """A piece shorter than the convolution is wide updates the tail in place, which the stored prefix shares."""
    feed_memory, copied = Recurrent.feed, Store.copied

    def shared(self: Store, entry: Entry, length: int) -> Cache:
        cache = copied(self, entry, length)
        if length == len(entry.tokens):
            for memory, stored in zip(cache.held, entry.cache.held, strict=True):
                if isinstance(memory, Recurrent):
                    memory.tail = stored.tail
        return cache

    def in_place(self: Recurrent, model, i, u, lengths, counts):
        tail = self.tail
        out = feed_memory(self, model, i, u, lengths, counts)
        if u.shape[1] < CONV:
            tail[...] = self.tail
            self.tail = tail
        return out

    patch(Store, "copied", shared)
    patch(Recurrent, "feed", in_place)


@fault("H", toy(full(), recurrent()), ("steps", "prefix store", "random prefixes"))
def stored_state_is_a_token_behind(patch: Patches) -> None:
    """A state is stored before the last token's update and filed under the length after it."""
    put = Store.put

    def faulty(self: Store, tokens, cache: Cache, salt: str = "") -> None:
        for memory in cache.held:
            if isinstance(memory, Recurrent) and len(tokens) - 1 in memory.moments[0]:
                memory.state = memory.moments[0][len(tokens) - 1].state[None].copy()
        put(self, tokens, cache, salt)

    patch(Store, "put", faulty)


@fault("T", toy(full(), full()), ("steps", "prefix store", "random prefixes"))
def reuse_reported_as_the_whole_prompt(patch: Patches) -> None:
    """The number of reused tokens that is reported is the prompt's."""
    patch(Store, "reported", lambda self, tokens, length: len(tokens))


@fault("T", toy(full(), sliding(6)), ("steps", "prefix reuse"))
def only_whole_blocks_are_found(patch: Patches) -> None:
    """Prefixes are filed under multiples of sixteen tokens only: most turns of a chat reuse nothing."""
    standing = Store.standing
    patch(Store, "standing", lambda self, entry: [n for n in standing(self, entry) if n % 16 == 0])


@fault("T", toy(full(), sliding(6)), ("steps", "generate"))
def hit_reported_but_computed_again(patch: Patches) -> None:
    """The scheduler finds a prefix, reports it as reused, and computes the whole prompt."""

    def faulty(self: Scheduler, request: Running) -> Cache:
        request.cached = self.store.get(request.prompt[:-1]).reported
        cache = Cache(self.model, slack=Plain.SLACK)
        (logits,) = feed(cache, [request.prompt])
        request.forwarded += len(request.prompt)
        self.store.put(request.prompt, cache.fork())
        self.emit(request, int(np.argmax(logits[-1])))
        return cache

    patch(Scheduler, "prefilled", faulty)
