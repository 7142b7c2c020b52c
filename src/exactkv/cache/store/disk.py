"""The disk tier: a directory of safetensors files and an SQLite index of them, for several processes at once.

A file is complete before the index knows it, and the index forgets it before it is deleted. So a kill at any moment
leaves at most a file without an entry, which is removed when it is old, and an entry without a file is a miss.
"""

from __future__ import annotations

import sqlite3
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from exactkv.cache.store import files
from exactkv.cache.store.tree import Namespace, common
from exactkv.errors import InputError

INDEX = "index.sqlite"
BUSY_SECONDS = 30.0
OLD_SECONDS = 600.0
"""A file that no entry names is removed when it is that old: a younger one may be about to be entered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pieces (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL,
    parent INTEGER REFERENCES pieces(id) ON DELETE CASCADE, start INTEGER NOT NULL, tokens BLOB NOT NULL,
    file TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, used REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS places ON pieces (namespace, COALESCE(parent, 0), start, tokens);
CREATE INDEX IF NOT EXISTS parents ON pieces (parent);
CREATE TABLE IF NOT EXISTS checkpoints (
    id INTEGER PRIMARY KEY AUTOINCREMENT, piece INTEGER NOT NULL REFERENCES pieces(id) ON DELETE CASCADE,
    position INTEGER NOT NULL, file TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, used REAL NOT NULL,
    UNIQUE (piece, position));
"""
_SUBTREE = (
    "WITH RECURSIVE below(id) AS (SELECT ? UNION SELECT pieces.id FROM pieces JOIN below ON pieces.parent = below.id) "
)
_TOTAL = "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM pieces) + (SELECT COALESCE(SUM(bytes), 0) FROM checkpoints)"


class Entry(NamedTuple):
    """A file: of the piece [start, stop), or of a checkpoint at ``stop``."""

    id: int
    start: int
    stop: int
    file: str
    nbytes: int
    sha256: str
    piece: bool


@dataclass(frozen=True)
class DiskPath:
    """The longest stored prefix of a text: (piece, where the text leaves it), and how many tokens agree."""

    steps: tuple[tuple[Entry, int], ...]
    length: int


class DiskTier:
    """Not for several threads at once: the store's lock is around it."""

    def __init__(self, directory: str | Path, max_bytes: int | None = None, create: bool = True):
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.evictions = 0
        if create:
            self.directory.mkdir(parents=True, exist_ok=True)
        if not create and not (self.directory / INDEX).is_file():
            raise InputError(f"{self.directory} is no prompt store: it has no {INDEX}")
        try:
            self._db = sqlite3.connect(
                self.directory / INDEX, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._check_version()
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self.directory / INDEX} cannot be used as an index: {error}") from error

    def _check_version(self) -> None:
        with self._writing():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > files.VERSION:
                raise InputError(
                    f"{self.directory} was written by a newer exactkv: format {version}, this one knows {files.VERSION}"
                )
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {files.VERSION}")

    def tidy(self, old: float = OLD_SECONDS) -> None:
        """Remove old files without an entry, and entries without a file."""
        present = {f.name: f for f in self.directory.iterdir() if f.name.endswith((files.SUFFIX, files.UNFINISHED))}
        known = {entry.file: entry for entry in self.entries()}
        for entry in known.values():
            if entry.file not in present and not (self.directory / entry.file).exists():
                self.remove(entry)
        for name, file in present.items():
            try:
                if name not in known and time.time() - file.stat().st_mtime > old:
                    file.unlink(missing_ok=True)
            except OSError:
                continue  # another process was quicker

    # Looking up.

    def walk(self, namespace: Namespace, tokens: array[int]) -> DiskPath:
        """Follow ``tokens`` from the root as far as they are stored, comparing every one."""
        steps: list[tuple[Entry, int]] = []
        name, parent, at = key(namespace), None, 0
        while at < len(tokens):
            best: tuple[int, Entry] | None = None
            rows = self._db.execute(
                "SELECT id, start, tokens, file, bytes, sha256 FROM pieces "
                "WHERE namespace = ? AND parent IS ? AND start = ?", (name, parent, at),
            )  # fmt: skip
            for id_, start, blob, file, size, sha in rows:
                stored = array("q")
                stored.frombytes(blob)
                agreed = common(stored, tokens[at : at + len(stored)])
                if agreed > (best[0] if best else 0):
                    best = (agreed, Entry(id_, start, start + len(stored), file, size, sha, True))
            if best is None:
                break
            if steps:
                steps[-1] = (steps[-1][0], at)
            at += best[0]
            steps.append((best[1], at))
            parent = best[1].id
        return DiskPath(tuple(steps), at)

    def checkpoints(self, path: DiskPath) -> dict[int, Entry]:
        """Those on ``path``, by position."""
        found = {}
        for piece, end in path.steps:
            for entry in self._entries("checkpoints", "WHERE piece = ?", (piece.id,)):
                if piece.start < entry.stop <= end:
                    found[entry.stop] = entry
        return found

    def load(self, entry: Entry, namespace: Namespace, tokens: array[int]) -> dict[str, Tensor] | None:
        """The tensors of ``entry``, which is on the path of ``tokens``. None where its file is gone or broken; then
        the entry is dropped."""
        try:
            return files.read(self.directory / entry.file, entry.sha256, about(entry, namespace, tokens))
        except files.Broken:
            self.remove(entry)
            return None

    def touch(self, path: DiskPath, stood_on: Entry | None = None) -> None:
        """What was used, is used now; it may be lost in a crash. Also leaves before what they hang from."""
        now = time.time()
        try:
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._writing():
                for depth, (piece, _) in enumerate(path.steps):
                    self._db.execute("UPDATE pieces SET used = ? WHERE id = ?", (now - 1e-6 * depth, piece.id))
                if stood_on is not None:
                    self._db.execute("UPDATE checkpoints SET used = ? WHERE id = ?", (now, stood_on.id))
        except sqlite3.OperationalError:
            pass  # busy for long: no harm
        finally:
            self._db.execute("PRAGMA synchronous = FULL")

    # Storing.

    def put(
        self, namespace: Namespace, parent: int | None, entry_start: int, tokens: array[int], stop: int,
        tensors: Mapping[str, Tensor], piece: bool,
    ) -> int | None:  # fmt: skip
        """Write the piece ``tokens[entry_start:stop]`` that hangs from ``parent``, or a checkpoint at ``stop`` of the
        piece ``parent``. Returns its id; None where it does not fit or what it belongs to has gone meanwhile."""
        size = sum(t.nbytes for t in tensors.values())
        path = {p.id for p, _ in self.walk(namespace, tokens).steps}
        if not self._make_room(size, path):
            return None
        draft = Entry(0, entry_start, stop, "", 0, "", piece)
        file, size, sha = files.write(self.directory, tensors, about(draft, namespace, tokens))
        now, made = time.time(), None
        try:
            with self._writing():
                if piece:
                    cells = (key(namespace), parent, entry_start, tokens[entry_start:stop].tobytes())
                    done = self._db.execute(
                        "INSERT OR IGNORE INTO pieces (namespace, parent, start, tokens, file, bytes, sha256, used) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*cells, file, size, sha, now),
                    )  # fmt: skip
                    same = "SELECT id FROM pieces WHERE namespace = ? AND parent IS ? AND start = ? AND tokens = ?"
                    (id_,) = self._db.execute(same, cells).fetchone()
                else:
                    done = self._db.execute(
                        "INSERT OR IGNORE INTO checkpoints (piece, position, file, bytes, sha256, used) "
                        "VALUES (?, ?, ?, ?, ?, ?)", (parent, stop, file, size, sha, now),
                    )  # fmt: skip
                    same = "SELECT id FROM checkpoints WHERE piece = ? AND position = ?"
                    (id_,) = self._db.execute(same, (parent, stop)).fetchone()
                made = id_ if done.rowcount else None
        except sqlite3.IntegrityError:  # the piece that it belongs to was deleted meanwhile
            (self.directory / file).unlink(missing_ok=True)
            return None
        if made is None:  # another process was quicker
            (self.directory / file).unlink(missing_ok=True)
        elif not self._make_room(0, {*path, id_} if piece else path):
            self.remove(Entry(id_, entry_start, stop, file, size, sha, piece))
            return None
        return int(id_)

    def _make_room(self, nbytes: int, keep: Iterable[int]) -> bool:
        """Delete what was used longest ago until so much more fits: leaves with their checkpoints, and checkpoints."""
        if self.max_bytes is None:
            return True
        keep = set(keep)
        while True:
            removed: list[str] = []
            with self._writing():
                (total,) = self._db.execute(_TOTAL).fetchone()
                if total + nbytes <= self.max_bytes:
                    return True
                leaf = self._db.execute(
                    "SELECT used, id FROM pieces WHERE id NOT IN (SELECT parent FROM pieces WHERE parent IS NOT NULL) "
                    f"AND id NOT IN ({','.join(map(str, keep)) or 'NULL'}) ORDER BY used LIMIT 1"
                ).fetchone() if keep else self._db.execute(
                    "SELECT used, id FROM pieces WHERE id NOT IN (SELECT parent FROM pieces WHERE parent IS NOT NULL) "
                    "ORDER BY used LIMIT 1"
                ).fetchone()  # fmt: skip
                oldest = self._db.execute(
                    "SELECT used, id FROM checkpoints WHERE used < ? ORDER BY used LIMIT 1",
                    (leaf[0] if leaf else time.time() - 1.0,),
                ).fetchone()
                if oldest is not None:
                    removed = self._delete("checkpoints", oldest[1])
                elif leaf is not None:
                    removed = self._delete("pieces", leaf[1])
            if not removed:
                return False
            self.evictions += 1
            self._unlink(removed)

    # What there is.

    def entries(self) -> list[Entry]:
        return [*self._entries("pieces"), *self._entries("checkpoints")]

    def total(self) -> int:
        """Bytes of all files that have an entry."""
        (total,) = self._db.execute(_TOTAL).fetchone()
        return int(total)

    def rows(self) -> list[dict[str, Any]]:
        """Every piece with its checkpoints, as plain data."""
        found = []
        for id_, name, parent, start, blob, file, size, sha, used in self._db.execute(
            "SELECT id, namespace, parent, start, tokens, file, bytes, sha256, used FROM pieces ORDER BY id"
        ).fetchall():
            marks = self._entries("checkpoints", "WHERE piece = ?", (id_,))
            tokens = array("q")
            tokens.frombytes(blob)
            found.append({
                "id": id_, "parent": parent, **dict(zip(Namespace._fields, _names(name), strict=True)), "start": start,
                "stop": start + len(tokens), "tokens": tokens.tolist(), "file": file, "bytes": size, "sha256": sha,
                "used": used, "checkpoints": [{"position": c.stop, "file": c.file, "bytes": c.nbytes} for c in marks],
            })  # fmt: skip
        return found

    def namespaces(self) -> set[Namespace]:
        return {Namespace(*_names(name)) for (name,) in self._db.execute("SELECT DISTINCT namespace FROM pieces")}

    def remove(self, entry: Entry) -> None:
        """Delete an entry and what hangs from it, if it is still that file."""
        table = "pieces" if entry.piece else "checkpoints"
        with self._writing():
            same = self._db.execute(f"SELECT 1 FROM {table} WHERE id = ? AND file = ?", (entry.id, entry.file))
            removed = self._delete(table, entry.id) if same.fetchone() else []
        self._unlink(removed)

    def clear(self) -> None:
        with self._writing():
            removed = [entry.file for entry in self.entries()]
            self._db.execute("DELETE FROM pieces")
        self._unlink(removed)

    def close(self) -> None:
        self._db.close()

    # Within.

    def _entries(self, table: str, where: str = "", given: tuple[Any, ...] = ()) -> list[Entry]:
        if table == "pieces":
            columns, piece = "id, start, start + LENGTH(tokens) / 8, file, bytes, sha256", True
        else:
            columns, piece = "id, 0, position, file, bytes, sha256", False
        rows = self._db.execute(f"SELECT {columns} FROM {table} {where}", given)
        return [Entry(id_, start, stop, file, size, sha, piece) for id_, start, stop, file, size, sha in rows]

    def _delete(self, table: str, id_: int) -> list[str]:
        """Within a transaction. Returns the files, to be deleted after it."""
        if table == "checkpoints":
            found = self._db.execute("SELECT file FROM checkpoints WHERE id = ?", (id_,)).fetchall()
            self._db.execute("DELETE FROM checkpoints WHERE id = ?", (id_,))
        else:
            found = self._db.execute(
                _SUBTREE + "SELECT file FROM pieces WHERE id IN below "
                "UNION ALL SELECT file FROM checkpoints WHERE piece IN below", (id_,),
            ).fetchall()  # fmt: skip
            self._db.execute("DELETE FROM pieces WHERE id = ?", (id_,))
        return [file for (file,) in found]

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def key(namespace: Namespace) -> str:
    return "\x1f".join(namespace)


def _names(name: str) -> list[str]:
    return name.split("\x1f", len(Namespace._fields) - 1)


def about(entry: Entry, namespace: Namespace, tokens: array[int]) -> dict[str, Any]:
    """What the file of ``entry`` says of itself: whose it is, and by a hash of which tokens."""
    low = {"start": entry.start} if entry.piece else {}
    kind = "piece" if entry.piece else "checkpoint"
    return {"kind": kind, **namespace._asdict(), **low, "stop": entry.stop, "text": files.digest(tokens[: entry.stop])}
