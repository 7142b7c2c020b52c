"""What a decoder's cache holds: how many bytes each token adds, and what the rest comes to at most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import torch

from exactkv.cache import make_storage
from exactkv.models.spec import DecoderSpec


@dataclass(frozen=True)
class Footprint:
    """Of one row. ``patterns``: the kinds of layers and how many there are, such as {"full": 8, "window 1024":
    40}. ``token_bytes``: what one more token adds in layers that keep all. ``bounded_bytes``: the most that layers
    which give up rows, and the states of recurrent layers, need, however long the text."""

    patterns: dict[str, int]
    token_bytes: int
    bounded_bytes: int


def footprint(spec: DecoderSpec, dtype: torch.dtype = torch.bfloat16, storage: str = "dense") -> Footprint:
    """The formula of a cache's bytes for ``spec`` in ``dtype`` and that ``storage``: rows that a query may see, without
    slack and without the quarter that is spare. A window as long as any text may be gives up nothing."""
    held = spec.cache_spec("")
    kept_as = make_storage(storage, dtype, torch.device("cpu"), False)
    patterns: Counter[str] = Counter()
    for layer in spec.layers:
        parts = [str(layer.attention.pattern)] if layer.attention else []
        parts += ["recurrent"] if layer.recurrent else []
        shared = " (shared rows)" if layer.shares is not None else ""
        patterns[" with ".join(parts) + shared] += 1
    growing = bounded = 0
    for kept in held.layers:
        row = kept_as.row_nbytes(kept.parts)
        if kept.pattern.bound is None or kept.pattern.bound >= (spec.max_length or kept.pattern.bound + 1):
            growing += row
        else:
            bounded += row * (kept.pattern.bound + kept.pattern.anchors)
    for state in held.recurrent:
        bounded += sum(prod(part.shape) * part.dtype(kept_as).itemsize for part in state.parts.values())
    return Footprint(dict(patterns), growing, bounded)
