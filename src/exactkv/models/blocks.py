"""Work on rows a block at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CPU_ROWS = 512
"""Rows at a time on a CPU: what lies between two products then stays in its cache, and in memory that the
allocator does not hand back to the system and fetch again in every layer."""


def in_blocks(work: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """``work(x, *others)``, where each row of the results depends on that row of the arguments alone, rows being
    axis 1. On a CPU it is done for CPU_ROWS rows at a time."""
    if x.device.type != "cpu" or x.shape[1] <= CPU_ROWS:
        return work(x, *others)
    blocks = zip(*(t.split(CPU_ROWS, dim=1) for t in (x, *others)), strict=True)
    results = zip(*(work(*block) for block in blocks), strict=True)
    return tuple(torch.cat(parts, dim=1) for parts in results)
