"""Where rows lie, told to kernels: tables on the device that the host rewrites before a step, without waiting.

A kernel that finds memory only through these tables can be captured once and replayed while rows grow, move, fork,
leave and join (docs/gpu.md). What is written is a function of the step alone; nothing is remembered of a row but which
memory its addresses were taken from.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from exactkv.cache.row import CacheSpec
from exactkv.cache.view import Placement, Step

SEGMENTS = 16
"""The most segments of one row and zone that the tables describe, the private run among them."""
STAGES = 4
"""Copies in flight: so many steps may be queued on the device before the host waits for one."""


class RowTables:
    """Tables for at most ``rows`` rows, each part int64 on ``device``; unused rows are idle.

    ``tokens`` [rows]: the token of the step; below 0 the device's own last choice. ``positions`` [rows]: where it
    stands, -1 where the row is idle. ``counts`` [zones, rows, 2]: segments in use, and the rows in all of them.
    ``spans`` [zones, rows, SEGMENTS, 3]: rows visible to the step's query, the index of the first, and the capacity of
    the buffer. The last segment's last row is the step's own, which the kernels write. ``addresses``
    [layers, rows, SEGMENTS, 2]: of the buffers of k and v in the cache's layer.
    """

    def __init__(self, spec: CacheSpec, rows: int, device: torch.device):
        zones, layers = len(spec.zones), len(spec.layers)
        shapes = [(rows,), (rows,), (zones, rows, 2), (zones, rows, SEGMENTS, 3), (layers, rows, SEGMENTS, 2)]
        sizes = [prod(shape) + prod(shape) % 2 for shape in shapes]  # each on 16 bytes
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pinned = device.type == "cuda"
        self._hot, self._size, self._rows = starts[-1], sum(sizes), rows
        self._layers: list[list[int]] = [[] for _ in spec.zones]
        for layer in spec.layers:
            self._layers[layer.places[0][0]].append(layer.index)
        self._mirror = torch.zeros(self._size, dtype=torch.int64)
        self._staging = [torch.zeros(self._size, dtype=torch.int64, pin_memory=pinned) for _ in range(STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(STAGES)] if pinned else []
        self._device = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}
        self._turn, self._moved = 0, False

        def views(flat: Tensor) -> list[Tensor]:
            return [flat[a : a + prod(shape)].view(shape) for a, shape in zip(starts, shapes, strict=True)]

        self.tokens, self.positions, self.counts, self.spans, self.addresses = views(self._device)
        host = [part.numpy() for part in views(self._mirror)]
        self._host_tokens, self._host_positions, self._host_counts, self._host_spans, self._host_addresses = host
        self._host_positions[:] = -1
        self.idle()

    @staticmethod
    def why_not(step: Step) -> str | None:
        """Why the tables cannot describe this step; None if they can."""
        if step.width != 1:
            return f"a step of {step.width} tokens a row"
        if step.storage.reader is not None:
            return f"rows stored as {step.storage.name}, which the kernels do not read"
        for zone in step.placements:
            for placement, count in zip(zone, step.counts, strict=True):
                if count and (placement.write is None or placement.fresh is not None):
                    return "a step whose row is not written in place"
                if len(placement.pieces) > SEGMENTS:
                    return f"a row in {len(placement.pieces)} segments, more than {SEGMENTS}"
        return None

    def idle(self) -> None:
        """All rows idle: a step writes and reads no row."""
        self._host_positions[:] = -1
        self._host_counts[:] = 0
        self._publish(self._hot)

    def describe(self, step: Step, tokens: Sequence[int]) -> None:
        """Write the tables for ``step``, which ``why_not`` has allowed, and start the copy to the device. ``tokens``:
        one a row of the step; -1: the device's last choice."""
        rows = len(step.counts)
        self._host_positions[rows:] = -1
        self._host_positions[:rows] = [s if c else -1 for s, c in zip(step.starts, step.counts, strict=True)]
        self._host_tokens[:rows] = tokens
        for z, zone in enumerate(step.placements):
            for r, placement in enumerate(zone):
                if step.counts[r]:
                    self._describe_row(z, r, placement)
        self._publish(self._size if self._moved else self._hot)
        self._moved = False

    def _describe_row(self, z: int, r: int, placement: Placement) -> None:
        """One row of one zone, its addresses only where they have changed."""
        pieces = placement.pieces
        self._host_counts[z, r] = len(pieces), sum(p.rows for p in pieces)
        self._host_spans[z, r, : len(pieces)] = [(p.rows, p.at, p.memory.capacity) for p in pieces]
        stamps = tuple(p.memory.stamp for p in pieces)
        if self._known.get((z, r)) == stamps:
            return
        self._moved = True  # until they are on the device, also if this is interrupted
        self._known.pop((z, r), None)
        for slot, layer in enumerate(self._layers[z]):
            buffers = [p.memory.buffers[slot] for p in pieces]
            self._host_addresses[layer, r, : len(pieces)] = [(b["k"].data_ptr(), b["v"].data_ptr()) for b in buffers]
        self._known[z, r] = stamps

    def _publish(self, size: int) -> None:
        """Copy the first ``size`` numbers, in stream order; a staging buffer is used again once its copy is done."""
        self._turn = (self._turn + 1) % STAGES
        if self._copied:
            self._copied[self._turn].synchronize()
        staged = self._staging[self._turn][:size]
        staged.copy_(self._mirror[:size])
        self._device[:size].copy_(staged, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
