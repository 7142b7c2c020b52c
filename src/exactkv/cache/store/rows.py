"""What rows of the index hold, taken with care: it may have been damaged."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from exactkv.cache.store.files import is_named_as_ours
from exactkv.cache.store.trouble import Damaged

P = ParamSpec("P")
T = TypeVar("T")


def reading(method: Callable[P, T]) -> Callable[P, T]:
    """What rows hold that was never written there is damage, not a fault of whoever asks."""

    @wraps(method)
    def read(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise Damaged(f"a row of the index is damaged: {error}") from error

    return read


def check_name(file: str) -> None:
    if file and not is_named_as_ours(file):
        raise ValueError(f"{file!r} is no name of a store's file")


def check_plain(entry: Mapping[str, Any]) -> None:
    """The columns of a piece or a checkpoint are of their kinds."""
    for name, value in entry.items():
        kind = {"file": str, "tokens": bytes, "marks": list, "used": float}.get(name, int)
        if not isinstance(value, kind) or value != value:
            raise ValueError(f"{name} is {value!r}")
    check_name(entry["file"])


def unpacked(blob: bytes) -> array[int]:
    tokens: array[int] = array("q")
    tokens.frombytes(blob)
    return tokens


def alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    if os.name != "posix":  # elsewhere asking would be a signal
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
