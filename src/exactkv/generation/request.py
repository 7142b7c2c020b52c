"""One request of an engine: its text, what it cost, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from exactkv.cache import Cache
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, DraftLength
from exactkv.generation.loop import Stats
from exactkv.generation.text import Piece, Text


class Update(NamedTuple):
    """What a step did for a request: the next piece of its text, or the error that ended it."""

    request: Request
    piece: Piece | None
    error: InputError | None = None


@dataclass(eq=False)
class Request:
    """One text under way. ``number``: in the order in which they came. ``error``: what ended it, None if nothing has.

    ``cached_tokens``, ``fed_tokens``: of the prompt; what was fed again after it had given its memory back counts once
    more. ``kept``: whether a store gets what was computed when it ends. Times are in seconds of ``time.perf_counter``.
    """

    number: int
    text: Text
    draft: Draft | None = None
    salt: str = ""
    error: InputError | None = None
    cached_tokens: int = 0
    fed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    kept: bool = True
    added: float = field(default_factory=time.perf_counter)
    began: float | None = None
    first_token: float | None = None
    ended: float | None = None
    length: DraftLength = field(default_factory=DraftLength)
    cache: Cache | None = field(default=None, repr=False)
    """Its own while its prompt is fed; None while it waits or runs among others."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.ended is not None

    @property
    def stats(self) -> Stats:
        """As of a `Generation`; seconds are those in which it was under way, among others."""
        began, now = self.began or self.added, self.ended or time.perf_counter()
        first = self.first_token
        return Stats(
            prompt_tokens=len(self.text.prompt),
            cached_tokens=self.cached_tokens,
            fed_tokens=self.fed_tokens,
            generated_tokens=len(self.text.generated),
            prefill_seconds=(first or now) - began,
            decode_seconds=now - first if first is not None else 0.0,
            first_token_seconds=first - self.added if first is not None else None,
            cache_bytes=self.cache.nbytes if self.cache is not None else 0,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def begin(self, cached: int) -> None:
        """It has a row from now on, in which so many tokens of its prompt are already."""
        self.began, self.cached_tokens = time.perf_counter(), cached

    def note_first_token(self) -> None:
        """Its prompt's last token was fed, and the first of its own was chosen."""
        self.first_token = time.perf_counter()
        self.fed_tokens += 1

    def end(self, error: InputError | None = None) -> None:
        """Nothing more will come."""
        self.ended, self.error = time.perf_counter(), error
