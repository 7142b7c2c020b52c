"""Kinds N and O: quantized caches, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from exactkv.cache import AttentionLayer, KVSegment, KVView, place
from tests.faults.fault import Patches, fault, full, recurrent, sliding, tiny, toy
from tests.tiny import FULL, window
from tests.verify.toy import files
from tests.verify.toy.cache import Cache, CacheError
from tests.verify.toy.model import Model
from tests.verify.toy.rows import Rows, View


@fault("N", toy(full(), full()), ("steps", "quantized: rewind"))
def scales_of_rows_that_were_cut(patch: Patches) -> None:
    """Rows written again after a cut keep the scale of those that lay there before."""
    put = Rows.put

    def faulty(self: Rows, target, source, r, slots, first, end) -> None:
        before = target["scale"][r, slots] if "scale" in target else None
        put(self, target, source, r, slots, first, end)
        if before is not None:
            target["scale"][r, slots] = np.where(before == 1.0, target["scale"][r, slots], before)

    patch(Rows, "put", faulty)


@fault("N", toy(full(), full()), ("steps", "quantized: leaving rows"))
def scales_not_reordered_with_the_codes(patch: Patches) -> None:
    """Rows leave or change places; their scales stay where they were."""
    take = Rows.take

    def faulty(self: Rows, rows) -> Rows:
        made = take(self, rows)
        for parts, old in ((made.k, self.k), (made.v, self.v)):
            if "scale" in parts and len(parts["scale"]) <= len(old["scale"]):
                parts["scale"] = old["scale"][: len(parts["scale"])].copy()
        return made

    patch(Rows, "take", faulty)


@fault("N", toy(full(), sliding(6)), ("steps", "quantized: steps"))
def newest_rows_read_unrounded(patch: Patches) -> None:
    """A call reads its own rows as they are, and everybody later as they were stored."""
    view = Rows.view

    def faulty(self: Rows, lengths, counts, k, v) -> View:
        seen = view(self, lengths, counts, k, v)
        seen.k[:, -k.shape[1] :], seen.v[:, -v.shape[1] :] = k, v
        return seen

    patch(Rows, "view", faulty)


@fault("N", tiny(FULL, window(6)), ("steps", "quantized: steps"))
def own_rows_read_as_they_were(patch: Patches) -> None:
    """exactkv: a call reads its own rows before they are quantized, and everybody later after."""
    extend = AttentionLayer.extend

    def faulty(self: AttentionLayer, step, rows) -> KVView:
        view = extend(self, step, rows)
        if step.storage.name == "dense":
            return view
        seen = []
        for r, row in enumerate(view.rows):
            before = [s.narrow(0, min(s.rows, row.start - s.position)) for s in row.segments if s.position < row.start]
            own = {name: part[r][:, : row.queries] for name, part in rows.items()}
            seen.append(row._replace(segments=(*before, KVSegment(row.start, own))))
        return view._replace(rows=tuple(seen))

    patch(AttentionLayer, "extend", faulty)


@fault("N", tiny(window(6), FULL), ("steps", "quantized: steps"))
def scales_left_where_rows_were_before(patch: Patches) -> None:
    """exactkv: a window's live rows move to the front of their memory; their scales do not."""

    def faulty(run, low, high, target, origin) -> None:
        for memory, index, position, rows in run.pieces(low, high):
            at = position - origin
            for source, destination in zip(memory.buffers, target.buffers, strict=True):
                for name, buffer in source.items():
                    begin = 0 if name.endswith(".scale") else index
                    destination[name][:, at : at + rows] = buffer[:, begin : begin + rows]

    patch(place, "copy_rows", faulty)


@fault("O", toy(full(), recurrent()), ("steps", "save and load"))
def convolution_tail_not_saved(patch: Patches) -> None:
    """Files hold the recurrent state, but not the last inputs of the convolution."""

    def faulty(arrays):
        return {name: np.zeros_like(a) if name.endswith("/tail") else a for name, a in arrays.items()}

    patch(files, "packed", faulty)


@fault("O", toy(full(), sliding(6)), ("steps", "save and load"))
def saved_in_half_the_width(patch: Patches) -> None:
    """Files hold float32 where the cache holds float64."""

    def faulty(arrays):
        return {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}

    patch(files, "packed", faulty)


@fault("O", toy(full(), sliding(6)), ("steps", "save and load", "new process"))
def ring_saved_in_order_without_its_rotation(patch: Patches) -> None:
    """A wrapped ring is written oldest row first, and loaded as if slot 0 were the oldest."""
    arrays = Rows.arrays

    def faulty(self: Rows):
        shift = 0 if self.limit is None else -(self.starts[0] % max(1, self.capacity))
        return {name: np.roll(part, shift, axis=1) for name, part in arrays(self).items()}

    patch(Rows, "arrays", faulty)


@fault("O", toy(full(), full()), ("steps", "damaged files"))
def damaged_file_loads_as_an_empty_cache(patch: Patches) -> None:
    """What cannot be read is silently an empty cache."""
    load = files.load

    def faulty(model: Model, path: Path) -> Cache:
        try:
            return load(model, path)
        except CacheError as error:
            if "another model" in str(error):
                raise
            return Cache(model)

    patch(files, "load", faulty)
