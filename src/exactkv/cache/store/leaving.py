"""Where a text leaves what is stored on the disk: what goes on there, and what did until it was evicted."""

from __future__ import annotations

from array import array

from exactkv.cache.store import gone
from exactkv.cache.store.index import DiskPath, Index
from exactkv.cache.store.rows import reading
from exactkv.cache.store.tree import Namespace


@reading
def goes_on(index: Index, namespace: Namespace, path: DiskPath) -> bool:
    """Whether a stored text goes on from the end of ``path``."""
    if path.steps and path.length < path.steps[-1][0].stop:
        return True
    above = path.steps[-1][0].id if path.steps else 0
    same = "SELECT 1 FROM pieces WHERE space = ? AND parent = ? AND start = ? LIMIT 1"
    return index.db.execute(same, (index.space(namespace), above, path.length)).fetchone() is not None


@reading
def was_evicted(index: Index, namespace: Namespace, path: DiskPath, tokens: array[int]) -> bool:
    """Whether a piece of ``tokens`` that went on from the end of ``path`` has been evicted."""
    if path.length == len(tokens):
        return False
    holder = path.steps[-1][0].id if path.steps else -(index.space(namespace) or 0)
    return gone.holds(index.db, holder, path.length, tokens[path.length])


@reading
def evicted_marks(index: Index, path: DiskPath) -> list[int]:
    """Positions of this text whose checkpoints have been evicted."""
    return [at for piece, end in path.steps for at in gone.marks(index.db, piece.id) if at <= end]
