"""Recurrent layers: what one keeps is not a row a position but a state, which stands for all positions before it.

A state cannot be cut: a row can go on only from a position whose state it holds, so it holds those of its newest
positions, as many as slack asks for. Each is filed under the number of tokens that it is the state of. State
tensors never change once they are filed: a call makes new ones, and rows that fork share the old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from exactkv.cache.storage import Storage
from exactkv.cache.view import Step
from exactkv.errors import InputError, IntegrityError


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state. ``wide``: kept in max(float32, the cache's dtype), as is right for a sum that
    runs on for ever; else in the cache's dtype, as is right for a copy of inputs."""

    shape: tuple[int, ...]
    wide: bool = False

    def dtype(self, storage: Storage) -> torch.dtype:
        return torch.promote_types(storage.dtype, torch.float32) if self.wide else storage.dtype


StateParts = Mapping[str, StatePart]
"""The named parts of a layer's state."""


class State(NamedTuple):
    """What all recurrent layers hold after ``position`` tokens of a row: for each layer part -> tensor."""

    position: int
    layers: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer of a cache. It holds no state: states are the rows', the call is the step's."""

    index: int
    parts: StateParts

    def read(self, step: Step) -> dict[str, Tensor]:
        """The state in which each row begins the call: part -> [B, ...]; zeros where a row is empty. Not to be
        written to."""
        return {name: self._stacked(step, name, part) for name, part in self.parts.items()}

    def write(self, step: Step, offset: int, state: Mapping[str, Tensor]) -> None:
        """The state after each row's first ``offset`` tokens of the call, part -> [B, ...]. It is filed for those
        rows that keep it. Nothing is committed: until ``Cache.commit`` the cache stands where it stood.
        Raises InputError where a part does not fit the layer."""
        self._check(step, state)
        for r, kept in enumerate(step.keeps):
            if offset in kept:
                filed = step.states.setdefault((r, offset), {})
                if self.index in filed:
                    raise IntegrityError(f"recurrent layer {self.index} was written twice at offset {offset}")
                filed[self.index] = {name: own(part[r]) for name, part in state.items()}

    def _stacked(self, step: Step, name: str, part: StatePart) -> Tensor:
        dtype, device = part.dtype(step.storage), step.storage.device
        rows = [
            torch.zeros(part.shape, dtype=dtype, device=device) if state is None else state.layers[self.index][name]
            for state in step.before
        ]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def _check(self, step: Step, state: Mapping[str, Tensor]) -> None:
        if step.void:
            raise IntegrityError(f"recurrent layer {self.index} was written in a step that is void")
        if state.keys() != self.parts.keys():
            raise InputError(f"recurrent layer {self.index} takes the parts {list(self.parts)}, not {list(state)}")
        for name, part in self.parts.items():
            given, shape, dtype = state[name], (len(step.counts), *part.shape), part.dtype(step.storage)
            if given.shape != shape or given.dtype != dtype or given.device != step.storage.device:
                raise InputError(
                    f"recurrent layer {self.index}, part {name!r}: got {given.dtype} {list(given.shape)} on "
                    f"{given.device}, expected {dtype} {list(shape)} on {step.storage.device}"
                )


def own(tensor: Tensor) -> Tensor:
    """``tensor`` in memory of just its size: what is kept must not keep a larger one alive."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def kept_from(length: int, slack: int) -> int:
    """The first position whose state a row of that length keeps: what it takes to rewind slack + 1 tokens. The
    state of no tokens is known, and not kept."""
    return max(1, length - slack - 1)


def kept_offsets(start: int, count: int, slack: int) -> range:
    """After how many of a call's ``count`` tokens the state of a row is kept."""
    return range(max(1, kept_from(start + count, slack) - start), count + 1)


def stretches(keeps: Iterable[range], counts: Iterable[int], width: int) -> tuple[tuple[int, int], ...]:
    """A call's tokens cut where some row keeps its state, and where its valid tokens end: [begin, end) of each
    stretch. So every row's tokens of a stretch are all valid or all padding, which may be anything, and is not
    multiplied with the others, not even by zero."""
    cuts = sorted({0, width, *counts}.union(*keeps))
    return tuple(pairwise(cuts))


def advanced(states: Sequence[State], step: Step, r: int, length: int, slack: int, layers: int) -> tuple[State, ...]:
    """The states of row ``r`` after the step, when it has ``length``. Raises IntegrityError where one was not
    written by all ``layers``."""
    first = kept_from(length, slack)
    kept = [state for state in states if state.position >= first]
    for offset in step.keeps[r]:
        filed = step.states.get((r, offset), {})
        if len(filed) != layers:
            missing = sorted(set(range(layers)) - filed.keys())
            raise IntegrityError(f"commit before the recurrent layers {missing} were written at offset {offset}")
        kept.append(State(step.starts[r] + offset, tuple(filed[i] for i in range(layers))))
    return tuple(kept)


def rewound(states: Sequence[State], position: int) -> tuple[State, ...]:
    """The states of no more than ``position`` tokens."""
    return tuple(state for state in states if state.position <= position)


def standing(states: Sequence[State], position: int) -> int:
    """The greatest q <= ``position`` whose state is held; that of no tokens always is."""
    return max((state.position for state in states if state.position <= position), default=0)


def tensors(states: Iterable[State]) -> dict[int, Tensor]:
    """Every tensor of these states, each once, by its address."""
    return {t.data_ptr(): t for state in states for layer in state.layers for t in layer.values() if t.numel()}
