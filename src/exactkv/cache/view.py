"""What a forward pass sees of a cache: the Step, made once a call, and a KVView for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exactkv.cache.pattern import AttentionPattern
from exactkv.cache.run import Memory, Piece, Run
from exactkv.cache.storage import Reader, Storage

if TYPE_CHECKING:
    from exactkv.cache.recurrent import State


class KVSegment(NamedTuple):
    """Rows for consecutive positions from ``position`` on, as they are stored: ``parts``, buffer -> [H, rows, ...].
    ``reader`` makes of them what attention reads, None where they are just that. ``copies``: whether reading computes
    something, so that as much as is needed at once should be read at once."""

    position: int
    parts: Mapping[str, Tensor]
    reader: Reader | None = None
    copies: bool = False

    @property
    def heads(self) -> int:
        return next(iter(self.parts.values())).shape[0]

    @property
    def rows(self) -> int:
        return next(iter(self.parts.values())).shape[1]

    def narrow(self, low: int, high: int) -> KVSegment:
        """The rows with the indices [low, high)."""
        if low == 0 and high == self.rows:
            return self
        kept = {name: t.narrow(1, low, high - low) for name, t in self.parts.items()}
        return self._replace(position=self.position + low, parts=kept)

    def read(self, part: str) -> Tensor:
        """[H, rows, D], in the model's dtype."""
        return self.parts[part] if self.reader is None else self.reader(self.parts, part)


class RowView(NamedTuple):
    """One row of the batch: its queries stand at ``start`` ... ``start + queries - 1``; the keys that any of
    them sees lie in ``segments``, in position order, gaps only where nothing is visible."""

    start: int
    queries: int
    segments: tuple[KVSegment, ...]


def _last(row: RowView, pattern: AttentionPattern) -> RowView:
    if row.queries <= 1:
        return row
    position = row.start + row.queries - 1
    first = pattern.first_visible(position)
    segments = []
    for segment in row.segments:
        at, end = segment.position, segment.position + segment.rows
        for low, high in ((at, min(end, first, pattern.anchors)), (max(at, first), end)):
            if low < high:
                segments.append(segment.narrow(low - at, high - at))
    return RowView(position, 1, tuple(segments))


class KVView(NamedTuple):
    """Keys and values of one layer for one call, the call's own among them. Frozen; valid for that call."""

    pattern: AttentionPattern
    rows: tuple[RowView, ...]

    def last(self) -> KVView:
        """What each row's last query sees; rows without queries stay without."""
        return KVView(self.pattern, tuple(_last(row, self.pattern) for row in self.rows))


class Write(NamedTuple):
    """Put the call's rows [offset, offset + rows) of a row at the index ``at`` of ``memory``."""

    memory: Memory
    at: int
    offset: int
    rows: int


class Fresh(NamedTuple):
    """Read the call's rows [offset, offset + rows), which begin at ``position``, from the call itself."""

    position: int
    offset: int
    rows: int


class Placement(NamedTuple):
    """For one row and one zone, where the call's rows go, what its queries read, and what is held after it."""

    pieces: tuple[Piece, ...]
    write: Write | None
    fresh: Fresh | None
    after: Run | None


NOTHING = Placement((), None, None, None)


@dataclass(slots=True)
class Step:
    """One call: what is common to all layers. Made by ``Cache.begin``, ended by ``Cache.commit``.

    ``starts``, ``counts``: for each row, its length before the call and the number of its valid tokens.
    ``placements[zone][row]``.
    ``extended``: the layers that have written so far. ``void``: something else was done with the cache since.

    For recurrent layers: ``before``, the state in which each row begins, None if it is empty; ``keeps``, after how
    many of its tokens each row keeps its state; ``stretches`` [begin, end), the call's tokens cut there and at each
    row's count; ``states``, what has been written so far, (row, tokens) -> recurrent layer -> part -> tensor.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    placements: list[list[Placement]]
    storage: Storage
    tokens: list[list[int]] = field(default_factory=list)
    extended: set[int] = field(default_factory=set)
    void: bool = False
    before: tuple[State | None, ...] = ()
    keeps: tuple[range, ...] = ()
    stretches: tuple[tuple[int, int], ...] = ()
    states: dict[tuple[int, int], dict[int, Mapping[str, Tensor]]] = field(default_factory=dict)
    _positions: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """int64 [B, T], absolute (a padded token's goes on counting); made when first asked for."""
        if self._positions is None:
            self._positions = make_positions(self.starts, self.width, self.storage.device)
        return self._positions


def make_positions(starts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """int64 [B, width]: each row's positions, from its start on."""
    first = torch.tensor(starts, dtype=torch.int64, device=device)
    return first[:, None] + torch.arange(width, device=device)
