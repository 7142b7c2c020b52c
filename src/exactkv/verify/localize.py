"""Where a violation begins: the first wrong layer, and which tokens a row really depended on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exactkv.verify import operations as ops
from exactkv.verify.judge import Judge
from exactkv.verify.probe import reach
from exactkv.verify.target import Array, Target

_SIMPLE = (ops.New, ops.Feed, ops.Rewind, ops.Settle)
_KNOWN = (*_SIMPLE, ops.Fork, ops.Reset, ops.SaveLoad, ops.NewStore, ops.Put, ops.Get)


@dataclass(frozen=True)
class Seen:
    """Tokens (by position) on which a row did not depend though it should, and did though it should not."""

    missing: tuple[int, ...]
    extra: tuple[int, ...]


class Replay:
    """A case run again without comparing, with hidden states in place of the last feed's logits."""

    def __init__(self, target: Target, judge: Judge, kind: str):
        self.target, self.judge, self.kind = target, judge, kind

    def hidden(self, case: Sequence[ops.Operation]) -> tuple[list[Array], list[int]]:
        """Hidden states (L + 1 of [n, D]) of the last feed of ``case``, and all tokens that its cache then holds."""
        self.held: dict[str, tuple[Any, list[int]]] = {}
        self.stores: dict[str, Any] = {}
        states: list[Array] = []
        tokens: list[int] = []
        with tempfile.TemporaryDirectory() as files:
            self.files = Path(files)
            last = max(i for i, op in enumerate(case) if isinstance(op, ops.Feed | ops.Get))
            for i, op in enumerate(case[: last + 1]):
                if isinstance(op, ops.Feed | ops.Get):
                    states, tokens = self._fed(op, wanted=i == last)
                else:
                    self._do(op)
        return states, tokens

    def _fed(self, op: ops.Feed | ops.Get, wanted: bool) -> tuple[list[Array], list[int]]:
        target = self.target
        if isinstance(op, ops.Get):
            hit = target.get(self.stores[op.store], list(op.tokens), salt=op.salt)
            handle = hit.cache if hit.length else target.new_cache(self.kind)
            self.held[op.into] = (handle, list(op.tokens[: hit.length]))
            name, new, positions = op.into, [*op.tokens[hit.length :], *op.then], False
        else:
            name, new, positions = op.name, list(op.tokens), op.positions
        handle, tokens = self.held[name]
        tokens += new
        if wanted and new:
            return target.feed_hidden(handle, new), tokens
        if new:
            target.feed(handle, new, positions=positions)
        return [], tokens

    def _do(self, op: ops.Operation) -> None:
        target = self.target
        match op:
            case ops.New(name, step, max_length, rewinds):
                if rewinds is not None:
                    made = target.rewindable(self.kind, rewinds)
                else:
                    made = target.new_cache(self.kind, step=step, max_length=max_length)
                self.held[name] = (made, [])
            case ops.Rewind(name, count):
                handle, tokens = self.held[name]
                removed = target.rewind(handle, count)
                missing = tokens[len(tokens) - removed : len(tokens) - count] if removed > count else []
                del tokens[len(tokens) - removed :]
                if missing:
                    target.feed(handle, missing)
                    tokens += missing
            case ops.Settle(name):
                target.settle(self.held[name][0])
            case ops.Fork(name, into):
                self.held[into] = (target.fork(self.held[name][0]), list(self.held[name][1]))
            case ops.Reset(name):
                self.held[name] = (target.reset(self.held[name][0]), [])
            case ops.SaveLoad(name, into):
                target.save(self.held[name][0], self.files / into)
                self.held[into] = (target.load(self.files / into), list(self.held[name][1]))
            case ops.NewStore(name, entries):
                self.stores[name] = target.new_store(entries)
            case ops.Put(store, name, salt):
                handle, tokens = self.held.pop(name)
                target.put(self.stores[store], tokens, handle, salt=salt)


def replayable(case: Sequence[ops.Operation]) -> bool:
    """Whether a case can be run again with hidden states."""
    return all(isinstance(op, _KNOWN) for op in case) and any(isinstance(op, ops.Feed | ops.Get) for op in case)


def one_cache(case: Sequence[ops.Operation]) -> bool:
    """Whether a case feeds one cache and no more, so that it can be told which token stands where."""
    return all(isinstance(op, _SIMPLE) for op in case) and sum(isinstance(op, ops.New) for op in case) == 1


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
    if not one_cache(case):
        return None
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
