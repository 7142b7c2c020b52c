"""A safetensors file with checksums: of every tensor's bytes, and of the header, which holds them.

Written whole or not at all: under a temporary name in the same directory, flushed to the disk, then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from exactkv.errors import InputError, LoadError

KIND = "exactkv cache"
VERSION = 1
BLANK = "0" * 64
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_NAME = 200
"""Bytes of a file's name that its temporary name has too, which is longer and must be one as well."""
MOST_HEADER = 100_000_000
"""The longest header that safetensors reads."""


def write(
    path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor | list[Tensor]], kind: str = KIND
) -> None:
    """Write ``content``, what JSON can say, and ``tensors``; a list is written as joined along axis 1. ``kind``: what
    the file says that it is.

    Raises InputError where the directory is missing, OSError where it cannot be written; a file that was there
    before is then as it was.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no directory {path.parent}")
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a directory; give a file's name")
    name = os.fsencode(path.name)[:MOST_NAME].decode(errors="ignore")
    written = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with written.open("xb") as out:
            digests = dict.fromkeys(tensors, BLANK)
            head = _header(content, tensors, digests, kind)
            out.write(head)
            for name, given in tensors.items():
                data = _bytes(_whole(given))
                digests[name] = hashlib.sha256(data).hexdigest()
                out.write(data)
            out.seek(0)
            signed = _header(content, tensors, digests, kind)
            assert len(signed) == len(head)
            out.write(signed)
            out.flush()
            os.fsync(out.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def size(content: Mapping[str, Any], tensors: Mapping[str, Tensor | list[Tensor]], kind: str = KIND) -> int:
    """Bytes of the file that ``write`` would make of the same."""
    data = (t.numel() * t.element_size() for g in tensors.values() for t in (g if isinstance(g, list) else [g]))
    return len(_header(content, tensors, dict.fromkeys(tensors, BLANK), kind)) + sum(data)


def read_content(path: Path) -> dict[str, Any]:
    """What ``write`` was given as content, the header checked, the tensors not read.
    Raises LoadError where the file is missing, truncated, of a newer format or none of ours."""
    with _opened(path) as file:
        return Header(path, file).content


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What ``write`` was given: content and tensors, on the CPU, each byte checked.
    Raises LoadError as ``read_content`` does, and where anything was altered."""
    with _opened(path) as file:
        header = Header(path, file)
        return header.content, dict(header.tensors(file))


class NoneOfOurs(LoadError):
    """Another kind of file. ``kind``: what a safetensors file says that it is, None where it is not even one."""

    def __init__(self, message: str, kind: str | None = None):
        super().__init__(message)
        self.kind = kind


class Header:
    """The header of an opened file of one ``kind``, checked: what it is, that it is whole, the header's checksum."""

    def __init__(self, path: Path, file: BinaryIO, wanted: str = KIND):
        self.path = path
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        begins = file.read(1) == b"{"
        if not begins or not 2 <= length <= MOST_HEADER:
            raise NoneOfOurs(f"{path} is not a saved cache: it does not begin as a safetensors file does")
        if length > size - 8:
            raise self._broken(f"truncated: its header alone has {length} bytes, the file {size}")
        raw = b"{" + file.read(length - 1)
        try:
            entries = json.loads(raw)
            meta = entries.pop("__metadata__", {})
            kind, version = meta.get("kind"), meta.get("version")
        except (ValueError, AttributeError, RecursionError) as error:
            raise LoadError(f"{path} is not a saved cache, or its header was altered: {error}") from None
        if kind != wanted:
            what = f"{path} is not a saved cache but another safetensors file; give one that save() wrote"
            raise NoneOfOurs(what, str(kind))
        if version != str(VERSION):
            raise LoadError(
                f"{path} has the format {version!r}, this version of exactkv reads {VERSION}; update exactkv, or save "
                "the cache again"
            )
        try:
            signature = meta["checksum"]
            unsigned = raw.replace(signature.encode(), BLANK.encode(), 1)
            if len(signature) != 64 or hashlib.sha256(unsigned).hexdigest() != signature:
                raise ValueError
            self.content: dict[str, Any] = json.loads(meta["content"])
            self.digests: dict[str, str] = json.loads(meta["digests"])
            self.entries: dict[str, dict[str, Any]] = entries
            total = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise self._broken("altered: its header does not have the checksum that it names") from None
        if size != 8 + length + total:
            what = "truncated" if size < 8 + length + total else "longer than it was written"
            raise self._broken(f"{what}: it has {size} bytes, its header says {8 + length + total}")

    def tensors(self, file: BinaryIO) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, read on from the header's end and checked."""
        for name, entry in self.entries.items():
            low, high = entry["data_offsets"]
            data = bytearray(high - low)
            if file.readinto(data) != len(data):  # type: ignore[attr-defined]
                raise self._broken("truncated while it was read")
            if hashlib.sha256(data).hexdigest() != self.digests[name]:
                raise self._broken(f"altered: the tensor {name} does not have the checksum that was saved with it")
            dtype = DTYPES[entry["dtype"]]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            yield name, flat.reshape(entry["shape"])

    def _broken(self, what: str) -> LoadError:
        return LoadError(f"{self.path} is {what}. It cannot be used; save the cache again, or feed the tokens anew")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist; give a file that save() wrote") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error


def _header(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor | list[Tensor]], digests: Mapping[str, str], kind: str
) -> bytes:
    """The header with its length before it and its checksum in it, which is taken with BLANK in its own place."""
    # The checksum comes first, so that it is the first text of its kind in the header.
    meta = {"checksum": BLANK, "kind": kind, "version": str(VERSION)}
    meta |= {"content": json.dumps(content), "digests": json.dumps(digests)}
    entries: dict[str, Any] = {"__metadata__": meta}
    at = 0
    for name, given in tensors.items():
        several = given if isinstance(given, list) else [given]
        shape = list(several[0].shape)
        if isinstance(given, list):
            shape[1] = sum(t.shape[1] for t in given)
        size = sum(t.numel() * t.element_size() for t in several)
        entries[name] = {"dtype": NAMES[several[0].dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    signature = hashlib.sha256(raw).hexdigest()
    return len(raw).to_bytes(8, "little") + raw.replace(BLANK.encode(), signature.encode(), 1)


def _whole(given: Tensor | list[Tensor]) -> Tensor:
    if isinstance(given, list):
        given = given[0] if len(given) == 1 else torch.cat(given, dim=1)
    return given.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _flush_directory(directory: Path) -> None:
    """So that the new name is on the disk too. Some systems cannot, and need not."""
    with contextlib.suppress(OSError):
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
