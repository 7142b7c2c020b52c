"""A store's directory looked at from outside, by people: what is in it, whether it is whole. Nothing is changed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exactkv.cache.store import files
from exactkv.cache.store.disk import DiskTier, about
from exactkv.cache.store.files import Broken, Unreadable
from exactkv.cache.store.index import NAME, TOKEN_BYTES, Entry
from exactkv.cache.store.rows import unpacked
from exactkv.cache.store.tree import Namespace
from exactkv.cache.store.trouble import is_damage, told
from exactkv.errors import LoadError


def is_store(path: Path) -> bool:
    """Whether that is the directory of a prompt store."""
    return (path / NAME).is_file()


def describe_store(directory: Path) -> dict[str, Any]:
    """What is in a store's directory: "directory", "bytes" (of its files and token ids), "index_bytes", "pieces",
    "checkpoints"; "spaces", what never meets, with "model", "family", "dtype", "storage", "salt" (the beginning of a
    hash, "" for none); "texts", of each: "id", "space", "tokens", "bytes" (shared ones too), "own_bytes" (of its last
    piece), "checkpoints" (positions), "used" (seconds since 1970).
    Raises InputError where it is no store, LoadError where its index cannot be read."""
    with told(directory):
        return _described(directory)


def _described(directory: Path) -> dict[str, Any]:
    disk = DiskTier(directory, create=False)
    try:
        pieces = {piece["id"]: piece for piece in disk.index.pieces()}
        spaces = disk.index.namespaces()
        total = disk.index.total()
    finally:
        disk.close()
    extended = {(piece["parent"], piece["start"]) for piece in pieces.values()}
    return {
        "directory": str(directory),
        "bytes": total,
        "index_bytes": sum(f.stat().st_size for f in directory.glob(NAME + "*")),
        "pieces": len(pieces),
        "checkpoints": sum(len(p["marks"]) for p in pieces.values()),
        "spaces": [
            {
                "id": id_, "model": model.get("name", ""), "family": model.get("family", ""), "dtype": space.dtype,
                "storage": space.storage, "identity": space.identity[:12], "salt": space.salt[:12],
            }
            for id_, space, model in spaces
        ],
        "texts": [_text(piece, pieces) for piece in pieces.values() if (piece["id"], piece["stop"]) not in extended],
    }  # fmt: skip


def _text(piece: dict[str, Any], pieces: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A text is a piece that no other goes on from at its end, and what it hangs from."""
    path, until = [], piece["stop"]
    at: dict[str, Any] | None = piece
    while at is not None:
        path.append((at, until))
        until, at = at["start"], pieces.get(at["parent"])
    marks = [mark for on, end in reversed(path) for mark in on["marks"] if mark["position"] <= end]
    bytes_of = [p["bytes"] + TOKEN_BYTES * (p["stop"] - p["start"]) for p, _ in path]
    return {
        "id": piece["id"], "space": piece["space"], "tokens": piece["stop"],
        "bytes": sum(bytes_of) + sum(m["bytes"] for m in marks),
        "own_bytes": bytes_of[0] + sum(m["bytes"] for m in piece["marks"]),
        "checkpoints": [m["position"] for m in marks], "used": piece["used"],
    }  # fmt: skip


def verify_store(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Read every file of a store and compare every checksum: "files" and "bytes" read; "broken" and "unreadable", of
    each "file", "tokens" (of the text that it belongs to) and "what"; "unknown": files that no entry names.
    ``progress``: called with files done and all. Raises as ``describe_store`` does."""
    found: dict[str, Any] = {"directory": str(directory), "files": 0, "bytes": 0, "broken": [], "unreadable": []}
    found["unknown"] = []
    try:
        with told(directory):
            disk = DiskTier(directory, create=False)
            try:
                if wrong := disk.index.check():
                    found["broken"].append({"file": NAME, "tokens": 0, "what": f"{NAME} is damaged: {wrong}"})
                else:
                    _read_all(disk, found, progress)
            finally:
                disk.close()
    except LoadError as error:
        if not is_damage(error.__cause__):
            raise
        found["broken"].append({"file": NAME, "tokens": 0, "what": str(error)})
    return found


def _read_all(disk: DiskTier, found: dict[str, Any], progress: Callable[[int, int], None]) -> None:
    wanted = list(_contents(disk))
    for number, (file, content, tokens) in enumerate(wanted):
        progress(number, len(wanted))
        try:
            files.read(disk.directory / file, content)
            found["bytes"] += (disk.directory / file).stat().st_size
        except Broken as error:
            if file in disk.index.known():  # else another process has evicted it meanwhile
                found["broken"].append({"file": file, "tokens": tokens, "what": str(error)})
        except (Unreadable, OSError) as error:
            found["unreadable"].append({"file": file, "tokens": tokens, "what": str(error)})
        found["files"] += 1
    progress(len(wanted), len(wanted))
    present = {path.name for path in disk.directory.glob(f"*{files.SUFFIX}")}
    found["unknown"] = sorted(present - disk.index.known())


def _contents(disk: DiskTier) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Each file, what it must say of itself, and the length of its text."""
    spaces: dict[int, Namespace] = {id_: space for id_, space, _ in disk.index.namespaces()}
    texts: dict[int, array[int]] = {0: unpacked(b"")}
    for piece in disk.index.pieces():  # parents come first
        own = unpacked(piece["tokens"])
        text = texts[piece["id"]] = texts.get(piece["parent"], unpacked(b""))[: piece["start"]] + own
        space = spaces[piece["space"]]
        if piece["file"]:
            entry = Entry(piece["id"], piece["start"], piece["stop"], piece["file"], True)
            yield piece["file"], about(entry, space, text), piece["stop"]
        for mark in piece["marks"]:
            entry = Entry(0, mark["position"], mark["position"], mark["file"], False)
            yield mark["file"], about(entry, space, text), mark["position"]
