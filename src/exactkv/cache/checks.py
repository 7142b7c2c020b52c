"""Checks of what callers give: one clear error, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
