"""Kinds A, B and C: allocated sizes, rings, windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exactkv.cache import SlidingWindow
from exactkv.cache.layer import Zone
from exactkv.cache.place import Policy
from tests.faults.allocated_size import allocated_size_taken_for_length
from tests.faults.fault import Patches, chunked, fault, full, sliding, tiny, toy
from tests.tiny import FULL, chunk, window
from tests.verify.toy import cache, model
from tests.verify.toy.cache import Call
from tests.verify.toy.model import LayerConfig
from tests.verify.toy.rows import Rows, View


@fault("A", tiny(chunk(8), FULL), ("steps", "allocation"))
def live_rows_dropped_by_allocated_size(patch: Patches) -> None:
    """A chunked layer decides by the allocated rows what to drop, so that live ones go and padding stays."""
    patch.stack.enter_context(allocated_size_taken_for_length())


@fault("A", toy(full(), full()), ("steps", "allocation"))
def padding_counted_as_keys(patch: Patches) -> None:
    """Slots that are allocated but not yet written are zero keys, which every query sees."""
    view = Rows.view

    def faulty(self: Rows, lengths, counts, k, v) -> View:
        seen = view(self, lengths, counts, k, v)
        end = np.array(lengths)[:, None] + np.array(counts)[:, None]
        seen.positions[:, : self.capacity][np.arange(self.capacity) >= end] = 0
        return seen

    patch(Rows, "view", faulty)


@fault("A", toy(sliding(6), full()), ("steps", "allocation"))
def window_counted_from_the_end_of_the_buffer(patch: Patches) -> None:
    """A ring allocated in steps takes its last ``window`` slots for the newest rows before they are written."""
    write = Rows.write

    def faulty(self: Rows, lengths, counts, k, v) -> None:
        write(self, lengths, counts, k, v)
        if self.layer.size is not None and self.step > 1:
            self.starts = [max(s, self.capacity - self.layer.size) for s in self.starts]

    patch(Rows, "write", faulty)


@fault("B", toy(sliding(6), full()), ("steps", "pieces"))
def first_rows_of_a_piece_larger_than_the_ring(patch: Patches) -> None:
    """Of a piece that does not fit into the ring the first rows are written, not the last."""
    put = Rows.put

    def faulty(self: Rows, target, source, r, slots, first, end) -> None:
        put(self, target, source, r, slots, 0, end - first)

    patch(Rows, "put", faulty)


@fault("B", toy(sliding(6), sliding(4)), ("steps", "pieces"))
def ring_read_unrotated(patch: Patches) -> None:
    """After a wrap the slots are taken in order, as if slot 0 still held the oldest row."""

    def faulty(self: Rows, lengths) -> np.ndarray:
        length = np.array(lengths)[:, None]
        positions = np.maximum(length - self.capacity, 0) + np.arange(self.capacity)
        return np.where(positions < length, positions, -1)

    patch(Rows, "held", faulty)


@fault("B", toy(sliding(6), full()), ("steps", "warm pieces"))
def piece_written_to_the_ring_before_it_is_read(patch: Patches) -> None:
    """Several tokens on a wrapped ring overwrite rows that the first of them still see."""

    def faulty(self: Call, memory: Rows, k, v) -> View:
        memory.make_room(self.lengths, self.counts)
        whole = memory.view(self.lengths, self.counts, k, v)
        memory.write(self.lengths, self.counts, k, v)
        if memory.layer.size is None:
            return whole
        dim, after = memory.layer.head_dim, [n + c for n, c in zip(self.lengths, self.counts, strict=True)]
        held = memory.held(after)
        return View(memory.storage.decode(memory.k, dim), memory.storage.decode(memory.v, dim), held)

    patch(Call, "extend", faulty)


@fault("B", tiny(window(6), FULL), ("steps", "warm pieces"))
def rows_kept_of_a_large_piece_are_one_too_old(patch: Patches) -> None:
    """Of a piece that a bounded run cannot hold the rows kept begin one too early, at the right places."""
    place = Policy.place

    def faulty(self: Policy, zone, run, length, count):
        run, placement = place(self, zone, run, length, count)
        write = placement.write
        if placement.fresh is not None and write is not None and write.offset:
            placement = placement._replace(write=write._replace(offset=write.offset - 1))
        return run, placement

    patch(Policy, "place", faulty)


@fault("C", tiny(window(6), FULL), ("steps", "visibility"))
def oldest_row_of_the_window_not_read(patch: Patches) -> None:
    """With a cache the window begins one row late; without one it is right."""
    needed_from = Zone.needed_from

    def faulty(self: Zone, position: int) -> int:
        first = needed_from(self, position)
        return first + 1 if isinstance(self.pattern, SlidingWindow) and first > self.low else first

    patch(Zone, "needed_from", faulty)


@fault("C", toy(sliding(6), full()), ("steps", "pieces"))
def window_lost_for_single_tokens(patch: Patches) -> None:
    """The code for one token a call has no window: it sees whatever the ring still holds."""
    mask = Call.mask

    def faulty(self: Call, layer: LayerConfig, view: View) -> np.ndarray:
        single = self.positions.shape[1] == 1 and layer.kind == "sliding"
        return mask(self, replace(layer, kind="full") if single else layer, view)

    patch(Call, "mask", faulty)


def _everywhere(patch: Patches, change: int) -> None:
    """The windows of the whole engine, with a cache and without, are wrong by ``change``."""
    full_mask, sees = model.full_mask, cache.sees

    def changed(layer: LayerConfig) -> LayerConfig:
        return replace(layer, size=layer.size + change) if layer.kind == "sliding" else layer

    patch(model, "full_mask", lambda layer, length: full_mask(changed(layer), length))
    patch(cache, "sees", lambda layer, queries, keys: sees(changed(layer), queries, keys))


@fault("C", toy(sliding(6)), ("steps", "visibility"))
def window_one_too_small_everywhere(patch: Patches) -> None:
    """With and without a cache the window is a token smaller than the config says."""
    _everywhere(patch, -1)


@fault("C", toy(sliding(6), sliding(4)), ("steps", "visibility"))
def window_one_too_large_everywhere(patch: Patches) -> None:
    """With and without a cache a query sees ``window`` tokens and itself."""
    _everywhere(patch, +1)


@fault("C", toy(chunked(5), full()), ("steps", "prefill then decode"))
def first_token_of_a_chunk_sees_the_chunk_before(patch: Patches) -> None:
    """With a cache the boundary lies a token late, for queries: the first of a chunk still sees the one before."""
    sees = cache.sees

    def faulty(layer: LayerConfig, queries, keys):
        if layer.kind != "chunked":
            return sees(layer, queries, keys)
        late = np.where(queries % layer.size == 0, np.maximum(queries - 1, 0), queries)
        return sees(layer, late, keys) | (keys[:, None] == queries[:, :, None])

    patch(cache, "sees", faulty)
