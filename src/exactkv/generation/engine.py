"""Many texts at once: rows join as others leave, prompts are fed in pieces between the steps of those that generate.

One forward pass serves all rows that generate, each with its own length, sampling, stops and draft; what a row says is
what it says alone. Two budgets hold at every moment: tokens a forward pass, and bytes of caches. Where rows grow past
the bytes, the newest gives its own back, waits, and goes on later where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from exactkv.cache import Cache
from exactkv.cache.checks import is_int, require
from exactkv.cache.row import most_nbytes
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, DraftLength
from exactkv.generation.text import Piece, Text
from exactkv.models.model import Model

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore

PREFILL_WIDTH = 512
"""Prompt tokens a forward pass by default: enough to use the machine, few enough to keep others waiting shortly."""


class Update(NamedTuple):
    """What a step did for one request: a piece of its text, or the error that ended it."""

    request: int
    piece: Piece | None
    error: InputError | None = None


@dataclass(eq=False)
class Row:
    """One request under way. ``cache``: its own while its prompt is fed, None while it waits or runs among others.
    ``guess``: the draft that is being checked."""

    number: int
    text: Text
    draft: Draft | None = None
    length: DraftLength = field(default_factory=DraftLength)
    salt: str = ""
    cache: Cache | None = None
    guess: list[int] = field(default_factory=list)


class Engine:
    """Runs requests on one model. Not for several threads at once.

    ``max_rows``: requests under way at once; others wait in order. ``step_tokens``: the most tokens that one forward
    pass is given. ``max_bytes``: the most bytes that the caches of requests may hold; None for no limit. ``store``: a
    prompt store, where prompts are looked up and what was computed is kept.
    """

    def __init__(
        self,
        model: Model,
        max_rows: int = 32,
        step_tokens: int = PREFILL_WIDTH,
        max_bytes: int | None = None,
        store: PromptStore | None = None,
        draft_tokens: int = 12,
    ):
        require(isinstance(model, Model), "model", model, "one made by exactkv.load")
        require(is_int(max_rows) and max_rows >= 1, "max_rows", max_rows, "an integer >= 1")
        require(is_int(step_tokens) and step_tokens >= max_rows, "step_tokens", step_tokens,
                f"an integer >= max_rows, which is {max_rows}")  # fmt: skip
        require(max_bytes is None or (is_int(max_bytes) and max_bytes > 0), "max_bytes", max_bytes, "a number of bytes")
        require(is_int(draft_tokens) and draft_tokens >= 0, "draft_tokens", draft_tokens, "an integer >= 0")
        self.model, self.max_rows, self.step_tokens, self.max_bytes = model, max_rows, step_tokens, max_bytes
        self.store, self.draft_tokens = store, draft_tokens
        self.preemptions = 0
        self._number = 0
        self._waiting: deque[Row] = deque()
        self._prefilling: list[Row] = []
        self._running: list[Row] = []
        self._cache = self._new_cache(0)

    # Requests.

    def add(self, text: Text, draft: Draft | None = None, salt: str = "") -> int:
        """Take on a request; returns its number. Raises InputError where it can never fit."""
        self._check_fits(text)
        row = Row(self._number, text, draft, DraftLength(self.draft_tokens), salt)
        self._number += 1
        self._waiting.append(row)
        return row.number

    def cancel(self, request: int) -> bool:
        """End a request and free its row at once; False where there is none of that number under way."""
        for rows in (self._waiting, self._prefilling):
            for row in rows:
                if row.number == request:
                    rows.remove(row)
                    return True
        for row in self._running:
            if row.number == request:
                self._leave([row])
                return True
        return False

    @property
    def busy(self) -> bool:
        """Whether any request is under way or waits."""
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches of requests under way."""
        return self._cache.nbytes + sum(row.cache.nbytes for row in self._prefilling if row.cache is not None)

    def run(self) -> Iterator[Update]:
        """Step until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Update]:
        """Admit what fits, feed a piece of prompts, and give every row that generates its next tokens."""
        updates = self._ended_by_time()
        self._make_room()
        self._admit()
        updates += self._prefill()
        self._make_room()
        return updates + self._decode()

    # Bytes.

    def _check_fits(self, text: Text) -> None:
        longest = len(text.prompt) + text.max_tokens
        if self._cache.max_length is not None:
            longest = min(longest, self._cache.max_length)
        needed = self._most(longest)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise InputError(
                f"a prompt of {len(text.prompt)} tokens with max_tokens {text.max_tokens} may take {needed:,} bytes of "
                f"cache; max_bytes is {self.max_bytes:,}. Shorten it, or allow more."
            )

    def _most(self, length: int) -> int:
        return most_nbytes(self._cache.spec, self._cache._policy, length)

    def _growth(self, row: Row) -> int:
        """The most that a row holds after the next step."""
        return self._most(len(row.text.tokens) + self.draft_tokens)

    def _make_room(self) -> None:
        """Preempt the newest rows until the rest may take a step."""
        if self.max_bytes is None:
            return
        while sum(map(self._growth, [*self._prefilling, *self._running])) > self.max_bytes:
            newest = max([*self._prefilling, *self._running], key=lambda row: row.number)
            self._preempt(newest)

    def _preempt(self, row: Row) -> None:
        self.preemptions += 1
        if row in self._running:
            self._keep(row)
            self._leave([row])
        else:
            self._prefilling.remove(row)
            row.cache = None
        self._waiting.appendleft(row)

    def _admit(self) -> None:
        under_way = [*self._prefilling, *self._running]
        held = sum(map(self._growth, under_way))
        while self._waiting and len(under_way) < self.max_rows:
            row = self._waiting[0]
            held += self._growth(row)
            if self.max_bytes is not None and held > self.max_bytes:
                return
            self._waiting.popleft()
            row.cache = self._found(row)
            self._prefilling.append(row)
            under_way.append(row)
