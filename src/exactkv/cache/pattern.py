"""Attention patterns: which earlier positions a query sees.

A pattern is one function, ``first_visible(position)``, that never decreases. So rows before
``first_visible(end)`` can never be seen again, which is the whole theory of eviction here.
Positions are absolute: the number of tokens before this one in its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from exactkv.errors import InputError

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class AttentionPattern:
    """What all patterns have. ``anchors``: so many first positions stay visible to every later query
    (StreamingLLM, arXiv 2309.17453, section 3.2), beside what the pattern itself shows."""

    anchors: int = 0

    def __post_init__(self) -> None:
        _require_count("anchors", self.anchors, minimum=0)

    @property
    def bound(self) -> int | None:
        """The most rows before and including a query that it sees, anchors apart; None if unbounded."""
        return None

    def first_visible(self, position: Position) -> Position:
        """The first position, anchors apart, that a query at ``position`` sees. An int or a tensor of ints."""
        return position * 0

    def last_query(self, position: int) -> int | None:
        """The last query that sees ``position`` other than as an anchor; None if all later ones do."""
        return None

    def restart(self, position: int) -> int:
        """The greatest q <= ``position`` with first_visible(q) == q: there a layer needs no earlier row."""
        return 0


@dataclass(frozen=True)
class FullAttention(AttentionPattern):
    """Every earlier position is visible."""

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class SlidingWindow(AttentionPattern):
    """The newest ``window`` positions are visible, the query's own counted among them."""

    window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("window", self.window, minimum=1)

    @property
    def bound(self) -> int:
        return self.window

    def first_visible(self, position: Position) -> Position:
        first = position - self.window + 1
        return first * (first > 0)

    def last_query(self, position: int) -> int:
        return position + self.window - 1

    def restart(self, position: int) -> int:
        return position if self.window == 1 else 0

    def __str__(self) -> str:
        return f"window {self.window}" + _anchored(self)


@dataclass(frozen=True)
class ChunkedAttention(AttentionPattern):
    """Positions fall into blocks of ``chunk_size``; a query sees its own block up to itself (Llama 4)."""

    chunk_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("chunk_size", self.chunk_size, minimum=1)

    @property
    def bound(self) -> int:
        return self.chunk_size

    def first_visible(self, position: Position) -> Position:
        return position // self.chunk_size * self.chunk_size

    def last_query(self, position: int) -> int:
        return self.first_visible(position) + self.chunk_size - 1

    def restart(self, position: int) -> int:
        return self.first_visible(position)

    def __str__(self) -> str:
        return f"chunk {self.chunk_size}" + _anchored(self)


def visible(pattern: AttentionPattern, queries: Tensor, keys: Tensor) -> Tensor:
    """The visible mask. ``queries`` [..., Q] and ``keys`` [..., K] are absolute positions, int64;
    returns bool [..., Q, K], True where the query sees the key."""
    q, k = queries.unsqueeze(-1), keys.unsqueeze(-2)
    return (k <= q) & ((k >= pattern.first_visible(q)) | (k < pattern.anchors))


def _anchored(pattern: AttentionPattern) -> str:
    return f" + {pattern.anchors} anchors" if pattern.anchors else ""


def _require_count(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InputError(f"{name} is {value!r}; expected an integer of {minimum} or more")
