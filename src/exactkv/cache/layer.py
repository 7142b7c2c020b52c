"""Zones and layers: which positions a kind of layer keeps, and the one way in which a layer is fed and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from exactkv.cache.pattern import AttentionPattern
from exactkv.cache.run import Run
from exactkv.cache.storage import PartShapes
from exactkv.cache.view import KVSegment, KVView, RowView, Step
from exactkv.errors import InputError, IntegrityError


@dataclass(frozen=True)
class Zone:
    """The positions ``low`` <= p < ``high`` of all layers of one pattern; each row keeps a Run for it.

    A pattern has one zone, from 0 on; with anchors it has two: the anchors, which are never given up,
    and the rest.
    """

    pattern: AttentionPattern
    low: int
    high: int | None
    layers: tuple[PartShapes, ...]

    @property
    def bound(self) -> int | None:
        """The most rows that a query sees here; None if all."""
        return self.pattern.bound if self.high is None else None

    def clip(self, position: int) -> int:
        """The end of what this zone holds of a row of that length."""
        position = max(position, self.low)
        return position if self.high is None else min(position, self.high)

    def needed_from(self, position: int) -> int:
        """The first position here that a query at ``position`` sees."""
        return max(self.low, self.pattern.first_visible(position)) if self.high is None else self.low

    def retained_from(self, length: int, slack: int) -> int:
        """The first position kept by a row of that length: what it takes to rewind slack + 1 tokens."""
        return self.needed_from(max(0, length - slack - 1))

    def capacity_limit(self, slack: int, max_length: int | None) -> int | None:
        """The most rows of private memory; None for no limit. A bounded run has a quarter to spare, so that
        moving its rows to the front is rare."""
        reach = None if max_length is None else max(0, max_length - self.low)
        if self.high is not None:
            return min(self.high - self.low, reach) if reach is not None else self.high - self.low
        if self.bound is None:
            return reach
        kept = self.bound + slack
        limit = kept + max(1, kept // 4)  # at least one, so that a token can be added to what is kept
        return limit if reach is None else min(limit, reach)

    def standing(self, run: Run, position: int) -> int:
        """The greatest q <= ``position`` where going on is exact with what ``run`` holds."""
        needed = self.needed_from(position)
        if needed >= position or run.start <= needed:
            return position
        return max(self.pattern.restart(position), min(position, self.low))

    def rewound(self, run: Run, position: int) -> Run:
        """``run`` at ``position``, where it stands."""
        position = self.clip(position)
        return run.cut(position) if run.start <= position else run.restarted(position)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a cache. It holds no state: rows are the cache's, the call is the step's.

    ``places``: for each zone of its pattern, (index of the zone, index of this layer within the zone).
    """

    index: int
    pattern: AttentionPattern
    parts: PartShapes
    places: tuple[tuple[int, int], ...]

    def extend(self, step: Step, rows: Mapping[str, Tensor]) -> KVView:
        """Write the call's rows and return what its queries see.

        ``rows``: part -> [B, H, T, D], in the cache's dtype and on its device. Only each row's valid tokens
        are written or shown. Nothing is committed: until ``Cache.commit`` the cache stands where it stood.
        Raises InputError where a part's shape does not fit the layer.
        """
        self._check(step, rows)
        stored = step.storage.stored(rows)  # first of all: a call reads its own rows as later ones will
        views = []
        for r, count in enumerate(step.counts):
            segments: list[KVSegment] = []
            if count:
                row = {name: buffer[r] for name, buffer in stored.items()}
                for zone, slot in self.places:
                    self._extend_zone(step, zone, slot, r, row, segments)
            views.append(RowView(step.starts[r], count, tuple(segments)))
        step.extended.add(self.index)
        return KVView(self.pattern, tuple(views))

    def _extend_zone(
        self, step: Step, zone: int, slot: int, r: int, stored: Mapping[str, Tensor], out: list[KVSegment]
    ) -> None:
        pieces, write, fresh, _ = step.placements[zone][r]
        reader = step.storage.reader
        if write is not None:
            memory, index, offset, count = write
            for name, buffer in memory.buffers[slot].items():
                buffer.narrow(1, index, count).copy_(stored[name].narrow(1, offset, count))
        for memory, index, position, count in pieces:
            parts = {name: b.narrow(1, index, count) for name, b in memory.buffers[slot].items()}
            out.append(KVSegment(position, parts, reader, reader is not None))
        if fresh is not None:
            position, offset, count = fresh
            parts = {name: t.narrow(1, offset, count) for name, t in stored.items()}
            out.append(KVSegment(position, parts, reader, reader is not None))

    def _check(self, step: Step, rows: Mapping[str, Tensor]) -> None:
        if step.void:
            raise IntegrityError(f"layer {self.index} was extended in a step that is void")
        if self.index in step.extended:
            raise IntegrityError(f"layer {self.index} was extended twice in one step")
        if rows.keys() != self.parts.keys():
            raise InputError(f"layer {self.index} takes the parts {list(self.parts)}, not {list(rows)}")
        batch = len(step.counts)
        for name, (heads, size) in self.parts.items():
            if rows[name].shape != (batch, heads, step.width, size):
                raise InputError(
                    f"layer {self.index}, part {name!r}: got shape {list(rows[name].shape)}, "
                    f"expected [{batch}, {heads}, {step.width}, {size}] = [B, H, T, D]"
                )
            if rows[name].dtype != step.storage.dtype or rows[name].device != step.storage.device:
                raise InputError(
                    f"layer {self.index}, part {name!r}: got {rows[name].dtype} on {rows[name].device}, "
                    f"expected {step.storage.dtype} on {step.storage.device}"
                )


def arrange(
    layers: Sequence[tuple[AttentionPattern, PartShapes]],
) -> tuple[tuple[AttentionLayer, ...], tuple[Zone, ...]]:
    """The layers and zones of a model, from each layer's pattern and parts, in the model's order."""
    members: dict[AttentionPattern, list[int]] = {}
    for i, (pattern, _) in enumerate(layers):
        members.setdefault(pattern, []).append(i)
    zones: list[Zone] = []
    places: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(layers))}
    for pattern, indices in members.items():
        anchors = pattern.anchors if pattern.bound is not None else 0
        for low, high in [(0, anchors), (anchors, None)] if anchors else [(0, None)]:
            for slot, i in enumerate(indices):
                places[i].append((len(zones), slot))
            zones.append(Zone(pattern, low, high, tuple(layers[i][1] for i in indices)))
    made = tuple(AttentionLayer(i, pattern, parts, tuple(places[i])) for i, (pattern, parts) in enumerate(layers))
    return made, tuple(zones)
