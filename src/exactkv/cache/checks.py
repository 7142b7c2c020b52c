"""Checks of what callers give: one clear error, before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exactkv.errors import InputError


def check_lengths(lengths: Sequence[int] | None, batch: int, width: int) -> tuple[int, ...]:
    """``lengths`` as a tuple of ints, one a row, each from 0 to ``width``; None means ``width`` for all."""
    if lengths is None:
        return (width,) * batch
    given = listed("lengths", lengths)
    if len(given) != batch:
        raise InputError(f"lengths has {len(given)} entries; expected one for each of {batch} rows")
    for r, n in enumerate(given):
        if not is_int(n) or not 0 <= n <= width:
            raise InputError(f"lengths[{r}] is {n!r}; expected an integer from 0 to {width}, the width of tokens")
    return tuple(given)


def check_rows(rows: Iterable[Any], batch: int) -> list[int]:
    """Row numbers of a batch of so many rows, negative ones counted from the end, each checked."""
    given = listed("rows", rows)
    for r in given:
        if not is_int(r) or not -batch <= r < batch:
            raise InputError(f"row {r!r} does not exist; this cache has the rows 0 to {batch - 1}")
    return [r % batch for r in given]


def check_targets(to: int | Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Where each row of these ``lengths`` shall go back to: ``to`` for all of them, or one a row."""
    targets = list(to) if isinstance(to, Sequence) else [to] * len(lengths)
    if len(targets) != len(lengths):
        raise InputError(f"to names {len(targets)} positions; expected one, or one for each of {len(lengths)} rows")
    for r, (target, length) in enumerate(zip(targets, lengths, strict=True)):
        if not is_int(target) or not 0 <= target <= length:
            raise InputError(f"cannot rewind row {r} to {target!r}; expected an integer from 0 to its length {length}")
    return targets


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number that a float can hold, such as 1, 0.5 or inf; nan is one too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def listed(name: str, given: Any) -> list[Any]:
    """What was given as a list. Raises InputError where it is no plain series of values."""
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if isinstance(given, Mapping | str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"{name} is a {type(given).__name__}; expected a list")
    return list(given)


def require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}; expected {expected}")


def as_path(name: str, given: str | os.PathLike[str]) -> Path:
    """A path that can be one. Raises InputError where it is none, is empty or has a null character."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{name} is {text!r}; expected a path: a text, not empty, without null characters")
    return Path(text)
