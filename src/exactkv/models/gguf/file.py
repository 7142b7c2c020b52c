"""Reading a GGUF container: header, metadata, tensor table; tensor data stays memory mapped.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader makes
several numpy views for every entry of every array; for Gemma's vocabulary of 262,144 tokens that takes 13 s
where this one takes a fraction of a second.
"""

from __future__ import annotations

import mmap
import struct
import sys
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.gguf.quants import block_format

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Metadata value types -> struct letters (little-endian).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: in torch order (rows first). type: ggml type number. offset: from file
    start.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, mapped read-only.

    metadata: key -> bool, int, float, str or list of these. tensors: name -> TensorInfo.
    Raises LoadError if the file can't be opened, is no GGUF file of version 2 or 3 in little-endian order, is
    truncated or contradicts itself, or is one part of a split model.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        except OSError as error:
            raise LoadError(f"can't open the GGUF file {self.path}: {error.strerror or error}.") from error
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except struct.error:
            raise self._truncated(f"its header goes on at byte {self._position}") from None
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path}: text in the header is not UTF-8 ({error}); the file is damaged.") from None
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns of that; nothing here writes to the mapping.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def raw(self, info: TensorInfo) -> Tensor:
        """The stored bytes of a tensor: uint8 [num_bytes], a view of the mapping, to be read only."""
        return self._bytes[info.offset : info.offset + info.num_bytes]

    def release(self, info: TensorInfo, first: int, last: int) -> None:
        """Let the system take back the memory of a tensor's bytes [first, last): pages of the mapping that have been
        read. They are read again from the file if they are needed again."""
        if sys.platform != "win32" and isinstance(self._map, mmap.mmap):
            start = (info.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + last - start)

    def _truncated(self, what: str) -> LoadError:
        return LoadError(
            f"{self.path} is truncated: {what}, but the file ends at byte {self._size}. Download or copy it again."
        )

    def _read_header(self) -> None:
        if bytes(self._map[:4]) != _MAGIC:
            raise LoadError(
                f"{self.path} is not a GGUF file: it starts with {bytes(self._map[:4])!r}, expected "
                f"{_MAGIC!r}. Give a .gguf file, or a directory with config.json and safetensors files."
            )
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            kind = f"big-endian version {swapped}" if swapped in _VERSIONS else f"version {version}"
            raise LoadError(
                f"{self.path} is a GGUF file of {kind}; supported are versions 2 and 3, little-endian. "
                "Convert the model again with a current llama.cpp."
            )
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise LoadError(
                f"{self.path} is part {self.metadata.get('split.no', 0) + 1} of a model split into "
                f"{self.metadata['split.count']} files; join them with `llama-gguf-split --merge` first."
            )
        self._read_tensor_table(num_tensors)

    def _read_tensor_table(self, num_tensors: int) -> None:
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(reversed([self._scalar("Q") for _ in range(self._scalar("I"))]))
            entries.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise LoadError(f"{self.path}: general.alignment is {alignment}, expected a power of two.")
        start = -(-self._position // alignment) * alignment
        for name, shape, type, offset in entries:
            if name in self.tensors:
                raise LoadError(f"{self.path} holds two tensors named {name!r}; the file is damaged.")
            try:
                fmt = block_format(type)
            except LoadError as error:
                raise LoadError(f"{self.path}, tensor {name!r}: {error}") from None
            columns = shape[-1] if shape else 1
            if columns % fmt.num_values:
                raise LoadError(
                    f"{self.path}, tensor {name!r}: rows of {columns} values are no whole number of blocks "
                    f"of {fmt.num_values}; the file is damaged."
                )
            num_bytes = prod(shape) // fmt.num_values * fmt.num_bytes
            if start + offset + num_bytes > self._size:
                raise self._truncated(f"tensor {name!r} ends at byte {start + offset + num_bytes}")
            self.tensors[name] = TensorInfo(name, shape, type, start + offset, num_bytes)

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self._map, self._position)
        self._position += struct.calcsize("<" + letter)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """`count` strings; a loop over local names, as vocabularies have hundreds of thousands."""
        data, position, length_of = self._map, self._position, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_of(data, position)
            end = position + 8 + length
            if end > self._size:
                raise self._truncated(f"a string of its header ends at byte {end}")
            strings.append(data[position + 8 : end].decode())
            position = end
        self._position = position
        return strings

    def _value(self, type: int) -> Any:
        if type == _STRING:
            return self._string()
        if type == _ARRAY:
            item_type, count = self._scalar("I"), self._scalar("Q")
            if item_type == _STRING:
                return self._strings(count)
            return self._numbers(item_type, count)
        return self._numbers(type, 1)[0]

    def _numbers(self, type: int, count: int) -> list[Any]:
        if type not in _SCALARS:
            raise LoadError(
                f"{self.path}: unknown metadata value type {type} at byte {self._position}; the file is "
                "damaged or newer than this program."
            )
        end = self._position + count * struct.calcsize("<" + _SCALARS[type])
        if end > self._size:
            raise self._truncated(f"an array of its header ends at byte {end}")
        values = struct.unpack_from(f"<{count}{_SCALARS[type]}", self._map, self._position)
        self._position = end
        return list(values)
