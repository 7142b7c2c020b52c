"""Does attention matter here, and does each row depend on just the tokens that it may see?

Without the first, every schedule would pass whatever the cache lost; so the tool checks itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from exactkv.verify.judge import Judge
from exactkv.verify.target import Array, Layer, Target, Tokens

ENOUGH = 0.7
"""The share of visible tokens that must move a row noticeably, for a verification to mean something."""
SHARP = 300.0
"""By so many tolerances the first token that counts must move a row, where those before it do not at all."""


@dataclass
class Probe:
    """``share``: of the pairs (token, later row) within reach, how many move the row by more than the tolerance.
    ``wrong``: what depends on tokens out of reach, or not on tokens within."""

    share: float
    wrong: list[tuple[str, int]] = field(default_factory=list)
    differences: dict[int, float] = field(default_factory=dict)


def visible(layer: Layer, length: int) -> NDArray[np.bool_]:
    """[i, j]: whether position i sees position j in this layer."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    seen = j <= i
    if layer.size is not None and layer.kind == "sliding":
        seen &= (i - j < layer.size) | (j < layer.anchors)
    if layer.size is not None and layer.kind == "chunked":
        seen &= (i // layer.size == j // layer.size) | (j < layer.anchors)
    return np.asarray(seen, dtype=np.bool_)


def reach(layers: tuple[Layer, ...], length: int) -> NDArray[np.bool_]:
    """[i, j]: whether row i can depend on token j through all layers."""
    if not layers:
        return np.tri(length, dtype=np.bool_)
    reached = np.eye(length, dtype=np.bool_)
    for layer in layers:
        reached = (visible(layer, length).astype(np.int64) @ reached.astype(np.int64)) > 0
    return reached


def probe(target: Target, judge: Judge, text: Tokens) -> Probe:
    """Change each token in turn (all in one batch) and see which rows of the one pass move."""
    length = len(text)
    changed = [list(text) for _ in range(length)]
    for j, row in enumerate(changed):
        row[j] = 1 + (row[j] + target.vocab_size // 2) % (target.vocab_size - 1)
    base = target.forward([list(text)])[0]
    moved = np.stack([np.abs(target.forward([row])[0] - base).max(axis=-1) for row in changed], axis=1)  # [i, j]
    within = reach(target.layers, length)
    noticeable = moved > judge.tolerance
    later = within & ~np.eye(length, dtype=np.bool_)
    share = float(noticeable[later].mean()) if later.any() else 1.0
    result = Probe(share)
    for i, j in np.argwhere(noticeable & ~within)[:1]:
        what = "later than the row" if j > i else "out of reach of every layer's window"
        result.wrong.append((f"changing token {j} moves row {i} by {moved[i, j]:.1e}: it is {what}", int(i)))
        result.differences[int(i)] = float(moved[i, j])
    if not result.wrong and share > ENOUGH:
        result.wrong += _narrow(within, moved, judge.tolerance)
    return result


def _narrow(within: NDArray[np.bool_], moved: Array, tolerance: float) -> list[tuple[str, int]]:
    """Windows narrower than they are said to be: every row ignores the first ``gap`` tokens within its reach
    wholly, and the next one moves it far more than influence that only fades could explain."""
    edges = [(i, int(np.argmax(within[i]))) for i in range(len(within))]
    edges = [(i, j) for i, j in edges if 0 < j < i - 2]
    if len(edges) < 6:
        return []
    i, j = edges[len(edges) // 2]
    gap = int(np.argmax(moved[i, j : i + 1] > tolerance))
    ignored = max((float(moved[i, j : j + gap].max()) for i, j in edges), default=0.0) if gap else np.inf
    next_one = float(np.median([moved[i, min(i, j + gap)] for i, j in edges]))
    if ignored > tolerance or next_one < SHARP * tolerance:
        return []
    i, j = edges[0]
    return [(f"row {i} and all later ones ignore the first {gap} within their reach (row {i}: from token {j} on)", i)]
