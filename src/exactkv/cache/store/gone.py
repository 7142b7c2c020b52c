"""What has been evicted from the disk, as far as explanations need it: a table of the index.

A row names what the evicted one hung from (a piece; for a text's first piece the namespace, negative), where it began
and its first token; for a checkpoint its piece, its position and ``MARK``.
"""

from __future__ import annotations

import sqlite3

SCHEMA = """
CREATE TABLE IF NOT EXISTS gone (
    holder INTEGER NOT NULL, start INTEGER NOT NULL, first INTEGER NOT NULL, UNIQUE (holder, start, first))
"""
MARK = -1
MOST = 10_000
"""Evictions that are remembered, the newest."""
_SAME = "FROM gone WHERE holder = ? AND start = ? AND first = ?"


def remember(db: sqlite3.Connection, holder: int, start: int, first: int) -> None:
    db.execute("INSERT OR REPLACE INTO gone (holder, start, first) VALUES (?, ?, ?)", (holder, start, first))
    db.execute("DELETE FROM gone WHERE rowid <= (SELECT MAX(rowid) FROM gone) - ?", (MOST,))


def forget(db: sqlite3.Connection, holder: int, start: int, first: int) -> None:
    """It is stored again."""
    db.execute(f"DELETE {_SAME}", (holder, start, first))


def forget_all(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM gone")


def holds(db: sqlite3.Connection, holder: int, start: int, first: int) -> bool:
    return db.execute(f"SELECT 1 {_SAME}", (holder, start, first)).fetchone() is not None


def marks(db: sqlite3.Connection, piece: int) -> list[int]:
    """Positions of evicted checkpoints."""
    return [at for (at,) in db.execute("SELECT start FROM gone WHERE holder = ? AND first = ?", (piece, MARK))]
