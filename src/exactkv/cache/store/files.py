"""The files of the disk tier: one piece or checkpoint each, with its identity and its checksums inside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from exactkv.cache import container
from exactkv.errors import ExactKVError, LoadError

KIND = "exactkv prompt store"
SUFFIX = ".safetensors"
OURS = re.compile(r"[0-9a-f]{32}\.safetensors")
UNFINISHED = re.compile(r"\.([0-9a-f]{32}\.safetensors)\.\d+\.[0-9a-f]+\.tmp")

Tensors = Mapping[str, Tensor | list[Tensor]]
"""By name; a list stands for its tensors joined along axis 1."""


class Broken(ExactKVError):
    """A file is missing, truncated, altered or about another text: it will never be of use."""


class Unreadable(ExactKVError):
    """A file cannot be read now (too many open files, no permission): it may be later."""


def size(content: Mapping[str, Any], tensors: Tensors) -> int:
    """Bytes of the file that ``write`` would make."""
    return container.size(content, tensors, KIND)


def write(path: Path, content: Mapping[str, Any], tensors: Tensors) -> None:
    """A file that has its name only when all of it is on the disk. Raises OSError where it cannot be written."""
    container.write(path, content, tensors, KIND)


def read(path: Path, content: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, every checksum compared, and what it says of itself with ``content``.
    Raises Broken or Unreadable."""
    try:
        with path.open("rb") as file:
            header = container.Header(path, file, KIND)
            for key, expected in (content or {}).items():
                if header.content.get(key) != expected:
                    raise Broken(f"{path.name} has the {key} {header.content.get(key)!r}; the index says {expected!r}")
            return dict(header.tensors(file))
    except FileNotFoundError:
        raise Broken(f"{path.name} is missing") from None
    except LoadError as error:
        raise Broken(str(error).replace(str(path), path.name).partition(". ")[0]) from error
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {error.strerror or error}") from error


def is_named_as_ours(name: str) -> bool:
    return OURS.fullmatch(name) is not None


def left_behind(path: Path) -> str:
    """The name of the store's file that ``path`` is, or was to become; "" where it is none of a store: its name is
    not of that form, or it is a safetensors file that says it is something else."""
    if unfinished := UNFINISHED.fullmatch(path.name):
        return unfinished[1]
    if not is_named_as_ours(path.name):
        return ""
    try:
        with path.open("rb") as file:
            container.Header(path, file, KIND)
    except container.NoneOfOurs as error:
        return "" if error.kind is not None else path.name
    except LoadError:
        pass
    return path.name


def unfinished(directory: Path) -> dict[str, list[Path]]:
    """What writes that were killed left behind, by the name that each was to have."""
    found: dict[str, list[Path]] = {}
    for path in directory.iterdir():
        if match := UNFINISHED.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    return found


def remove(directory: Path, name: str, left: Mapping[str, list[Path]]) -> None:
    """Delete a file, and what of ``unfinished`` was to become it. Raises OSError where that fails."""
    if not is_named_as_ours(name):  # the index was tampered with
        return
    (directory / name).unlink(missing_ok=True)
    for path in left.get(name, ()):
        path.unlink(missing_ok=True)
