"""When a text ends, and what of it may be shown: end tokens, stop strings, a number of tokens, a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exactkv.cache.checks import is_int, is_number, listed
from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stopping:
    """What ends a text.

    ``max_tokens``: so many tokens. ``token_ids``: any of these. ``strings``: any of these in the reply, wherever its
    tokens are cut; the one that is complete first, of several the longest. ``include_stop``: the text shows the string
    or token that ended it; else it ends before. ``deadline``: so many seconds after work on it began.
    Raises InputError where a value does not fit.
    """

    max_tokens: int
    token_ids: Iterable[int] = frozenset()
    strings: str | Iterable[str] = ()
    include_stop: bool = False
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r}; expected an integer >= 1")
        ids = listed("stop_token_ids", self.token_ids)
        if not all(is_int(i) for i in ids):
            raise InputError(f"stop_token_ids are {ids!r}; expected token ids, which are integers")
        strings = [self.strings] if isinstance(self.strings, str) else listed("stop", self.strings)
        if not all(isinstance(s, str) and s for s in strings):
            raise InputError(f"stop is {strings!r}; expected texts that are not empty")
        if not isinstance(self.include_stop, bool):
            raise InputError(f"include_stop is {self.include_stop!r}; expected True or False")
        given = self.deadline
        if given is not None and not (is_number(given) and 0 < given < math.inf):
            raise InputError(f"deadline is {given!r}; expected seconds, a number above 0, or None")
        object.__setattr__(self, "token_ids", frozenset(ids))
        object.__setattr__(self, "strings", tuple(strings))


class Ending:
    """The end of one text, as its tokens come.

    ``reason``: None while it goes on, then "stop" (a token or string, which is ``matched``, or None where the text's
    structure is complete), "length" or "deadline". ``ends``: the end tokens.
    """

    def __init__(self, stopping: Stopping, tokenizer: Tokenizer | None, show_special_tokens: bool = False):
        if stopping.strings and tokenizer is None:
            raise InputError("stop strings need a text, and this model has no tokenizer; give stop_token_ids instead")
        self.stopping = stopping
        self._made_of = (stopping, tokenizer, show_special_tokens)
        self.given_up = False
        self.reason: str | None = None
        self.matched: str | int | None = None
        self.ends = frozenset(stopping.token_ids)
        self._stream = tokenizer.stream(not show_special_tokens) if tokenizer is not None else None
        self._held = HeldText(tuple(stopping.strings), stopping.include_stop)
        self._count = 0
        self._until = math.inf

    def anew(self) -> Ending:
        """One for the same text from its beginning on, with the same deadline."""
        made = Ending(*self._made_of)
        made._until = self._until
        return made

    def start(self) -> None:
        """Work begins: the deadline runs."""
        if self.stopping.deadline is not None:
            self._until = time.monotonic() + self.stopping.deadline

    @property
    def late(self) -> bool:
        """Whether the deadline is over."""
        return time.monotonic() >= self._until

    def feed(self, token: int, full: bool = False, complete: bool = False, more: bool = False) -> str:
        """Take the next token; returns the text that can be shown now. ``full``: there is no room for one after it;
        ``complete``: nothing may follow it; ``more``: there is one after it already, so it was not the last. No token
        may be fed once there is a ``reason``."""
        assert self.reason is None, "the text has ended"
        self._count += 1
        ends = token in self.ends
        text = ""
        if self._stream is not None and (not ends or self.stopping.include_stop):
            text = self._stream.step(token)
        shown = self._held.add(text)
        if self._held.matched is None and not more:
            if ends:
                self.reason, self.matched = "stop", token
            elif complete:
                self.reason = "stop"
            elif full or self._count >= self.stopping.max_tokens:
                self.reason = "length"
            elif self.late:
                self.reason = "deadline"
            if self.reason is not None:
                shown += self._finish()
        if self._held.matched is not None:
            self.reason, self.matched = "stop", self._held.matched
        return shown

    def give_up(self) -> str:
        """The deadline is over before there is another token; returns what was held back."""
        self.reason, self.given_up = "deadline", True
        shown = self._finish()
        if self._held.matched is not None:
            self.reason, self.matched = "stop", self._held.matched
        return shown

    def _finish(self) -> str:
        rest = self._stream.flush() if self._stream is not None else ""
        return self._held.add(rest) + self._held.release()


class HeldText:
    """Text of which nothing is shown that may turn out to belong to a stop string."""

    def __init__(self, strings: Sequence[str], include_stop: bool = False):
        self.matched: str | None = None
        self._strings = tuple(sorted(strings, key=len, reverse=True))
        self._include_stop = include_stop
        self._held = ""

    def add(self, text: str) -> str:
        """Take more text; returns what can be shown. After a match there is nothing more to show."""
        if not self._strings or self.matched is not None:
            return text if self.matched is None else ""
        for character in text:
            self._held += character
            if self._held.endswith(self._strings):
                self.matched = next(s for s in self._strings if self._held.endswith(s))
                shown = self._held if self._include_stop else self._held.removesuffix(self.matched)
                self._held = ""
                return shown
        start = next(i for i in range(len(self._held) + 1) if any(s.startswith(self._held[i:]) for s in self._strings))
        shown, self._held = self._held[:start], self._held[start:]
        return shown

    def release(self) -> str:
        """The text has ended: what was held back."""
        shown, self._held = self._held, ""
        return shown
