"""Which tokens stay in the running: functions from a row of scaled logits to indices, in order of id.

``scaled`` float64 [N]: logits divided by the temperature, the greatest 0; its softmax is the probability of the tokens
that are still in the running. They are rows, not batches, so that a row's sums have the same bits in every batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exactkv.generation.sampling.noise import coin
from exactkv.generation.sampling.settings import Sampling


def remaining(scaled: Tensor, sampling: Sampling, position: int) -> tuple[Tensor | None, Tensor]:
    """The ids, int64 [M], that all filters of ``sampling`` leave (None: all), and their scaled logits [M]."""
    ids: Tensor | None = None

    def keep(kept: Tensor) -> None:
        nonlocal ids, scaled
        ids, scaled = kept if ids is None else ids[kept], scaled[kept]

    if 0 < sampling.top_k < len(scaled):
        keep(leading(scaled, sampling.top_k))
    if sampling.top_p < 1:
        keep(nucleus(scaled, sampling.top_p))
    if sampling.min_p > 0:
        keep((scaled >= math.log(sampling.min_p)).nonzero().squeeze(1))
    if sampling.typical_p < 1:
        keep(typical(scaled, sampling.typical_p))
    if sampling.xtc_probability > 0 and coin(sampling.seed, position) < sampling.xtc_probability:
        keep(without_top_choices(scaled, sampling.xtc_threshold))
    return ids, scaled


def leading(keys: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` greatest keys, of equal ones the first."""
    return _sorted(keys, _greatest(keys, min(count, len(keys))))[:count].sort().values


def nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Indices that top-p keeps."""
    probabilities = torch.softmax(scaled, dim=0)
    return _smallest_set(probabilities, probabilities, top_p)


def typical(scaled: Tensor, typical_p: float) -> Tensor:
    """Indices that locally typical sampling keeps."""
    logs = torch.log_softmax(scaled, dim=0)
    probabilities = logs.exp()
    entropy = -torch.where(probabilities > 0, logs * probabilities, 0.0).sum()
    return _smallest_set(-(-logs - entropy).abs(), probabilities, typical_p)


def without_top_choices(scaled: Tensor, threshold: float) -> Tensor:
    """Indices that XTC leaves, when it acts: of the tokens that reach the threshold only the least probable one."""
    top = (torch.softmax(scaled, dim=0) >= threshold).nonzero().squeeze(1)
    kept = torch.ones_like(scaled, dtype=torch.bool)
    kept[_sorted(scaled, top)[:-1]] = False
    return kept.nonzero().squeeze(1)


def _smallest_set(keys: Tensor, weights: Tensor, mass: float) -> Tensor:
    """Indices of the greatest keys, as many as it takes for their weights to reach ``mass``."""
    count = 256
    while True:  # a sort of the whole vocabulary would cost more than all the rest
        chosen = _greatest(keys, min(count, len(keys)))
        last = len(chosen) == len(keys)
        if last or bool(weights[chosen].sum() >= mass):
            order = _sorted(keys, chosen)
            reached = weights[order].cumsum(dim=0)
            if last or bool(reached[-1] >= mass):
                return order[: int((reached < mass).sum()) + 1].sort().values
        count *= 8


def _greatest(keys: Tensor, count: int) -> Tensor:
    """Indices, in order, of the ``count`` greatest keys, and of all that equal the last of them."""
    if count == len(keys):
        return torch.arange(count, device=keys.device)
    return (keys >= keys.topk(count).values[-1]).nonzero().squeeze(1)


def _sorted(keys: Tensor, chosen: Tensor) -> Tensor:
    """The indices ``chosen``, which are in order, the greatest key first, of equal ones the lowest index first."""
    return chosen[keys[chosen].argsort(descending=True, stable=True)]
