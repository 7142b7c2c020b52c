"""PromptStore: what was computed for a text is reused by every text that begins like it, where that is exact."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from exactkv.cache.cache import Cache
from exactkv.cache.checks import check_rows, is_int, require
from exactkv.cache.store import leaving
from exactkv.cache.store.asked import Maker, ids_of, limit_of, made, namespace_of
from exactkv.cache.store.disk import DiskTier
from exactkv.cache.store.files import Broken, Unreadable
from exactkv.cache.store.index import DiskPath, Entry
from exactkv.cache.store.memory import MemoryTier
from exactkv.cache.store.report import Counts, Evicted, Inserted, Lookup, StoreStats, explained
from exactkv.cache.store.source import Source, Standing, find
from exactkv.cache.store.tree import Filed, Namespace, Node, ids
from exactkv.cache.store.trouble import DISK_ERRORS, in_words
from exactkv.cache.store.writer import Writer
from exactkv.errors import InputError, LoadError

T = TypeVar("T")
MOST_REFUSALS = 64
"""Texts that are remembered as refused, for explanations."""
MOST_SHARED = 4
"""Pieces that a row refers to rather than copying them, where the device has no use for one run."""


class Pin:
    """Keeps a text in a store until ``unpin``, or the end of a ``with`` block. ``tokens``: how many of it."""

    def __init__(
        self, store: PromptStore, namespace: Namespace, text: array[int], pinned: tuple[Node | Filed, ...]
    ):  # fmt: skip
        self.tokens = len(text)
        self._store, self._namespace, self._text, self._pinned = store, namespace, text, pinned

    def unpin(self) -> None:
        """From now on it may be evicted. A second call does nothing."""
        self._store._unpin(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unpin()


class PromptStore:
    """A store of prompts' caches, of any number of models, for any number of threads.

    ``max_bytes``: the most memory that stored tensors and token ids take, at any instant; they lie on the device of the
    cache that they came from. ``directory``: where they are kept on the disk too, for other processes and times, in at
    most ``directory_bytes`` bytes (None: no limit; the index of about 10 bytes a token is not counted).
    ``merge``: whether a cache that was found gets memory of its own, contiguous (True), or refers to the store's
    until it is given up (False); None: True on a CPU, which reads one run the faster, and where pieces are many.
    Entries of different weights, rope variants, storage, dtype and salt never meet. What is found is confirmed token by
    token, and on the disk by checksums. What was used longest ago goes first.
    Raises InputError where an argument does not fit, LoadError where the directory's index cannot be used.
    """

    def __init__(
        self, max_bytes: int = 1_000_000_000, directory: str | os.PathLike[str] | None = None,
        directory_bytes: int | None = None, merge: bool | None = None,
    ):  # fmt: skip
        require(is_int(max_bytes) and max_bytes >= 0, "max_bytes", max_bytes, "a number of bytes, an integer >= 0")
        fits = directory_bytes is None or (is_int(directory_bytes) and directory_bytes >= 0)
        require(fits, "directory_bytes", directory_bytes, "a number of bytes, an integer >= 0, or None")
        require(directory is not None or directory_bytes is None, "directory", directory, "one for directory_bytes")
        self._lock = threading.RLock()
        self._memory, self._merge, self._counts = MemoryTier(max_bytes), merge, Counts()
        self._pins: list[Pin] = []
        self._refusals: dict[tuple[Namespace, int, bytes], str] = {}
        self._closed, self._sound = False, True
        self._disk: DiskTier | None = None
        if directory is not None:
            self._disk = DiskTier(directory, directory_bytes)
            self._on_disk(self._disk.tidy, None)

    # The three things to do with it.

    def lookup(self, model: Maker, tokens: Sequence[int], salt: str = "", **options: Any) -> Lookup:
        """A cache of the longest beginning of ``tokens`` at which every layer of ``model`` can stand, at least one
        token short of all; of none if there is none. It goes its own way: nothing done with it changes the store.

        ``salt``: separates tenants; only what was inserted with the same is found. ``options``: of
        ``model.new_cache``, such as ``slack``, which holds for what is fed from then on. Raises InputError where
        tokens are none or no ids, or an option does not fit.
        """
        text = ids_of(tokens)
        cache = made(model, 1, options)
        space = namespace_of(cache, salt)
        with self._operating():
            at, evicted = self._built(cache, text, space, limit_of(cache, text))
            self._counts.lookups += 1
            self._counts.hits += at.position > 0
            self._counts.asked_tokens += len(text)
            self._counts.reused_tokens += at.position
            reason = self._explained(cache, text, space, at, evicted)
        return Lookup(cache, at.position, len(text) - at.position, reason)

    def insert(self, cache: Cache, row: int = 0, salt: str = "") -> Inserted:
        """Store what ``cache`` holds of one row: its rows of unbounded layers, of which only what is new is copied, its
        checkpoints, and what it takes to stand at its end and one token before, if the row can go back there.
        The cache is as it was. What does not fit is refused, with the reason; then what is stored stays."""
        require(isinstance(cache, Cache), "cache", type(cache).__name__, "a cache made by model.new_cache()")
        (index,) = check_rows([row], cache.batch_size)
        state, space = cache._rows[index], namespace_of(cache, salt)
        text = ids(state.owner.log[: state.length])
        with self._operating():
            self._counts.inserts += 1
            if not text:
                return Inserted(0, 0, True, self._disk is not None)
            return self._insert(Writer(cache, state, space, text), dict(cache.spec.described))

    def pin(self, model: Maker, tokens: Sequence[int], salt: str = "", **options: Any) -> Pin:
        """Keep what is stored of ``tokens``, in memory and from this process's evictions on the disk, until it is
        unpinned. Its ``tokens`` says how many that are; 0 if nothing is stored."""
        text = ids_of(tokens)
        cache = made(model, 1, options)
        space = namespace_of(cache, salt)
        with self._operating():
            at, _ = self._built(cache, text, space, len(text))
            path = self._memory.walk(space, text)
            length = max(path.length, at.disk.length)  # memory may have no room for what the disk has
            pin = Pin(self, space, text[:length], self._memory.pin(path))
            self._pins.append(pin)
        return pin

    # What it says.

    def explain(self, model: Maker, tokens: Sequence[int], salt: str = "", **options: Any) -> str:
        """Why a lookup of these would reuse what it would, in words: whether nothing is stored, the texts differ (from
        which token on), no checkpoint lies between, something was evicted or refused, or it is stored under another
        salt, dtype, storage or model. For whoever runs the store: it tells of other salts."""
        text = ids_of(tokens)
        cache = made(model, 0, options)
        space = namespace_of(cache, salt)
        with self._operating():
            limit = limit_of(cache, text)
            at = self._standing(cache, text, space, set(), limit)
            others = self._elsewhere(text, space, at.stored)
            return self._explained(cache, text, space, at, self._evicted(at, text, space, limit), others)

    def stats(self) -> StoreStats:
        """Counts since it was opened, and what it holds now."""
        with self._operating():
            memory, disk, counts = self._memory, self._disk, self._counts
            nodes = memory.all_nodes()
            total = self._on_disk(disk.index.total, 0) if disk else 0
            held = self._on_disk(disk.index.counts, (0, 0)) if disk else (0, 0)
            return StoreStats(
                lookups=counts.lookups, hits=counts.hits, misses=counts.lookups - counts.hits,
                asked_tokens=counts.asked_tokens, reused_tokens=counts.reused_tokens, inserts=counts.inserts,
                refused=counts.refused, refused_on_disk=counts.refused_on_disk, bytes=memory.nbytes,
                max_bytes=memory.max_bytes, pieces=len(nodes), checkpoints=sum(len(n.checkpoints) for n in nodes),
                tokens=sum(len(n.tokens) for n in nodes), pinned=len(self._pins), evictions=memory.evictions,
                disk_bytes=total, directory_bytes=disk.max_bytes if disk else None, disk_pieces=held[0],
                disk_checkpoints=held[1], disk_hits=counts.disk_hits, disk_reads=disk.reads if disk else 0,
                disk_writes=disk.writes if disk else 0, disk_evictions=disk.evictions if disk else 0,
                broken=disk.broken if disk else 0, disk_errors=counts.disk_errors,
                last_disk_error=counts.last_disk_error, last_refusal=counts.last_refusal,
            )  # fmt: skip

    def clear(self) -> None:
        """Forget everything, pinned or not, in memory and on the disk. Caches that were found go on. Raises OSError
        where not all of it could be deleted from the disk; what could be is."""
        with self._operating():
            self._pins.clear()
            self._refusals.clear()
            self._memory.clear()
            if self._disk is not None:
                try:
                    self._disk.clear()
                except (*DISK_ERRORS, LoadError) as error:
                    self._disk_failed(error)
                    raise OSError(f"{self._disk.directory} was not cleared: {in_words(error)}") from error

    def close(self) -> None:
        """Give up memory and the directory, whose entries stay for the next store. A second call does nothing."""
        with self._lock:
            if not self._closed and self._disk is not None:
                self._disk.close()
            self._memory.clear()
            self._pins.clear()
            self._closed = True

    def __enter__(self) -> PromptStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Within.

    @contextmanager
    def _operating(self) -> Iterator[None]:
        """One operation at a time; what it uses is safe from its own evictions."""
        with self._lock:
            if self._closed:
                raise InputError("the store is closed; make a new one")
            if not self._sound:  # the operation before was interrupted, wherever that was
                self._memory.recount()
            self._memory.begin()
            self._sound = False
            yield
            self._sound = True

    def _on_disk(self, call: Callable[[], T], otherwise: T) -> T:
        """What ``call`` returns; ``otherwise``, and a count, where the disk does not do as it should."""
        try:
            return call()
        except DISK_ERRORS as error:
            self._disk_failed(error)
            return otherwise

    def _disk_failed(self, error: BaseException) -> None:
        self._counts.disk_errors += 1
        self._counts.last_disk_error = f"{type(error).__name__}: {in_words(error)}"

    def _standing(self, cache: Cache, text: array[int], space: Namespace, avoid: set[str], limit: int) -> Standing:
        path = self._memory.walk(space, text)
        self._memory.touch(path)
        if (disk := self._disk) is None:
            return find(cache, path, DiskPath(), {}, limit)
        on_disk = self._on_disk(lambda: disk.walk(space, text, avoid), DiskPath())
        marks: dict[int, Entry] = self._on_disk(lambda: disk.index.marks(on_disk), {})
        return find(cache, path, on_disk, {p: m for p, m in marks.items() if m.file not in avoid}, limit)

    def _built(self, cache: Cache, text: array[int], space: Namespace, limit: int) -> tuple[Standing, Evicted]:
        """Give ``cache`` the row of the longest beginning, at most ``limit``, that can be had; what cannot be read is
        left out. Also whether something that was stored further on has been evicted."""
        avoid: set[str] = set()
        while True:
            at = self._standing(cache, text, space, avoid, limit)
            evicted, from_disk = self._evicted(at, text, space, limit), at.from_disk
            if not at.position:
                return at, evicted
            try:
                Source(self._memory, self._disk, space, text).build(cache, at, self._merges(cache, at))
            except (Broken, Unreadable, sqlite3.Error) as error:
                if not isinstance(error, Broken):  # what is broken has been dropped
                    self._disk_failed(error)
                avoid |= _named(at, error)
                continue
            self._counts.disk_hits += from_disk
            if self._disk is not None and at.disk.steps:
                self._disk.use(at.disk, at.marks.get(at.position))
            return at, evicted

    def _merges(self, cache: Cache, at: Standing) -> bool:
        """Whether the row gets one run of its own: on a CPU always, elsewhere where the pieces are many."""
        if self._merge is not None:
            return self._merge
        return cache.storage.device.type == "cpu" or len(at.path.steps) + len(at.disk.steps) > MOST_SHARED

    def _insert(self, writer: Writer, described: dict[str, str]) -> Inserted:
        memory, length = self._memory, writer.row.length
        path = memory.walk(writer.namespace, writer.tokens)
        memory.touch(path)
        reasons, on_disk = [], False
        held = writer.into_memory(memory, path)
        if not held and (memory.max_bytes or self._disk is None):  # else memory was not asked for
            self._counts.refused += 1
            needed = writer.needed(path.length)
            reasons.append(
                f"in memory {needed} bytes are needed, and {memory.max_bytes} is the limit, with what is pinned"
            )
        if (disk := self._disk) is not None:
            nothing: tuple[set[int], set[int]] = (set(), set())
            why = disk.index.read_only
            if not why:
                pinned = self._on_disk(self._pinned_on_disk, nothing)
                on_disk = self._on_disk(lambda: writer.onto_disk(disk, described, pinned), False)
            if not on_disk:
                self._counts.refused_on_disk += 1
                closed = f"{disk.directory} was opened for reading only: {why}"
                reasons.append(closed if why else "on the disk there was no room, or it could not be written")
        reason = "; ".join(reasons)
        if reasons:
            self._counts.last_refusal = reason
            if not held and not on_disk:
                self._refusals[writer.namespace, length, _digest(writer.tokens)] = reason
                while len(self._refusals) > MOST_REFUSALS:
                    del self._refusals[next(iter(self._refusals))]
        return Inserted(length, length - path.length, held, on_disk, reason)

    def _pinned_on_disk(self) -> tuple[set[int], set[int]]:
        """The pieces and the checkpoints that pins keep."""
        disk, kept, marks = self._disk, set(), set()
        assert disk is not None
        for pin in self._pins:
            path = disk.walk(pin._namespace, pin._text)
            kept |= {entry.id for entry, _ in path.steps}
            marks |= {mark.id for _, mark in sorted(disk.index.marks(path).items())[-2:]}
        return kept, marks

    def _unpin(self, pin: Pin) -> None:
        with self._lock:
            if pin in self._pins:
                self._pins.remove(pin)
                self._memory.unpin(pin._pinned)

    # In words.

    def _explained(
        self, cache: Cache, text: array[int], space: Namespace, at: Standing, evicted: Evicted, others: str = ""
    ) -> str:
        for (whose, length, digest), reason in self._refusals.items():
            if whose == space and at.stored < length <= len(text) and _digest(text[:length]) == digest:
                others = f"a text of {length} tokens was refused: {reason}"
        differs, most = self._differs(at, text, space), cache.max_length
        return explained(len(text), at.stored, at.position, differs, evicted, others, most)

    def _differs(self, at: Standing, text: array[int], space: Namespace) -> bool:
        """Whether some stored text goes on where this one leaves it."""
        last, length, disk = at.path.last, at.path.length, self._disk
        if at.stored == len(text):
            return False
        if length == at.stored and (length < last.end or any(start == length for start, _ in last.children)):
            return True
        if disk is None or at.disk.length < at.stored:
            return False
        return self._on_disk(lambda: leaving.goes_on(disk.index, space, at.disk), False)

    def _evicted(self, at: Standing, text: array[int], space: Namespace, limit: int) -> Evicted:
        length, last, disk = at.path.length, at.path.last, self._disk
        tokens = length == at.stored < len(text) and (length, text[length]) in last.gone
        marks = [p for node, end in at.path.steps for p in node.gone_checkpoints if p <= end]
        if disk is not None:
            if at.disk.length == at.stored:
                tokens |= self._on_disk(lambda: leaving.was_evicted(disk.index, space, at.disk, text), False)
            marks += self._on_disk(lambda: leaving.evicted_marks(disk.index, at.disk), [])
        return Evicted(tokens, any(at.position < p <= limit for p in marks))

    def _elsewhere(self, text: array[int], space: Namespace, stored: int) -> str:
        """Under what else more of it is stored."""
        spaces = set(self._memory.roots)
        if (disk := self._disk) is not None:
            known: list[tuple[int, Namespace, dict[str, Any]]] = self._on_disk(disk.index.namespaces, [])
            spaces |= {n._replace(device=space.device) for _, n, _ in known}
        best: tuple[int, list[str]] = (stored, [])
        for other in spaces - {space}:
            length = self._memory.walk(other, text).length
            if disk is not None:
                length = max(length, self._on_disk(partial(disk.walk, other, text), DiskPath()).length)
            differs = [n for n, a, b in zip(Namespace._fields, other, space, strict=True) if a != b]
            if "identity" in differs:  # weights, and the variant of their rope
                same = other.identity.partition(" ")[0] == space.identity.partition(" ")[0]
                differs[differs.index("identity")] = "rope variant (by max_length)" if same else "model"
            if length > best[0]:
                best = (length, differs)
        return f"{best[0]} tokens of it are stored under another {' and '.join(best[1])}" if best[1] else ""


def _digest(tokens: array[int]) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()


def _named(at: Standing, error: Exception) -> set[str]:
    """The file that the error is about; all that ``at`` would read, where it names none."""
    names = {entry.file for entry, _ in at.disk.steps} | {mark.file for mark in at.marks.values()}
    return {name for name in names if name and name in str(error)} or {name for name in names if name}
