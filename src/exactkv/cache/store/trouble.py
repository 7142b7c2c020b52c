"""What goes wrong with a store's directory, and how people are told."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exactkv.errors import LoadError

DISK_ERRORS = (OSError, sqlite3.Error)


class Damaged(sqlite3.DatabaseError):
    """A row of the index holds what was never written there."""


class ReadOnly(sqlite3.OperationalError):
    """The index can be read, not written."""


def is_damage(error: BaseException | None) -> bool:
    """Whether the index will never be of use again; else something is in the way now."""
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    lost = ("no such", "decode", "malformed", "already exists")
    return not isinstance(error, sqlite3.OperationalError) or any(word in str(error) for word in lost)


def in_words(error: BaseException | None) -> str:
    """What happened, and what can be done about it."""
    if is_damage(error):
        return f"{error}; the index is damaged: delete the store's index and its files to begin anew"
    if isinstance(error, ReadOnly):
        return str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if "locked" in str(error):
        return f"{error}: another process is at it; try again"
    if "full" in str(error):
        return f"{error}: make room on the disk"
    if "unable to open" in str(error) or "disk I/O" in str(error):
        return f"{error}: the disk is full, or there is no permission"
    return str(error)


@contextmanager
def told(directory: Path) -> Iterator[None]:
    """Raises LoadError, in words, where the directory or its index does not do as it should."""
    try:
        yield
    except DISK_ERRORS as error:
        raise LoadError(f"{directory}: {in_words(error)}") from error
