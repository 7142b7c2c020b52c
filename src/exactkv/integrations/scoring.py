"""Log-probabilities of continuations: contexts that share a beginning feed it once, and all continuations of a context
go on from its one cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.cache import Cache
from exactkv.generation.reuse import PREFILL_WIDTH, common_prefix, reuse
from exactkv.models.model import Model


@dataclass(frozen=True)
class Score:
    """``logprob``: the sum of a continuation's log-probabilities; ``greedy``: whether each of its tokens is the most
    probable one in its place."""

    logprob: float
    greedy: bool


Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Context and continuation, neither of them empty; together at most one token more than the model's maximum."""


def score(model: Model, pairs: Sequence[Pair], max_rows: int = 32, step_tokens: int = PREFILL_WIDTH) -> Iterator[
    tuple[int, Score]
]:  # fmt: skip
    """The score of each pair with its place in ``pairs``, in the order in which they come. ``max_rows``: contexts or
    continuations at once; ``step_tokens``: the most tokens, padding included, whose logits are held at once."""
    contexts = sorted({context for context, _ in pairs})
    places: dict[tuple[int, ...], list[int]] = {context: [] for context in contexts}
    for place, (context, _) in enumerate(pairs):
        places[context].append(place)
    trunk = model.new_cache()
    for start in range(0, len(contexts), max_rows):
        group = contexts[start : start + max_rows]
        cache = _fed_but_the_last(model, trunk, group, step_tokens)
        rows = [(row, place) for row, context in enumerate(group) for place in places[context]]
        for first in range(0, len(rows), max_rows):
            some = rows[first : first + max_rows]
            texts = [(group[row][-1], *pairs[place][1]) for row, place in some]
            scores = _scores(model, cache.select([row for row, _ in some]), texts, step_tokens)
            yield from zip((place for _, place in some), scores, strict=True)


def _fed_but_the_last(model: Model, trunk: Cache, contexts: Sequence[tuple[int, ...]], step_tokens: int) -> Cache:
    """A row for each context, fed up to its last token. ``contexts`` are in order; ``trunk`` goes to their common
    beginning."""
    shared = min(common_prefix(contexts[0], contexts[-1]), *(len(context) - 1 for context in contexts))
    if shared:
        at = reuse(trunk, contexts[0][: shared + 1])
        while at < shared:
            end = min(at + step_tokens, shared)
            model([contexts[0][at:end]], cache=trunk, logits="none")
            at = end
    else:
        trunk.rewind(0)
    cache = trunk.fork(len(contexts))
    for pieces, lengths in _pieces([context[shared:-1] for context in contexts], step_tokens):
        model(pieces, cache=cache, lengths=lengths, logits="none")
    return cache


def _scores(model: Model, cache: Cache, texts: Sequence[tuple[int, ...]], step_tokens: int) -> list[Score]:
    """Of each text but its first token, which follows what its row of ``cache`` holds."""
    sums = torch.zeros(len(texts), dtype=torch.float64, device=model.device)
    greedy = torch.ones(len(texts), dtype=torch.bool, device=model.device)
    targets = [text[1:] for text in texts]
    done = 0
    for pieces, lengths in _pieces([text[:-1] for text in texts], step_tokens):
        width = len(pieces[0])
        logits = model(pieces, cache=cache, lengths=lengths, logits="all")
        assert logits is not None
        wanted = _padded([target[done : done + width] for target in targets], width)
        valid = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        wanted, valid = wanted.to(logits.device), valid.to(logits.device)
        chosen, best = _chosen(logits, wanted)
        sums += torch.where(valid, chosen, 0.0).sum(dim=1)
        greedy &= (best | ~valid).all(dim=1)
        done += width
    return [Score(total, all_best) for total, all_best in zip(sums.tolist(), greedy.tolist(), strict=True)]


def _chosen(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens ``wanted`` [B, T] by ``logits`` [B, T, V]: log-probability, float64 [B, T], and whether it is the most
    probable one."""
    rows = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    values = rows.gather(2, wanted[..., None])[..., 0].double() - rows.logsumexp(dim=2).double()
    return values, rows.argmax(dim=2) == wanted


def _pieces(rows: Sequence[Sequence[int]], step_tokens: int) -> Iterator[tuple[list[list[int]], list[int]]]:
    """``rows`` of any lengths, a piece of each at a time, padded, with what of it is valid."""
    width = max(1, step_tokens // max(1, len(rows)))
    for start in range(0, max(map(len, rows)), width):
        parts = [list(row[start : start + width]) for row in rows]
        yield _padded(parts, max(map(len, parts))).tolist(), [len(part) for part in parts]


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)
