"""How a row is kept. A stored row is a dict of named tensors whose axis 1 counts rows: ``[H, rows, ...]``.

Everything else in the cache moves, copies and cuts stored rows along that axis and knows nothing of
what is in them; so another storage needs no change there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.errors import InputError

PartShapes = Mapping[str, tuple[int, int]]
"""The named parts of a layer's row: part -> (heads, size), such as {"k": (2, 64), "v": (2, 64)}."""


@dataclass(frozen=True)
class DenseStorage:
    """Rows kept as they are, in ``dtype`` on ``device``. ``poison``: memory that holds no live row is NaN."""

    dtype: torch.dtype
    device: torch.device
    poison: bool = False

    def allocate(self, parts: PartShapes, capacity: int) -> dict[str, Tensor]:
        """Memory for ``capacity`` rows of one layer: part -> [H, capacity, D], its contents undefined."""
        buffers = {
            name: torch.empty((heads, capacity, size), dtype=self.dtype, device=self.device)
            for name, (heads, size) in parts.items()
        }
        if self.poison:
            self.fill_dead(buffers, 0, 0)
        return buffers

    def stored(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The rows of one batch row, part -> [H, T, D], in the form in which they are kept."""
        return rows

    def fill_dead(self, buffers: Mapping[str, Tensor], live_from: int, live_to: int) -> None:
        """Poison the rows of ``buffers`` outside the index range [live_from, live_to)."""
        for buffer in buffers.values():
            buffer[:, :live_from] = torch.nan
            buffer[:, live_to:] = torch.nan


STORAGES = {"dense": DenseStorage}


def make_storage(name: str, dtype: torch.dtype, device: torch.device, poison: bool) -> DenseStorage:
    if not isinstance(name, str) or name not in STORAGES:
        raise InputError(f"storage is {name!r}; expected one of: {', '.join(STORAGES)}")
    return STORAGES[name](dtype, device, poison)
