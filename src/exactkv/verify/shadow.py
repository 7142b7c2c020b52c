"""The shadow of a session: what every cache should hold, and what was found by comparing with it.

It is a list of token ids for each row: that is all that a cache may depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exactkv.verify import operations as ops
from exactkv.verify.judge import Judge
from exactkv.verify.target import Array, NotSupported, Target


@dataclass
class Violation:
    """Something that is not as it must be. ``how``: "logits", "count", "crash", "accepted", "memory", "tokens",
    "usage" or "reuse"."""

    how: str
    message: str
    operation: int
    position: int | None = None
    difference: float = 0.0
    tokens: tuple[int, ...] = ()
    hint: str = ""
    """A letter of the kinds of fault, where what happened names it."""


@dataclass
class Held:
    """A handle of the target's with its shadow. ``rows``: of a cache one, of a batch several."""

    handle: Any
    rows: list[list[int]]
    batch: bool = False
    foreseen: bool = False
    readings: list[tuple[int, int]] = field(default_factory=list)
    """(tokens held, bytes) as noted."""


@dataclass
class Store:
    handle: Any
    held: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """What was put, by salt."""
    limited: bool = False


@dataclass
class Result:
    """What came of a sequence of operations."""

    differences: dict[int, float] = field(default_factory=dict)
    compared: int = 0
    violations: list[Violation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    not_supported: str = ""
    tied: int = 0
    not_finite: int = 0
    wrong: bool = False
    """Whether wrong logits have been reported; later ones follow from them."""

    @property
    def worst(self) -> float:
        return max(self.differences.values(), default=0.0)


class Shadow:
    """``kind``: of the caches it is the shadow of. ``doubt``: look whether the first wrong row is a near-tie.
    ``latest``: what was compared last, (start, logits [n, V])."""

    def __init__(self, target: Target, judge: Judge, kind: str, doubt: bool = True):
        self.target, self.judge, self.kind, self.doubt = target, judge, kind, doubt
        self.held: dict[str, Held] = {}
        self.stores: dict[str, Store] = {}
        self.result = Result()
        self.at = 0
        self.latest: tuple[int, Array] | None = None

    def hold(self, name: str, handle: Any, rows: Sequence[Sequence[int]], batch: bool = False) -> None:
        self.held[name] = Held(handle, [list(r) for r in rows], batch)

    def violation(self, how: str, message: str, position: int | None = None, difference: float = 0.0,
                   tokens: Sequence[int] = (), hint: str = "") -> None:  # fmt: skip
        self.result.violations.append(
            Violation(how, message, self.at, position, difference, tuple(tokens), hint)
        )  # fmt: skip

    def compare(self, logits: Array, tokens: Sequence[int], start: int, what: str = "") -> None:
        """``logits`` [n, V] of the positions from ``start`` of ``tokens``."""
        wanted = len(tokens) - start
        if len(logits) != wanted:
            self.violation("count", f"{len(logits)} rows of logits came for {wanted} tokens", start, np.inf, tokens)
            return
        self.latest = (start, logits)
        differences = self.judge.differences(logits, tokens, start, self.kind)
        self.result.compared += len(differences)
        self.result.not_finite += int(np.isinf(differences).sum())
        for i, difference in enumerate(differences.tolist()):
            position = start + i
            if difference > self.judge.tolerance and not self.result.wrong:
                if self.doubt and self.judge.near_tie(tokens, position, difference, self.kind):
                    self.result.tied += 1
                    break  # what comes after a tie may follow from it
                self.result.wrong = True
                shown = "not a number" if not np.isfinite(logits[i]).all() else f"off by {difference:.1e}"
                self.violation("logits", f"position {position} is {shown}{what}", position, difference, tokens)
            self.result.differences[position] = max(self.result.differences.get(position, 0.0), difference)

    def check_length(self, name: str) -> None:
        held = self.held[name]
        try:
            if held.batch:
                said, true = self.target.lengths(held.handle), [len(r) for r in held.rows]
            else:
                said, true = [self.target.length(held.handle)], [len(held.rows[0])]
        except NotSupported:
            return
        self.result.compared += 1
        if list(said) != true:
            self.violation("count", f"the cache says it holds {said} tokens; it was fed {true}", min(true), hint="")
            raise Ended

    def blame(self, kind: str, check: Callable[[str], None], name: str) -> None:
        """What ``check`` finds is of this kind."""
        before = len(self.result.violations)
        try:
            check(name)
        finally:
            for violation in self.result.violations[before:]:
                violation.hint = kind

    def foresee(self, operations: Sequence[ops.Operation]) -> None:
        """Make the one pass over all that a cache is about to be fed, of which each feed needs a part."""
        operation = operations[self.at]
        if not isinstance(operation, ops.Feed | ops.FeedBatch) or operation.name not in self.held:
            return
        held = self.held[operation.name]
        if held.foreseen:
            return
        held.foreseen = True
        rows = [list(row) for row in held.rows]
        for later in operations[self.at :]:
            if isinstance(later, ops.Feed) and later.name == operation.name and not held.batch:
                rows[0] += later.tokens
            elif isinstance(later, ops.FeedBatch) and later.name == operation.name:
                for row, tokens in zip(rows, later.rows, strict=False):  # a case made smaller may not fit
                    row += tokens
            elif not isinstance(later, _LEAVING_AS_IT_IS) and operation.name in _named(later):
                break
        for row in rows:
            self.judge.foresee(self.kind, row)


_LEAVING_AS_IT_IS = (ops.Bytes, ops.Fork, ops.SaveLoad, ops.Settle, ops.Extract)


def _named(operation: ops.Operation) -> tuple[str, ...]:
    """The caches that an operation works on."""
    return (getattr(operation, "name", ""), *getattr(operation, "names", ()))


class Ended(Exception):
    """What was found leaves nothing to go on with."""
