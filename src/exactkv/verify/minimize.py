"""The least that still shows a violation: fewer operations, shorter texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from exactkv.verify.operations import Feed, Operation
from exactkv.verify.shadow import Violation

Case = list[Operation]
Failing = Callable[[Case], Violation | None]
"""Runs a case; the violation that it still shows, of the same sort as the one looked for."""


def minimize(case: Case, violation: Violation, failing: Failing, seconds: float = 2.0) -> tuple[Case, Violation]:
    """The smallest case found within ``seconds``, and its violation."""
    until = time.monotonic() + seconds
    best, found = case[: violation.operation + 1], violation
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for smaller in _smaller(best):
            if time.monotonic() >= until:
                break
            still = failing(smaller)
            if still is not None:
                best, found, progress = smaller[: still.operation + 1], still, True
                break
    return best, found


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, the boldest first."""
    feeds = [i for i, op in enumerate(case) if isinstance(op, Feed)]
    yield from _merged(case, feeds)
    for i in reversed(range(len(case) - 1)):
        yield [*case[:i], *case[i + 1 :]]
    for i in feeds:
        op = case[i]
        assert isinstance(op, Feed)
        for drop in sorted({len(op.tokens) // 2, 1} - {0}, reverse=True):
            if drop < len(op.tokens):
                yield [*case[:i], replace(op, tokens=op.tokens[drop:]), *case[i + 1 :]]


def _merged(case: Case, feeds: list[int]) -> Iterator[Case]:
    """Neighbouring feeds of one cache as one: all but the last, the first half, each pair."""
    runs: list[list[int]] = []
    for i in feeds:
        last = runs[-1] if runs else []
        if last and last[-1] == i - 1 and _alike(case[i - 1], case[i]):
            last.append(i)
        else:
            runs.append([i])
    for run in runs:
        for size in sorted({len(run) - 1, len(run) // 2, 2}, reverse=True):
            if 2 <= size <= len(run):
                first, last_ = run[0], run[0] + size
                tokens = tuple(t for op in case[first:last_] if isinstance(op, Feed) for t in op.tokens)
                head = case[first]
                assert isinstance(head, Feed)
                yield [*case[:first], replace(head, tokens=tokens), *case[last_:]]


def _alike(a: Operation, b: Operation) -> bool:
    return isinstance(a, Feed) and isinstance(b, Feed) and (a.name, a.positions) == (b.name, b.positions)
