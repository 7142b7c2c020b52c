"""What a cache holds of a prompt already, and where on the way to stand still so that it can be reused again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from exactkv.cache import Cache, CheckpointPolicy

PREFILL_WIDTH = 512
"""Prompt tokens a forward pass: enough to use the machine, few enough to bound memory and answer Ctrl-C."""
CUDA_PREFILL_WIDTH = 4096
"""The same on CUDA, where a pass of few tokens waits for weights."""
CHECKPOINTS = CheckpointPolicy(every=1024, max_bytes=1 << 30)
"""Where nothing else is said, for caches that will be reused: for edits within long texts, in bounded memory."""


def prefill_width(device: torch.device) -> int:
    """Prompt tokens of a forward pass of one row on ``device``."""
    return CUDA_PREFILL_WIDTH if device.type == "cuda" else PREFILL_WIDTH


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    count = min(len(first), len(second))
    return next((i for i in range(count) if first[i] != second[i]), count)


def reuse(cache: Cache, tokens: Sequence[int]) -> int:
    """Rewind a cache of one row to the furthest position where it can go on with ``tokens``, and return that: what is
    left to feed is ``tokens[reached:]``, at least one token, as its logits are wanted."""
    held = common_prefix(cache.tokens(0), tokens)
    return cache.rewind(max(0, min(held, len(tokens) - 1)))[0]


def next_stop(cache: Cache, end: int, width: int, marks: Iterable[int] = ()) -> int:
    """Where the next piece of a prompt that ends at ``end`` stops: after at most ``width`` tokens, at the next of
    ``marks``, and where the cache's policy files its next checkpoint."""
    start = cache.lengths[0]
    wanted = [m for m in marks if m > start]
    if (filed := cache.next_checkpoint(0)) is not None:
        wanted.append(filed)
    return min([start + width, end, *wanted])
