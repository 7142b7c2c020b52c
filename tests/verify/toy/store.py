"""A store of prefixes: caches found again by a rolling hash of their tokens, confirmed by the tokens themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.verify.toy.cache import Cache, CacheError

Tokens = tuple[int, ...]
Key = int


@dataclass(eq=False)
class Entry:
    """A cache and what it holds. ``labels``: the lengths at which all its layers can stand, with their keys."""

    tokens: Tokens
    cache: Cache
    salt: str
    labels: dict[int, Key] = field(default_factory=dict)


@dataclass
class Found:
    """``cache``: a copy at ``length`` tokens; ``reported``: what a user is told of it."""

    cache: Cache | None
    length: int
    reported: int


class Store:
    """``entries``: the most of them, the least recently used goes first; None for no limit."""

    def __init__(self, entries: int | None = None):
        self.limit = entries
        self.entries: list[Entry] = []
        """The most recently used last."""
        self.index: dict[Key, list[tuple[Entry, int]]] = {}
        self.nbytes = 0

    def put(self, tokens: Sequence[int], cache: Cache, salt: str = "") -> None:
        """File a cache, which becomes the store's, under the tokens it holds."""
        if [len(tokens)] != cache.lengths:
            raise CacheError(f"a cache of {cache.lengths} tokens was filed under {len(tokens)}")
        entry = Entry(tuple(tokens), cache, salt)
        for same in [e for e in self.entries if (e.tokens, e.salt) == (entry.tokens, salt)]:
            self.drop(same)
        keys = list(self.keys(entry.tokens, salt))
        for length in self.standing(entry):
            entry.labels[length] = keys[length]
            self.index.setdefault(keys[length], []).append((entry, length))
        self.entries.append(entry)
        self.nbytes += cache.nbytes
        while self.limit is not None and len(self.entries) > self.limit:
            self.drop(self.entries[0])

    def standing(self, entry: Entry) -> list[int]:
        """The lengths under which an entry may be found."""
        length = len(entry.tokens)
        return [n for n in range(1, length + 1) if n == length or entry.cache.can_stand(0, n)]

    def drop(self, entry: Entry) -> None:
        self.entries.remove(entry)
        for length, key in entry.labels.items():
            self.index[key].remove((entry, length))
            if not self.index[key]:
                del self.index[key]
        self.account(-entry.cache.nbytes)

    def account(self, change: int) -> None:
        self.nbytes += change

    def get(self, tokens: Sequence[int], salt: str = "") -> Found:
        """The longest prefix of ``tokens`` that is held."""
        keys = list(self.keys(tokens, salt))
        for length in range(len(tokens), 0, -1):
            for entry, label in reversed(self.index.get(keys[length], [])):
                if self.confirmed(entry, label, tuple(tokens[:length]), salt):
                    self.entries.remove(entry)
                    self.entries.append(entry)
                    return Found(self.copied(entry, length), length, self.reported(tokens, length))
        return Found(None, 0, 0)

    def confirmed(self, entry: Entry, label: int, tokens: Tokens, salt: str) -> bool:
        """Whether an entry that a key led to is really of these tokens and this owner."""
        return entry.salt == salt and entry.tokens[:label] == tokens

    def copied(self, entry: Entry, length: int) -> Cache:
        """A copy of an entry's cache, taken back to ``length``."""
        cache = entry.cache.fork()
        cache.rewind([len(entry.tokens) - length])
        return cache

    def reported(self, tokens: Sequence[int], length: int) -> int:
        return length

    def keys(self, tokens: Sequence[int], salt: str) -> Iterator[Key]:
        """The key of each prefix, the empty one first."""
        key = self.seed(salt)
        yield key
        for token in tokens:
            key = self.extended(key, token)
            yield key

    def seed(self, salt: str) -> Key:
        return int.from_bytes(salt.encode()[:7], "big")

    def extended(self, key: Key, token: int) -> Key:
        return (key * 1_000_003 + token + 1) % (2**61 - 1)

    def true_nbytes(self) -> int:
        return sum(e.cache.nbytes for e in self.entries)
