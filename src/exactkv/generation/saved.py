"""A conversation in a directory: its messages as JSON, which names the file of its cache.

The JSON is replaced in one step and names a cache file of its own, so the two always belong together.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exactkv.errors import InputError, LoadError

if TYPE_CHECKING:
    from exactkv.cache import Cache
    from exactkv.models.model import Model

NAME = "conversation.json"
FORMAT = 1


def write(directory: Path, content: dict[str, Any], cache: Cache) -> None:
    """Save ``content`` and ``cache``; what was saved there before is there until all is written."""
    if directory.exists() and not (directory.is_dir() and (not any(directory.iterdir()) or _is_ours(directory))):
        raise InputError(f"{directory} holds something else than a conversation; give a new name")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"cache-{secrets.token_hex(4)}.safetensors"
    cache.save(file)
    written = directory / f"{NAME}.{os.getpid()}.tmp"
    try:
        with written.open("w", encoding="utf-8") as out:
            json.dump({"format": FORMAT, **content, "cache": file.name}, out, ensure_ascii=False, indent=1)
            out.flush()
            os.fsync(out.fileno())
        written.replace(directory / NAME)
    except BaseException:
        written.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        raise
    for other in directory.glob("cache-*.safetensors"):
        if other != file:
            other.unlink(missing_ok=True)


def read(directory: Path) -> dict[str, Any]:
    """What ``write`` was given, with the name of the cache's file. Raises LoadError where it is not there or broken."""
    file = directory / NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{directory} holds no saved conversation: there is no {NAME} in it") from None
    except (OSError, ValueError) as error:
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
    return (directory / NAME).is_file()
