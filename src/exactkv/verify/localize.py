"""Where a violation begins: the first wrong layer, and which tokens a row really depended on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exactkv.verify import operations as ops
from exactkv.verify.judge import Judge
from exactkv.verify.probe import reach
from exactkv.verify.target import Array, Target

_SIMPLE = (ops.New, ops.Feed, ops.Rewind, ops.Settle)


@dataclass(frozen=True)
class Seen:
    """Tokens (by position) on which a row did not depend though it should, and did though it should not."""

    missing: tuple[int, ...]
    extra: tuple[int, ...]


class Replay:
    """A case of one cache, run again with hidden states in place of logits."""

    def __init__(self, target: Target, judge: Judge, kind: str):
        self.target, self.judge, self.kind = target, judge, kind

    def hidden(self, case: Sequence[ops.Operation]) -> tuple[list[Array], list[int]]:
        """Hidden states (L + 1 of [n, D]) of the last feed of ``case``, and all tokens then held."""
        target = self.target
        handle: Any = None
        tokens: list[int] = []
        states: list[Array] = []
        feeds = [op for op in case if isinstance(op, ops.Feed)]
        for op in case:
            if isinstance(op, ops.New):
                handle = (
                    target.rewindable(self.kind, op.rewinds)
                    if op.rewinds is not None
                    else target.new_cache(self.kind, step=op.step, max_length=op.max_length)
                )
            elif isinstance(op, ops.Feed):
                tokens += op.tokens
                if op is feeds[-1]:
                    states = target.feed_hidden(handle, list(op.tokens))
                    break
                target.feed(handle, list(op.tokens), positions=op.positions)
            elif isinstance(op, ops.Rewind):
                removed = target.rewind(handle, op.count)
                missing = tokens[len(tokens) - removed : len(tokens) - op.count] if removed > op.count else []
                del tokens[len(tokens) - removed :]
                if missing:
                    target.feed(handle, missing)
                    tokens += missing
            elif isinstance(op, ops.Settle):
                target.settle(handle)
        return states, tokens


def one_cache(case: Sequence[ops.Operation]) -> bool:
    """Whether a case is so simple that it can be replayed."""
    return (
        all(isinstance(op, _SIMPLE) for op in case)
        and sum(isinstance(op, ops.New) for op in case) == 1
        and any(isinstance(op, ops.Feed) for op in case)
    )


def layer_differences(replay: Replay, case: Sequence[ops.Operation]) -> list[float]:
    """Largest difference of hidden states from those of one pass, by layer, relative to their size: first what
    goes into layer 0, then what comes out of each."""
    states, tokens = replay.hidden(case)
    whole = replay.target.hidden(tokens)
    found = []
    for ours, theirs in zip(states, whole, strict=True):
        right = theirs[len(tokens) - len(ours) :]
        found.append(float(np.abs(ours - right).max() / max(1e-30, np.abs(right).max())))
    return found


def first_wrong(differences: Sequence[float], judge: Judge) -> int | None:
    """The first layer whose output differs by more than noise; None if none does."""
    bound = 4 * judge.tolerance / judge.scale
    return next((i - 1 for i, d in enumerate(differences) if i and (d > bound or not np.isfinite(d))), None)


def seen(replay: Replay, case: Sequence[ops.Operation], layer: int, position: int) -> Seen | None:
    """On which tokens the output of ``layer`` at ``position`` really depends, against what its windows say.
    None where that cannot be told."""
    target = replay.target
    base, tokens = replay.hidden(case)
    row = position - (len(tokens) - len(base[0]))
    if any(isinstance(op, ops.Rewind) for op in case) or not 0 <= row < len(base[0]) or len(tokens) > 80:
        return None
    bound = replay.judge.tolerance / replay.judge.scale * float(np.abs(base[layer + 1]).max())
    depends = []
    for j in range(position + 1):
        states, _ = replay.hidden(_changed(case, j, target.vocab_size))
        moved = float(np.abs(states[layer + 1][row] - base[layer + 1][row]).max())
        depends.append(moved > bound or not np.isfinite(moved))
    within = reach(target.layers[: layer + 1], position + 1)[position]
    missing = tuple(j for j in range(position + 1) if within[j] and not depends[j])
    extra = tuple(j for j in range(position + 1) if depends[j] and not within[j])
    return Seen(missing, extra)


def _changed(case: Sequence[ops.Operation], position: int, vocab: int) -> list[ops.Operation]:
    """``case`` with the token at ``position`` replaced."""
    changed: list[ops.Operation] = []
    at = 0
    for op in case:
        if isinstance(op, ops.Feed):
            if at <= position < at + len(op.tokens):
                tokens = list(op.tokens)
                tokens[position - at] = 1 + (tokens[position - at] + vocab // 2) % (vocab - 1)
                op = replace(op, tokens=tuple(tokens))
            at += len(op.tokens)
        changed.append(op)
    return changed
