"""The text of a row as penalties see it, kept up to date token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LONGEST = 50
"""Tokens that DRY compares at most."""


class History:
    """Prompt and reply of one row. It is fed what the row is fed, also where that came from a cache.

    What penalties need of it is made when they first ask, and from then on costs a constant amount a token.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self._tokens = list(tokens)
        self._counts: Counts | None = None
        self._repeats: Repeats | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The ids so far."""
        return tuple(self._tokens)

    @property
    def greatest(self) -> int:
        """The greatest id that was counted, -1 where there is none."""
        return self._counts.greatest if self._counts is not None else -1

    def append(self, token: int) -> None:
        """Add a token at the end."""
        self._tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        self._tokens.extend(tokens)

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self._counts is not None and self._counts.end > length:
            self._counts.move(self._tokens, length)
        if self._repeats is not None:
            self._repeats.rewind(self._tokens, length)
        del self._tokens[length:]

    def counts(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Token ids, int64 [N], and how often each is among the last ``window`` tokens, int64 [N], which may be 0. Both
        are views for the moment: they change with the text."""
        if self._counts is None or self._counts.window != window:
            self._counts = Counts(window, self._tokens)
        self._counts.move(self._tokens, len(self._tokens))
        return self._counts.ids, self._counts.counts

    def repeats(self, window: int | None, breakers: frozenset[int]) -> dict[int, int]:
        """For each token that followed an earlier occurrence of the text's end: the greatest number of tokens, at most
        LONGEST, that this occurrence and the end have in common. Breakers end what is compared and never follow.
        ``window``: look at the last so many tokens."""
        if self._repeats is None or self._repeats.breakers != breakers:
            self._repeats = Repeats(breakers)
        tokens, lengths = self._tokens, self._repeats.lengths(self._tokens)
        start = 0 if window is None else max(0, len(tokens) - window)
        found: dict[int, int] = {}
        for place, length in lengths.items():
            if place >= start and (follower := tokens[place + 1]) not in breakers:
                found[follower] = max(found.get(follower, 0), min(length, place - start + 1))
        return found


class Counts:
    """How often each token is in the last ``window`` tokens up to ``end``."""

    def __init__(self, window: int | None, tokens: Sequence[int]):
        self.window = window
        self.start = self.end = self._first(len(tokens))
        self.greatest = -1
        self._slots: dict[int, int] = {}
        self._ids = torch.zeros(64, dtype=torch.int64)
        self._counts = torch.zeros(64, dtype=torch.int64)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        return self._counts[: len(self._slots)]

    def move(self, tokens: Sequence[int], end: int) -> None:
        """Count the window that ends at ``end``; ``tokens`` reach at least as far as this and ``self.end``."""
        self._add(tokens[self.end : end], 1)
        self._add(tokens[end : self.end], -1)
        start = self._first(end)
        self._add(tokens[self.start : start], -1)
        self._add(tokens[start : self.start], 1)
        self.start, self.end = start, end

    def _first(self, end: int) -> int:
        return 0 if self.window is None else max(0, end - self.window)

    def _add(self, tokens: Sequence[int], sign: int) -> None:
        if not tokens:
            return
        changes = Counter(tokens)
        fresh = [token for token in changes if token not in self._slots]
        if fresh:
            first = len(self._slots)
            self.greatest = max(self.greatest, *fresh)
            self._slots.update((token, first + i) for i, token in enumerate(fresh))
            if len(self._slots) > len(self._ids):
                self._ids, self._counts = (
                    torch.cat([held, held.new_zeros(2 * len(self._slots) - len(held))])
                    for held in (self._ids, self._counts)
                )
            self._ids[first : len(self._slots)] = torch.tensor(fresh)
        slots = torch.tensor([self._slots[token] for token in changes])
        self._counts.index_add_(0, slots, torch.tensor([sign * n for n in changes.values()]))


class Repeats:
    """Where the end of a text has come before, and with how many tokens in common."""

    def __init__(self, breakers: frozenset[int]):
        self.breakers = breakers
        self._places: dict[int, list[int]] = {}
        self._indexed = 0
        self._lengths: dict[int, int] = {}
        self._length = 0  # of the text that _lengths is of

    def lengths(self, tokens: Sequence[int]) -> dict[int, int]:
        """Place -> how many tokens up to it, at most LONGEST, equal those up to the end; only where there are any."""
        for place in range(self._indexed, len(tokens)):
            self._places.setdefault(tokens[place], []).append(place)
        self._indexed = len(tokens)
        if self._length == len(tokens):
            return self._lengths
        if not tokens or tokens[-1] in self.breakers:
            self._lengths = {}
        else:
            places = self._places[tokens[-1]][:-1]
            if self._length == len(tokens) - 1:
                before = self._lengths
                self._lengths = {p: min(LONGEST, before.get(p - 1, 0) + 1) for p in places}
            else:
                self._lengths = {p: self._compared(tokens, p) for p in places}
        self._length = len(tokens)
        return self._lengths

    def rewind(self, tokens: Sequence[int], length: int) -> None:
        """Forget ``tokens`` from ``length`` on."""
        for token in reversed(tokens[length : self._indexed]):
            self._places[token].pop()
        self._indexed = min(self._indexed, length)
        if self._length > length:
            self._length, self._lengths = -1, {}

    def _compared(self, tokens: Sequence[int], place: int) -> int:
        end, length = len(tokens) - 1, 1
        while length < LONGEST and length <= place:
            token = tokens[end - length]
            if tokens[place - length] != token or token in self.breakers:
                break
            length += 1
        return length
