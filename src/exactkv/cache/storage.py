"""How a row is kept. A stored row is a dict of named tensors whose axis 1 counts rows: ``[H, rows, ...]``.

Everything else in the cache moves, copies and cuts stored rows along that axis and knows nothing of
what is in them; so another storage needs no change there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.cache import groups
from exactkv.errors import InputError

PartShapes = Mapping[str, tuple[int, int]]
"""The named parts of a layer's row: part -> (heads, size), such as {"k": (2, 64), "v": (2, 64)}."""
Layout = dict[str, tuple[int, int, torch.dtype]]
"""What memory a layer's rows take: buffer -> (heads, numbers a head and row, dtype)."""
Reader = Callable[[Mapping[str, Tensor], str], Tensor]
"""From stored rows and the name of a part: that part, [H, rows, size] in the model's dtype."""


@dataclass(frozen=True)
class Storage:
    """Rows kept as they are, in ``dtype`` on ``device``. ``poison``: memory that holds no live row is NaN."""

    dtype: torch.dtype
    device: torch.device
    poison: bool = False

    @property
    def name(self) -> str:
        """What `make_storage` makes the same of; rows of other names never meet."""
        return "dense"

    def layout(self, parts: PartShapes) -> Layout:
        """The buffers of one layer."""
        return {name: (heads, size, self.dtype) for name, (heads, size) in parts.items()}

    def row_nbytes(self, parts: PartShapes) -> int:
        """Bytes of one row of one layer."""
        return sum(heads * size * dtype.itemsize for heads, size, dtype in self.layout(parts).values())

    def allocate(self, parts: PartShapes, capacity: int) -> dict[str, Tensor]:
        """Memory for ``capacity`` rows of one layer: buffer -> [H, capacity, n], its contents undefined."""
        buffers = {
            name: torch.empty((heads, capacity, size), dtype=dtype, device=self.device)
            for name, (heads, size, dtype) in self.layout(parts).items()
        }
        if self.poison:
            self.fill_dead(buffers, 0, 0)
        return buffers

    def stored(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The form in which rows are kept: part -> [..., T, size] becomes buffer -> [..., T, n]. What is kept of a row
        depends on that row alone."""
        return rows

    @property
    def reader(self) -> Reader | None:
        """The way back; None where rows are kept as they are."""
        return None

    def fill_dead(self, buffers: Mapping[str, Tensor], live_from: int, live_to: int) -> None:
        """Poison the rows of ``buffers`` outside the index range [live_from, live_to)."""
        for buffer in buffers.values():
            if buffer.dtype.is_floating_point:
                buffer[:, :live_from] = torch.nan
                buffer[:, live_to:] = torch.nan


@dataclass(frozen=True)
class QuantizedStorage(Storage):
    """Rows as integers of ``bits`` 8 or 4, in groups of ``group`` numbers of one head's row (the last one may be
    shorter), each group with a scale in float16 (`groups`). The codes of part "k" are the buffer "k", its scales
    "k.scale", and with 4 bits the least numbers of its groups "k.least"."""

    bits: int = 8
    group: int = groups.GROUP

    @property
    def name(self) -> str:
        return f"int{self.bits}" + ("" if self.group == groups.GROUP else f":{self.group}")

    def layout(self, parts: PartShapes) -> Layout:
        found: Layout = {}
        for name, (heads, size) in parts.items():
            for suffix, (count, dtype) in groups.layout(size, self.bits, self.group).items():
                found[name + suffix] = (heads, count, dtype)
        return found

    def stored(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = {}
        for name, part in rows.items():
            for suffix, buffer in groups.quantize(part, self.bits, self.group).items():
                found[name + suffix] = buffer
        return found

    @property
    def reader(self) -> Reader:
        return self._read

    def _read(self, stored: Mapping[str, Tensor], part: str) -> Tensor:
        buffers = {suffix: stored[part + suffix] for suffix in groups.SUFFIXES[self.bits]}
        return groups.dequantize(buffers, self.bits, self.group, self.dtype)


STORAGES = ("dense", "int8", "int4")
"""Names of storages. An integer one may name its groups' size: "int4:64"."""


def make_storage(name: str, dtype: torch.dtype, device: torch.device, poison: bool) -> Storage:
    """Raises InputError where ``name`` is no storage's."""
    match = re.fullmatch(r"dense|int([48])(?::([1-9]\d{0,5}))?", name) if isinstance(name, str) else None
    if match is None:
        raise InputError(
            f"storage is {name!r}; expected one of: {', '.join(STORAGES)}, or int8:N, int4:N for groups of N numbers "
            f"instead of {groups.GROUP}"
        )
    bits, group = match.groups()
    if bits is None:
        return Storage(dtype, device, poison)
    return QuantizedStorage(dtype, device, poison, int(bits), int(group or groups.GROUP))
