"""Evicting from the index: what was used longest ago goes first, in short transactions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from heapq import merge

from exactkv.cache.store.index import NAME, Entry, Index
from exactkv.cache.store.rows import reading
from exactkv.cache.store.trouble import Damaged

PAGE = 100
"""Rows that are read at once where entries are looked through in order."""
BATCH = 250
"""Entries that go in one transaction."""
PAUSE = 0.005
"""Seconds for others between two of them: SQLite tries now and then, and does not queue."""


def evict_in_batches(
    index: Index, goal: int, keep: Iterable[int] = (), keep_marks: Iterable[int] = (), before: float = 1e300
) -> tuple[int, int]:
    """As ``evict``, until the rest comes to ``goal`` bytes, in transactions of its own, between which other processes
    have their turn."""
    count = freed = 0
    excess: int | None = None  # summed up once, and again at the end, as others may have stored something meanwhile
    while True:
        with index.writing():
            summed = excess is None
            excess = index.total() - index.going_bytes() - goal if excess is None else excess
            gone, size = evict(index, excess, keep, keep_marks, before, BATCH)
        count, freed, excess = count + gone, freed + size, excess - size
        if gone < BATCH:
            if summed:
                return count, freed
            excess = None
        time.sleep(PAUSE)


@reading
def evict(
    index: Index, excess: int, keep: Iterable[int] = (), keep_marks: Iterable[int] = (), before: float = 1e300,
    most: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Within a transaction: forget what was used longest ago (and before ``before``) until ``excess``
    bytes, or ``most`` entries, went; pieces from which others hang stay. Files are marked as going.
    Returns how many entries went, and their bytes."""
    kept = {0: set(keep), 1: set(keep_marks)}
    count, freed, passed = 0, 0, set[int]()
    for _, kind, id_ in merge(_oldest(index, "pieces", 0, before), _oldest(index, "marks", 1, before)):
        while freed < excess and count != most and id_ not in kept[kind]:
            if not kind and index.db.execute("SELECT 1 FROM pieces WHERE parent = ? LIMIT 1", (id_,)).fetchone():
                passed.add(id_)  # its turn comes with the last that hangs from it
                break
            above = None if kind else index.db.execute("SELECT parent FROM pieces WHERE id = ?", (id_,)).fetchone()
            size = index.forget(Entry(id_, 0, 0, "", not kind), remember=True)
            if size is None:
                if kind:
                    break  # it went with its piece
                raise Damaged(f"{NAME} is damaged: the entry {id_} cannot be removed")
            count, freed = count + 1, freed + size
            if above is None or above[0] not in passed:
                break
            id_ = above[0]
        if freed >= excess or count == most:
            break
    return count, freed


def _oldest(index: Index, table: str, kind: int, before: float) -> Iterator[tuple[float, int, int]]:
    """(when used, ``kind``, id) of a table's entries, what was used longest ago first, read as it is asked for."""
    used, id_ = float("-inf"), -1
    while rows := index.db.execute(
        f"SELECT used, id FROM {table} WHERE used >= ? AND (used, id) > (?, ?) AND used < ? ORDER BY used, id "
        f"LIMIT {PAGE}", (used, used, id_, before),
    ).fetchall():  # fmt: skip
        for used, id_ in rows:
            yield used, kind, id_
