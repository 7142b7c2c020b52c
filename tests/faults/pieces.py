"""Kinds D, L and M: several tokens on a warm cache, positions, layers that differ."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from exactkv.cache import view
from tests.faults.fault import Patches, fault, full, recurrent, sliding, tiny, toy
from tests.tiny import FULL, window
from tests.verify.toy import cache
from tests.verify.toy.cache import Call
from tests.verify.toy.model import CONV, LayerConfig, Model
from tests.verify.toy.recurrent import Recurrent
from tests.verify.toy.rows import Rows, View


@fault("D", toy(recurrent(), full()), ("steps", "pieces"))
def convolution_tail_of_a_piece_of_two(patch: Patches) -> None:
    """A piece of several tokens, but fewer than the convolution is wide, leaves a tail padded with zeros."""
    tail_after = Recurrent.tail_after

    def faulty(self: Recurrent, whole: np.ndarray, count: int) -> np.ndarray:
        tail = tail_after(self, whole, count)
        if 1 < count < CONV - 1:
            tail[: CONV - 1 - count] = 0
        return tail

    patch(Recurrent, "tail_after", faulty)


@fault("D", toy(full(), full()), ("steps", "pieces"))
def causal_mask_aligned_to_the_first_key(patch: Patches) -> None:
    """Several tokens on a warm cache: the triangle begins at the first key held, not at the piece."""

    def faulty(self: Call, layer: LayerConfig, view: View) -> np.ndarray:
        several = self.positions.shape[1] > 1
        start = np.array(self.lengths)[:, None] if several else 0
        return cache.sees(layer, self.positions - start, view.positions)

    patch(Call, "mask", faulty)


@fault("D", toy(recurrent(), full()), ("steps", "pieces"))
def long_pieces_start_from_an_empty_state(patch: Patches) -> None:
    """The recurrence over a piece of four tokens or more begins with zeros instead of the state held."""
    feed = Recurrent.feed

    def faulty(self: Recurrent, model, i, u, lengths, counts):
        if u.shape[1] >= 4:
            self.state = np.zeros_like(self.state)
        return feed(self, model, i, u, lengths, counts)

    patch(Recurrent, "feed", faulty)


@fault("L", toy(sliding(6), full()), ("steps", "prefill then decode"))
def position_counted_from_the_evicted_buffer(patch: Patches) -> None:
    """Once a ring has wrapped, new tokens are rotated as if they stood at its end, not at the text's."""

    def faulty(self: Call, i: int) -> np.ndarray:
        memory = self.cache.memories[i]
        if not isinstance(memory, Rows) or memory.limit is None:
            return self.positions
        start = np.array(self.lengths)[:, None]
        return self.positions - start + np.minimum(start, memory.limit)

    patch(Call, "places", faulty)


@fault("L", toy(full(), full(), long_after=16), ("steps", "prefill then decode"))
def long_rope_switched_for_new_keys_only(patch: Patches) -> None:
    """The factors follow the length so far: keys stored before the switch keep the short ones."""
    patch(Model, "frequencies", lambda self, i, end: self.angles(i, stretched=self.stretched(end)))


@fault("L", toy(full(), sliding(6)), ("steps", "warm pieces", "positions"))
def positions_of_the_caller_added_to_the_offset(patch: Patches) -> None:
    """Positions that the caller names are taken as counted from what is held."""
    init = Call.__init__

    def faulty(self: Call, cache, counts, width, positions) -> None:
        init(self, cache, counts, width, positions)
        shift = 0 if positions is None else np.array(self.lengths)[:, None]
        self.rotated_at = self.positions + shift

    patch(Call, "__init__", faulty)
    patch(Call, "places", lambda self, i: self.rotated_at)


@fault("L", tiny(FULL, window(6)), ("steps", "prefill then decode"))
def position_table_that_ends(patch: Patches) -> None:
    """Positions stop growing at 40, as if a table of angles ended there."""
    make_positions = view.make_positions

    def faulty(starts, width, device):
        return make_positions([min(s, 40) for s in starts], width, device)

    patch(view, "make_positions", faulty)


@fault("M", toy(full(), full(shares=0)), ("steps", "one feed"))
def sharing_layer_rotates_past_the_call(patch: Patches) -> None:
    """The offset is advanced in place by the layer that owns the keys; the one that shares them reads it after."""

    def faulty(self: Call, i: int) -> np.ndarray:
        shift = 0 if self.model.config.layers[i].shares is None else np.array(self.counts)[:, None]
        return self.positions + shift

    patch(Call, "query_places", faulty)


@fault("M", toy(sliding(6), full(), sliding(6, shares=0)), ("steps", "one feed"))
def sharing_layer_reads_the_raw_ring(patch: Patches) -> None:
    """The layer that shares the keys of a ring takes its slots for positions."""

    def faulty(self: Call, layer: LayerConfig) -> View:
        memory = self.cache.memories[layer.shares]
        dim = memory.layer.head_dim
        held = np.minimum(np.arange(memory.capacity), self.end - 1)[None].repeat(len(self.lengths), 0)
        return View(memory.storage.decode(memory.k, dim), memory.storage.decode(memory.v, dim), held)

    patch(Call, "shared_view", faulty)


@fault("M", toy(full(rope_base=500.0), full(), sliding(6)), ("steps", "one feed"))
def first_layers_rope_base_for_all(patch: Patches) -> None:
    """With a cache all layers are rotated with the base of layer 0; without one each has its own."""
    init = Call.__init__

    def faulty(self: Call, cache, counts, width, positions) -> None:
        init(self, cache, counts, width, positions)
        self.model = copy.copy(self.model)
        layers = self.model.config.layers
        same = tuple(replace(layer, rope_base=layers[0].rope_base) for layer in layers)
        self.model.config = replace(self.model.config, layers=same)

    patch(Call, "__init__", faulty)
