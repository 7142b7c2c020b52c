"""The index of the disk tier: what is where, in SQLite, for several processes at once. It touches no file but its own.

Every file has a row in ``files`` before it is made and until it is deleted: so the sum of those rows is never less than
what lies on the disk, whoever is killed when.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from exactkv.cache.store import gone
from exactkv.cache.store.rows import alive, check_name, check_plain, reading, unpacked
from exactkv.cache.store.tree import Namespace, common
from exactkv.cache.store.trouble import ReadOnly, in_words
from exactkv.errors import LoadError

NAME = "index.sqlite"
VERSION = 2
BUSY_SECONDS = 30.0
OLD_SECONDS = 600.0
"""A file that is still being written after so long was given up, also where its process cannot be asked."""
TOKEN_BYTES = 8

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spaces (
    id INTEGER PRIMARY KEY, identity TEXT NOT NULL, storage TEXT NOT NULL, dtype TEXT NOT NULL, salt TEXT NOT NULL,
    model TEXT NOT NULL, UNIQUE (identity, storage, dtype, salt));
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, state TEXT NOT NULL, owner TEXT NOT NULL, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS pieces (
    id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL, parent INTEGER NOT NULL, start INTEGER NOT NULL,
    first INTEGER NOT NULL, stop INTEGER NOT NULL, tokens BLOB NOT NULL, file TEXT NOT NULL, used REAL NOT NULL,
    UNIQUE (space, parent, start, first));
CREATE INDEX IF NOT EXISTS parents ON pieces (parent, start);
CREATE INDEX IF NOT EXISTS pieces_used ON pieces (used);
CREATE INDEX IF NOT EXISTS spans ON pieces (start, stop);
CREATE TABLE IF NOT EXISTS marks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, piece INTEGER NOT NULL, position INTEGER NOT NULL, file TEXT NOT NULL,
    used REAL NOT NULL, UNIQUE (piece, position));
CREATE INDEX IF NOT EXISTS marks_used ON marks (used);
"""
_BELOW = "WITH RECURSIVE b(id) AS (SELECT ? UNION SELECT p.id FROM pieces p JOIN b ON p.parent = b.id) "


class Entry(NamedTuple):
    """A piece [start, stop), or a checkpoint at ``stop``. ``file``: "" for a piece that is nothing but tokens."""

    id: int
    start: int
    stop: int
    file: str
    piece: bool


class DiskPath(NamedTuple):
    """The longest stored prefix of a text: (piece, where the text leaves it), and how many tokens agree."""

    steps: tuple[tuple[Entry, int], ...] = ()
    length: int = 0


class Index:
    """``read_only``: why nothing can be written, "" if it can. Not for several threads at once: the store's lock is
    around it. Raises sqlite3.Error where SQLite does, or where rows hold what was never written there."""

    def __init__(self, path: Path):
        self.owner, self.path, self.read_only = f"{platform.node()}:{os.getpid()}", path, ""
        self.open()

    def open(self) -> None:
        """For writing, or else for reading. Raises LoadError where neither can be."""
        path, self.read_only = self.path, ""
        try:
            if path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
                raise ReadOnly("no permission to write there")
            try:
                self._open(path)
            except sqlite3.OperationalError as error:
                self._db.close()
                if not path.exists() or not path.stat().st_size or "locked" in str(error):
                    raise
                raise ReadOnly(in_words(error)) from error
        except ReadOnly as error:
            self._open_for_reading(path, str(error))
        except (sqlite3.Error, OSError) as error:
            raise LoadError(f"{path} cannot be used as an index: {in_words(error)}") from error

    def _open(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._patiently("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the newest entries, no more
        self._db.execute("PRAGMA journal_size_limit = 1000000")
        self._make(path)

    def _open_for_reading(self, path: Path, reason: str) -> None:
        """Where SQLite cannot have its two files beside a WAL index either, that is read as it lies there."""
        failed: sqlite3.Error | None = None
        for how in ("mode=ro", "mode=ro&immutable=1"):
            try:
                uri = f"{path.absolute().as_uri()}?{how}"
                self._db = sqlite3.connect(
                    uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                self._db.execute("SELECT COUNT(*) FROM pieces").fetchone()
                self.read_only = reason
                self._make(path)
                return
            except sqlite3.Error as error:
                failed = error
                self._db.close()
        raise LoadError(f"{path} cannot be read: {reason}; {in_words(failed)}") from failed

    def copy(self) -> Index:
        """The same in memory, to try things on."""
        made = Index.__new__(Index)
        made.owner, made.path, made.read_only = self.owner, self.path, ""
        made._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.backup(made._db)
        return made

    def _make(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise LoadError(f"{path} has the format {version}, this version of exactkv reads {VERSION}; update exactkv")
        if version < VERSION and self.read_only:
            raise LoadError(f"{path} has the older format {version}; open it once where it can be written to")
        if version < VERSION:
            with self.writing():
                for statement in (*_SCHEMA.split(";"), gone.SCHEMA):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _patiently(self, statement: str) -> None:
        """Where two processes open at once, SQLite does not wait for a change of mode by itself."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._db.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all of it happens or nothing."""
        if self.read_only:
            raise ReadOnly(self.read_only)
        self._db.rollback()  # what an interrupt may have left, in this very line of the call before
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        finally:
            self._db.rollback()

    @property
    def db(self) -> sqlite3.Connection:
        """For what looks at rows of its own kind."""
        return self._db

    def close(self) -> None:
        self._db.close()

    # Looking up.

    @reading
    def walk(self, space: int | None, tokens: array[int]) -> DiskPath:
        """Follow ``tokens`` from the root as far as they are stored, comparing every one."""
        steps: list[tuple[Entry, int]] = []
        parent, at = 0, 0
        while space is not None and at < len(tokens):
            row = self._db.execute(
                "SELECT id, stop, tokens, file FROM pieces WHERE space = ? AND parent = ? AND start = ? AND first = ?",
                (space, parent, at, tokens[at]),
            ).fetchone()
            if row is None:
                break
            id_, stop, blob, file = row
            own = unpacked(blob)
            agreed = common(own, tokens[at : at + len(own)])
            if not agreed:
                break
            if stop != at + len(own):
                raise ValueError(f"a piece from {at} to {stop} has {len(own)} tokens")
            check_name(file)
            if steps:
                steps[-1] = (steps[-1][0], at)
            steps.append((Entry(id_, at, stop, file, True), at + agreed))
            parent, at = id_, at + agreed
        return DiskPath(tuple(steps), at)

    @reading
    def marks(self, path: DiskPath) -> dict[int, Entry]:
        """The checkpoints of this text, by position; none of a text that branched off before."""
        found: dict[int, Entry] = {}
        for piece, end in path.steps:
            rows = self._db.execute("SELECT id, position, file FROM marks WHERE piece = ?", (piece.id,))
            for id_, at, file in rows:
                if piece.start < at <= end:
                    check_name(file)
                    found[at] = Entry(id_, at, at, file, False)
        return found

    @reading
    def tokens(self, entry: Entry) -> array[int] | None:
        """All tokens of a piece; None where it has gone."""
        row = self._db.execute("SELECT tokens FROM pieces WHERE id = ?", (entry.id,)).fetchone()
        return unpacked(row[0]) if row is not None else None

    @reading
    def space(self, namespace: Namespace, described: Mapping[str, str] | None = None) -> int | None:
        """The number of a namespace; given what it is called for people, it is made where it is new."""
        cells = (namespace.identity, namespace.storage, namespace.dtype, namespace.salt)
        same = "SELECT id FROM spaces WHERE identity = ? AND storage = ? AND dtype = ? AND salt = ?"
        row = self._db.execute(same, cells).fetchone()
        if row is None and described is not None:
            with self.writing():
                self._db.execute(
                    "INSERT OR IGNORE INTO spaces (identity, storage, dtype, salt, model) VALUES (?, ?, ?, ?, ?)",
                    (*cells, json.dumps(dict(described))),
                )
                row = self._db.execute(same, cells).fetchone()
        return int(row[0]) if row is not None else None

    @reading
    def namespaces(self) -> list[tuple[int, Namespace, dict[str, Any]]]:
        """Number, namespace (its device left open) and model of each."""
        rows = self._db.execute("SELECT id, identity, storage, dtype, salt, model FROM spaces ORDER BY id").fetchall()
        made = [(r[0], Namespace(r[1], r[2], r[3], "", r[4]), json.loads(r[5])) for r in rows]
        for _, namespace, model in made:
            if not all(isinstance(text, str) for text in (*namespace, *model.keys(), *model.values())):
                raise ValueError(f"{namespace} of {model} is no namespace")
        return made

    @reading
    def pieces(self) -> list[dict[str, Any]]:
        """Every piece as plain data, parents first: its columns, its file's "bytes", its "marks"."""
        marks: dict[int, list[dict[str, Any]]] = {}
        for piece, at, file, size, used in self._db.execute(
            "SELECT piece, position, file, COALESCE(bytes, 0), used FROM marks LEFT JOIN files ON file = name "
            "ORDER BY position"
        ):
            marks.setdefault(piece, []).append({"position": at, "file": file, "bytes": size, "used": used})
        names = ("id", "space", "parent", "start", "stop", "tokens", "file", "bytes", "used")
        rows = self._db.execute(
            "SELECT id, space, parent, start, stop, tokens, file, COALESCE(bytes, 0), used FROM pieces "
            "LEFT JOIN files ON file = name ORDER BY id"
        )
        found = [{**dict(zip(names, row, strict=True)), "marks": marks.get(row[0], [])} for row in rows]
        spaces, earlier = {number for number, _, _ in self.namespaces()}, {0}
        for piece in found:
            if piece["parent"] not in earlier or piece["space"] not in spaces:
                raise ValueError(f"the piece {piece['id']} hangs from none, or is no one's")
            if len(unpacked(piece["tokens"])) != piece["stop"] - piece["start"]:
                raise ValueError(f"the piece {piece['id']} has other tokens than its length says")
            for entry in (piece, *piece["marks"]):
                check_plain(entry)
            earlier.add(piece["id"])
        return found

    @reading
    def counts(self) -> tuple[int, int]:
        """How many pieces and checkpoints there are."""
        (pieces,) = self._db.execute("SELECT COUNT(*) FROM pieces").fetchone()
        (marks,) = self._db.execute("SELECT COUNT(*) FROM marks").fetchone()
        return int(pieces), int(marks)

    # Bytes.

    @reading
    def total(self) -> int:
        """Bytes of all files, being written and being deleted among them, and of the token ids."""
        (files,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()
        (tokens,) = self._db.execute("SELECT COALESCE(SUM(stop - start), 0) FROM pieces").fetchone()
        return int(files) + TOKEN_BYTES * int(tokens)

    def reserve(self, name: str, nbytes: int) -> None:
        """Within a transaction: a file of that name is about to be written."""
        cells = (name, nbytes, "writing", self.owner, time.time())
        self._db.execute("INSERT INTO files (name, bytes, state, owner, since) VALUES (?, ?, ?, ?, ?)", cells)

    @reading
    def going_bytes(self) -> int:
        """Bytes of files that are no longer served and wait to be deleted; part of ``total``."""
        (going,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE state = 'going'").fetchone()
        return int(going)

    @reading
    def holds(self, entry: Entry) -> bool:
        """Whether an entry is there still."""
        table = "pieces" if entry.piece else "marks"
        return self._db.execute(f"SELECT 1 FROM {table} WHERE id = ?", (entry.id,)).fetchone() is not None

    def forget(self, entry: Entry, remember: bool = False) -> int | None:
        """Within a transaction: an entry and what hangs from it; its files are marked as going. ``remember``: where it
        was, for explanations. Returns the bytes that it had; None where it is not there."""
        if not entry.piece:
            row = self._db.execute("SELECT piece, position FROM marks WHERE id = ?", (entry.id,)).fetchone()
            if row is None:
                return None
            freed = self._go("SELECT file FROM marks WHERE id = ?", entry.id)
            self._db.execute("DELETE FROM marks WHERE id = ?", (entry.id,))
            if remember:
                gone.remember(self._db, row[0], row[1], gone.MARK)
            return freed
        row = self._db.execute("SELECT space, parent, start, first FROM pieces WHERE id = ?", (entry.id,)).fetchone()
        if row is None:
            return None
        freed = self._go(
            _BELOW + "SELECT file FROM pieces WHERE id IN b UNION SELECT file FROM marks WHERE piece IN b", entry.id
        )
        (ids,) = self._db.execute(_BELOW + "SELECT SUM(stop - start) FROM pieces WHERE id IN b", (entry.id,)).fetchone()
        self._db.execute(_BELOW + "DELETE FROM marks WHERE piece IN b", (entry.id,))
        before = self._db.total_changes
        self._db.execute(_BELOW + "DELETE FROM pieces WHERE id IN b", (entry.id,))
        if self._db.total_changes == before:
            return None
        if remember:
            gone.remember(self._db, row[1] or -row[0], row[2], row[3])
        return freed + TOKEN_BYTES * int(ids)

    def _go(self, chosen: str, id_: int) -> int:
        """Mark files as going; their bytes."""
        names = self._db.execute(chosen, (id_,)).fetchall()
        freed = 0
        for name in names:
            for (size,) in self._db.execute("SELECT bytes FROM files WHERE name = ? AND state != 'going'", name):
                freed += int(size)
        self._db.executemany("UPDATE files SET state = 'going' WHERE name = ?", names)
        return freed

    def given_up(self, name: str) -> None:
        """Within a transaction: a file that was reserved is not kept after all."""
        self._db.execute("UPDATE files SET state = 'going' WHERE name = ?", (name,))

    @reading
    def abandon(self) -> None:
        """Within a transaction: files whose writer has died, or is at it for too long, are going."""
        host = platform.node()
        rows = self._db.execute("SELECT name, owner, since FROM files WHERE state = 'writing'").fetchall()
        for name, owner, since in rows:
            node, _, pid = owner.rpartition(":")
            if time.time() - since > OLD_SECONDS or (node == host and not alive(int(pid))):
                self.given_up(name)

    @reading
    def going(self) -> list[str]:
        """Files to be deleted; then ``deleted``."""
        return [name for (name,) in self._db.execute("SELECT name FROM files WHERE state = 'going'")]

    def deleted(self, names: Iterable[str]) -> None:
        """Within a transaction: those files are deleted."""
        self._db.executemany("DELETE FROM files WHERE name = ? AND state = 'going'", [(n,) for n in names])

    def check(self) -> str:
        """What is wrong with the index itself, "" if nothing."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        return "" if found == "ok" else str(found)

    @reading
    def known(self) -> set[str]:
        return {name for (name,) in self._db.execute("SELECT name FROM files")}

    # Storing.

    def enter_piece(
        self, space: int, parent: int, start: int, tokens: array[int], file: str, nbytes: int
    ) -> int | None:
        """Within a transaction: the piece of these tokens, its reserved file written (0 bytes: it has none). None
        where the file was given up meanwhile, what it hangs from has gone, or another process has stored it."""
        if parent and self._db.execute("SELECT 1 FROM pieces WHERE id = ?", (parent,)).fetchone() is None:
            return None
        if not self._keep(file, nbytes):
            return None
        cells = (space, parent, start, tokens[0], start + len(tokens), tokens.tobytes(), file if nbytes else "")
        done = self._db.execute(
            "INSERT OR IGNORE INTO pieces (space, parent, start, first, stop, tokens, file, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*cells, time.time()),
        )  # fmt: skip
        if done.rowcount:
            gone.forget(self._db, parent or -space, start, tokens[0])
        return int(done.lastrowid or 0) if done.rowcount else None

    def enter_mark(self, piece: int, position: int, file: str, nbytes: int) -> int | None:
        """Within a transaction: a checkpoint, its reserved file written; None as above."""
        if self._db.execute("SELECT 1 FROM pieces WHERE id = ?", (piece,)).fetchone() is None:
            return None
        if not self._keep(file, nbytes):
            return None
        done = self._db.execute(
            "INSERT OR IGNORE INTO marks (piece, position, file, used) VALUES (?, ?, ?, ?)",
            (piece, position, file, time.time()),
        )
        if done.rowcount:
            gone.forget(self._db, piece, position, gone.MARK)
        return int(done.lastrowid or 0) if done.rowcount else None

    def _keep(self, file: str, nbytes: int) -> bool:
        if not nbytes:
            sql, cells = "DELETE FROM files WHERE name = ? AND state = 'writing'", (file,)
            return self._db.execute(sql, cells).rowcount == 1
        sql = "UPDATE files SET state = 'kept', bytes = ? WHERE name = ? AND state = 'writing'"
        return self._db.execute(sql, (nbytes, file)).rowcount == 1

    def touch(self, used: Mapping[tuple[bool, int], float]) -> None:
        """Within a transaction: when entries were used, by (whether a piece, id)."""
        for (piece, id_), at in used.items():
            self._db.execute(f"UPDATE {'pieces' if piece else 'marks'} SET used = ? WHERE id = ?", (at, id_))
