"""The disk tier: a directory of safetensors files and their index, for several processes at once.

A file is whole before the index serves it, and no longer served before it is deleted; its bytes are counted from
before the one until after the other. So a kill at any moment loses nothing that was finished, and the limit holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
import uuid
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from exactkv.cache.checks import as_path
from exactkv.cache.store import files, gone
from exactkv.cache.store.evict import BATCH, evict, evict_in_batches
from exactkv.cache.store.files import Broken, Tensors
from exactkv.cache.store.index import NAME, OLD_SECONDS, TOKEN_BYTES, DiskPath, Entry, Index
from exactkv.cache.store.tree import Namespace
from exactkv.cache.store.trouble import is_damage
from exactkv.errors import InputError


class DiskTier:
    """``evictions``: entries that went for want of room; ``broken``: those dropped, their file missing or altered;
    ``reads``, ``writes``: files. Not for several threads at once: the store's lock is around it."""

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int | None = None, create: bool = True):
        self.directory, self.max_bytes = as_path("directory", directory), max_bytes
        self.evictions = self.broken = self.reads = self.writes = 0
        self.last_failure = ""
        self._used: dict[tuple[bool, int], float] = {}
        self._avoided: set[int] = set()  # pieces that are no good, where the index cannot be told
        if create:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise InputError(f"directory {self.directory} is a file; give a directory, or a new name") from None
            except OSError as error:
                raise InputError(f"directory {self.directory} cannot be made: {error.strerror or error}") from error
        elif not (self.directory / NAME).is_file():
            raise InputError(f"{self.directory} is no prompt store: it has no {NAME}")
        self.index = Index(self.directory / NAME)

    def tidy(self) -> None:
        """Finish what processes that died have left: half-written files, files without an entry, and what is too much
        by this store's limit. Files of other names, or that say they are something else, are not ours."""
        if self.index.read_only:
            return
        with self.index.writing():
            self.index.abandon()
        if self.max_bytes is not None:
            self.evictions += evict_in_batches(self.index, self.max_bytes)[0]
        self._delete_going()
        known = self.index.known()
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD_SECONDS:
                    name = files.left_behind(path)
                    if name and name not in known:
                        path.unlink()

    # Looking up.

    def walk(self, namespace: Namespace, tokens: array[int], avoid: Iterable[str] = ()) -> DiskPath:
        """Follow ``tokens`` as far as they are stored, and up to the first piece whose file is one of ``avoid``."""
        path = self.index.walk(self.index.space(namespace), tokens)
        for i, (entry, _) in enumerate(path.steps):
            if entry.id in self._avoided or (entry.file and entry.file in avoid):
                return DiskPath(path.steps[:i], entry.start)
        return path

    def load(self, entry: Entry, namespace: Namespace, tokens: array[int]) -> dict[str, Tensor]:
        """The tensors of ``entry``, which is on the path of ``tokens``. Raises Broken where its file is gone or not
        what was written (then the entry is dropped), Unreadable where it cannot be read now."""
        if not entry.file:
            return {}
        try:
            self.reads += 1
            stored = tokens if not entry.piece else self._text(entry, tokens)
            return files.read(self.directory / entry.file, about(entry, namespace, stored))
        except Broken:
            self.drop(entry)
            raise

    def _text(self, entry: Entry, tokens: array[int]) -> array[int]:
        """The text of a piece to its end; ``tokens`` may leave it before."""
        own = self.index.tokens(entry)
        return tokens[: entry.start] + own if own is not None else tokens

    def drop(self, entry: Entry) -> None:
        """An entry whose file is no good, and what hangs from it; nothing is wrong where another process has evicted
        it meanwhile."""
        if entry.piece:
            self._avoided.add(entry.id)
        if self.index.read_only:
            self.broken += self.index.holds(entry)
            return
        with self.index.writing():
            self.broken += self.index.forget(entry) is not None
        self._delete_going()

    def use(self, path: DiskPath, mark: Entry | None = None) -> None:
        """What was used, is used now, leaves before what they hang from. Written with the next change."""
        if self.index.read_only:
            return
        now = time.time()
        for depth, (piece, _) in enumerate(path.steps):
            self._used[True, piece.id] = now - 1e-6 * depth
        if mark is not None:
            self._used[False, mark.id] = now

    # Storing.

    def could_hold(self, nbytes: int) -> bool:
        return self.max_bytes is None or nbytes <= self.max_bytes

    def put(
        self, namespace: Namespace, described: Mapping[str, str], tokens: array[int], entry: Entry, tensors: Tensors,
        keep: DiskPath, keep_marks: Iterable[int] = (), pinned: Iterable[int] = (),
    ) -> int | None:  # fmt: skip
        """Write a piece ``tokens[entry.start:entry.stop]`` that hangs from the end of ``keep``, or a checkpoint at
        ``entry.stop`` of the piece ``entry.id``. Returns its id; None where it does not fit, or where another process
        has stored the same or deleted what it belongs to. ``keep``, ``keep_marks`` and ``pinned`` (pieces) are not
        evicted for it."""
        content = about(entry, namespace, tokens[: entry.stop])
        size = files.size(content, tensors) if tensors else 0
        ids = TOKEN_BYTES * (entry.stop - entry.start)  # none for a checkpoint
        name = self._reserved(size + ids, {*pinned, *(p.id for p, _ in keep.steps)}, set(keep_marks))
        if name is None:
            return None
        made = None
        try:
            if tensors:
                files.write(self.directory / name, content, tensors)
                self.writes += 1
            space = self.index.space(namespace, described)
            assert space is not None
            with self.index.writing():
                if entry.piece:
                    parent = keep.steps[-1][0].id if keep.steps else 0
                    own = tokens[entry.start : entry.stop]
                    made = self.index.enter_piece(space, parent, entry.start, own, name, size)
                else:
                    made = self.index.enter_mark(entry.id, entry.stop, name, size)
                if made is None:
                    self.index.given_up(name)
        except BaseException:
            with self.index.writing():
                self.index.given_up(name)
            self._delete_going()
            raise
        if made is None:
            self._delete_going()
        return made

    def _reserved(self, nbytes: int, keep: set[int], marks: set[int]) -> str | None:
        """The name of a file that may have so many bytes; evicts what is in the way, the pieces ``keep`` and the
        checkpoints ``marks`` aside. None where it cannot be had."""
        name = uuid.uuid4().hex + files.SUFFIX
        for _ in range(20):  # others may be quicker
            with self.index.writing():
                self.index.touch(self._used)
                self._used.clear()
                if self.max_bytes is None or self.index.total() + nbytes <= self.max_bytes:
                    self.index.reserve(name, nbytes)
                    return name
            if not self._make_room(nbytes, keep, marks):
                return None
        return None

    def _make_room(self, nbytes: int, keep: set[int], marks: set[int]) -> bool:
        assert self.max_bytes is not None
        self.evictions += evict_in_batches(self.index, self.max_bytes, keep, marks)[
            0
        ]  # another process's limit may be higher
        try:
            with self.index.writing():
                self.index.abandon()
                count, _ = evict(
                    self.index, self.index.total() - self.index.going_bytes() + nbytes - self.max_bytes, keep, marks
                )
                if self.index.total() - self.index.going_bytes() + nbytes > self.max_bytes:
                    raise _Undo
        except _Undo:
            self._delete_going()
            return False
        self.evictions += count
        return self._delete_going()

    def _delete_going(self) -> bool:
        """Delete files that are no longer served. False where one cannot be deleted: it counts until it can."""
        names, all_gone = self.index.going(), True
        left = files.unfinished(self.directory) if names else {}
        for first in range(0, len(names), BATCH):
            deleted = []
            for name in names[first : first + BATCH]:
                try:
                    files.remove(self.directory, name, left)
                    deleted.append(name)
                except OSError as error:
                    all_gone, self.last_failure = False, f"{name}: {error.strerror or error}"
            if deleted:
                with self.index.writing():
                    self.index.deleted(deleted)
        return all_gone

    # As a whole.

    def prune(
        self, max_bytes: int | None = None, before: float | None = None, dry_run: bool = False
    ) -> tuple[int, int]:
        """Evict until at most ``max_bytes`` are left, and all that was last used before the time ``before``; with
        ``dry_run`` only count. Returns how many entries went, and their bytes. Needs no room on the disk: where the
        index cannot grow, files go first. Raises OSError where files cannot be deleted, sqlite3.Error where the index
        cannot be written even then."""
        if not dry_run:
            try:
                return self._pruned(self.index, max_bytes, before)
            except sqlite3.OperationalError as error:
                if is_damage(error) or "locked" in str(error):
                    raise
        tried = self.index.copy()
        try:
            count, freed = _chosen(tried, max_bytes, before)
            names = tried.going()
        finally:
            tried.close()
        if dry_run:
            return count, freed
        left = files.unfinished(self.directory)
        for name in names:
            files.remove(self.directory, name, left)
        self.index.close()
        self.index.open()
        return self._pruned(self.index, max_bytes, before)

    def _pruned(self, index: Index, max_bytes: int | None, before: float | None) -> tuple[int, int]:
        count, freed = _chosen(index, max_bytes, before)
        if not self._delete_going():
            raise OSError(f"not every file could be deleted: {self.last_failure}")
        return count, freed

    def clear(self) -> None:
        """Forget all. Raises as ``prune`` does."""
        self.prune(-1)
        with self.index.writing():
            gone.forget_all(self.index.db)

    def close(self) -> None:
        with contextlib.suppress(Exception), self.index.writing():
            self.index.touch(self._used)
        self.index.close()


def _chosen(index: Index, max_bytes: int | None, before: float | None) -> tuple[int, int]:
    """Evict what ``prune`` is asked to; its files are going. How many entries, and their bytes."""
    old = evict_in_batches(index, -1, before=before) if before is not None else (0, 0)
    more = evict_in_batches(index, max_bytes) if max_bytes is not None else (0, 0)
    return old[0] + more[0], old[1] + more[1]


class _Undo(Exception):
    """Undoes a transaction of evictions that are not wanted after all."""


def about(entry: Entry, namespace: Namespace, text: array[int]) -> dict[str, Any]:
    """What the file of ``entry`` says of itself: whose it is, and by a hash of which tokens."""
    digest = hashlib.sha256(text[: entry.stop].tobytes()).hexdigest()
    whose = {"identity": namespace.identity, "storage": namespace.storage, "dtype": namespace.dtype}
    span = {"start": entry.start, "stop": entry.stop} if entry.piece else {"position": entry.stop}
    kind = "piece" if entry.piece else "checkpoint"
    return {"kind": kind, **whose, "salt": namespace.salt, **span, "text": digest}
