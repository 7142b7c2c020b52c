"""Perplexity of a text, in strided windows through the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.cache.checks import is_int, require
from exactkv.errors import InputError
from exactkv.generation.prompts import prompt_ids
from exactkv.generation.reuse import PREFILL_WIDTH
from exactkv.models.model import Model

DEFAULT_WINDOW = 2048
LOGITS_AT_ONCE = 1 << 24
"""Numbers of a piece's logits: 64 MB in float32."""
ROWS_AT_ONCE = 1 << 22
"""Numbers of those that are made probabilities of at once."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model foretells a text.

    ``scored``: tokens that it had to foretell; ``nats``: -log p of all of them, ``deviation``: the standard deviation
    of one of them. ``fed``: tokens that went through the model in ``seconds``.
    """

    scored: int
    nats: float
    deviation: float
    window: int
    stride: int
    fed: int
    seconds: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.scored

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        """e to the nats per token; inf beyond what a float can say."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 709 else math.inf

    @property
    def standard_error(self) -> float:
        """Of the perplexity, if tokens were independent; they are not, so the true one is somewhat greater."""
        return self.perplexity * self.deviation / math.sqrt(self.scored)

    def bits_per(self, count: int) -> float:
        """Bits for each of so many bytes or characters of the text."""
        return self.nats / math.log(2) / count


def perplexity(
    model: Model,
    tokens: Sequence[int],
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage: str = "dense",
) -> Perplexity:
    """How well ``model`` foretells ``tokens``, each from those before it.

    Windows of ``window`` tokens (default: 2048, or the model's maximum where that is less) begin every ``stride``
    tokens (default: half a window; at most window - 1), each at position 0 with an empty cache, up to the first that
    reaches the text's end. A window scores what those before it have not, so each token but the text's first is scored
    once: in the first window with all that is before it, later with at least window - stride tokens and at most
    window - 1. (The strided recipe of Hugging Face's "Perplexity of fixed-length models".)
    ``storage``: of the cache, as for `Model.new_cache`.
    ``progress``: called with the tokens scored so far, and in all.
    Raises InputError where an argument does not fit, or where the model's logits are not finite.
    """
    require(isinstance(model, Model), "model", model, "one made by exactkv.load")
    ids = prompt_ids(model, tokens)
    if len(ids) < 2:
        raise InputError("the text has one token; expected at least two, one to foretell another")
    most = model.spec.max_length
    window = min(DEFAULT_WINDOW, most) if window is None else window
    require(is_int(window) and 2 <= window <= most, "window", window, f"an integer from 2 to {most}: the model's limit")
    stride = max(1, window // 2) if stride is None else stride
    require(is_int(stride) and 1 <= stride < window, "stride", stride,
            f"an integer from 1 to {window - 1}: each window needs a token that others have scored")  # fmt: skip
    started = time.perf_counter()
    losses: list[Tensor] = []
    scored, fed, begin, total = 1, 0, 0, len(ids) - 1
    while scored < len(ids):
        end = min(begin + window, len(ids))
        for piece in _window_losses(model, ids[begin:end], scored - begin, storage):
            losses.append(piece)
            scored += len(piece)
            if progress is not None:
                progress(scored - 1, total)
        fed += end - 1 - begin
        begin += stride
    each = torch.cat(losses)
    if not bool(each.isfinite().all()):
        wrong = int((~each.isfinite()).nonzero()[0]) + 1
        raise InputError(
            f"the probability of token {wrong} is not a number above 0; its logits hold NaN or infinity. "
            "This usually means that weights or dtype do not suit: try dtype float32."
        )
    deviation = float(each.std()) if total > 1 else 0.0
    return Perplexity(total, float(each.sum()), deviation, window, stride, fed, time.perf_counter() - started)


def _window_losses(model: Model, ids: list[int], first: int, storage: str) -> Iterator[Tensor]:
    """-log p of ``ids[first:]``, each after those before it: pieces of float64 on the host, in order."""
    cache = model.new_cache(storage=storage)
    for begin in range(0, first - 1, PREFILL_WIDTH):
        model([ids[begin : min(begin + PREFILL_WIDTH, first - 1)]], cache=cache, logits="none")
    width = max(1, min(PREFILL_WIDTH, LOGITS_AT_ONCE // model.spec.vocab_size))
    for begin in range(first - 1, len(ids) - 1, width):
        end = min(begin + width, len(ids) - 1)
        logits = model([ids[begin:end]], cache=cache)
        assert logits is not None
        yield _losses(logits[0], torch.tensor(ids[begin + 1 : end + 1], device=logits.device))


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of ``targets`` [T] under ``logits`` [T, V], some rows at once."""
    rows = max(1, ROWS_AT_ONCE // logits.shape[-1])
    parts = []
    for some, named in zip(logits.split(rows), targets.split(rows), strict=True):
        wide = some.to(torch.promote_types(some.dtype, torch.float32))
        log_p = torch.log_softmax(wide, dim=-1).gather(-1, named[:, None])[:, 0]
        parts.append(-log_p.double().cpu())
    return torch.cat(parts)
