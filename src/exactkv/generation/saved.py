"""A conversation in a directory: its messages as JSON, which names the file of its cache.

The JSON is replaced in one step and names a cache file of its own, so the two always belong together.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exactkv.cache.store.rows import alive
from exactkv.errors import InputError, LoadError

if TYPE_CHECKING:
    from exactkv.cache import Cache
    from exactkv.models.model import Model

NAME = "conversation.json"
FORMAT = 1
OURS = re.compile(r"cache-(?P<pid>\d{1,9})-[0-9a-f]{16}\.safetensors")
UNFINISHED = re.compile(
    rf"(?:\.cache-\d+-[0-9a-f]{{16}}\.safetensors|{re.escape(NAME)})\.(?P<pid>\d{{1,9}})(?:\.[0-9a-f]+)?\.tmp"
)
OLD_SECONDS = 600.0
"""A file that has not been written to for so long has been given up, also where its process cannot be asked."""


def write(directory: Path, content: dict[str, Any], cache: Cache) -> None:
    """Save ``content`` and ``cache``; what was saved there before is there until all is written. Raises InputError
    where the directory holds something else. Files of other names stay."""
    if directory.exists() and not (directory.is_dir() and _is_ours(directory)):
        raise InputError(f"{directory} holds something else than a conversation; give a new name")
    directory.mkdir(parents=True, exist_ok=True)
    _clear(directory)
    file = directory / f"cache-{os.getpid()}-{secrets.token_hex(8)}.safetensors"
    cache.save(file)
    written = directory / f"{NAME}.{os.getpid()}.tmp"
    try:
        with written.open("w", encoding="utf-8") as out:
            json.dump({"format": FORMAT, **content, "cache": file.name}, out, ensure_ascii=False, indent=1)
            out.flush()
            os.fsync(out.fileno())
        before = _named(directory)
        written.replace(directory / NAME)
    except BaseException:
        written.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        raise
    if before is not None and OURS.fullmatch(before):
        (directory / before).unlink(missing_ok=True)


def _clear(directory: Path) -> None:
    """Delete what saves left behind that were killed: of this process, of those that have ended, and what has not
    grown for long."""
    named = _named(directory)
    for path in directory.iterdir():
        match = OURS.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)
        if match is None or path.name == named:
            continue
        pid = int(match["pid"])
        with contextlib.suppress(FileNotFoundError):
            if pid == os.getpid() or not alive(pid) or time.time() - path.stat().st_mtime > OLD_SECONDS:
                path.unlink()


def _named(directory: Path) -> str | None:
    """The cache file that the conversation there names; None where there is none."""
    try:
        name = read(directory).get("cache")
    except LoadError:
        return None
    return name if isinstance(name, str) else None


def read(directory: Path) -> dict[str, Any]:
    """What ``write`` was given, with the name of the cache's file. Raises LoadError where it is not there or broken."""
    file = directory / NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{directory} holds no saved conversation: there is no {NAME} in it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        what = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise LoadError(
            f"{file} has the format {what!r}, this version reads {FORMAT}; save it again, or update exactkv"
        )
    return content


def read_cache(directory: Path, content: dict[str, Any], model: Model) -> tuple[Cache | None, str | None]:
    """The cache that ``content`` names, or None and why not."""
    from exactkv.cache import load_cache

    name = content.get("cache")
    if not isinstance(name, str) or Path(name).name != name:
        return None, f"{directory / NAME} names no cache file"
    try:
        cache = load_cache(directory / name, model)
    except LoadError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{directory / name}: {error.strerror or error}"
    if cache.batch_size != 1:
        return None, f"{directory / name} holds {cache.batch_size} rows; a conversation has one"
    return cache, None


def _is_ours(directory: Path) -> bool:
    """Whether it holds a conversation, or nothing, or what saves that were killed left behind."""
    if (directory / NAME).exists():
        return _named(directory) is not None
    return all(OURS.fullmatch(path.name) or UNFINISHED.fullmatch(path.name) for path in directory.iterdir())
