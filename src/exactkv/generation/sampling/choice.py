"""The choice of tokens from logits, for rows that each have settings of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.cache.checks import is_int
from exactkv.errors import InputError
from exactkv.generation.sampling.filters import leading, remaining
from exactkv.generation.sampling.history import History
from exactkv.generation.sampling.noise import gumbel
from exactkv.generation.sampling.processors import edited
from exactkv.generation.sampling.settings import Sampling

Ranked = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities, the most probable first, of equal ones the lowest id."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities where one token was chosen.

    ``logprob`` and ``top_logprobs``: the model's own, of the logits as they came. ``sampled_logprob`` and
    ``sampled_top_logprobs``: of the distribution that the token was drawn from, after all settings; at temperature 0
    the token has all of the probability. The lists hold as many tokens as were asked for, or as there are with a
    probability above 0.
    """

    token: int
    logprob: float
    top_logprobs: Ranked
    sampled_logprob: float
    sampled_top_logprobs: Ranked


@dataclass(frozen=True)
class Choice:
    """A token a row. ``tokens``: int64 [B], where the logits are; -1 in a row that has nothing to choose from.
    ``peaks``: [B], the greatest logits; ``logprobs``: one a row, None where they were not asked for."""

    tokens: Tensor
    peaks: Tensor
    logprobs: tuple[Logprobs | None, ...]

    def ids(self) -> list[int]:
        """The tokens on the host. Raises InputError where a row held NaN or +inf, or nothing but -inf."""
        ids: list[int] = self.tokens.tolist()
        if ids and min(ids) < 0:
            row = next(r for r, token in enumerate(ids) if token < 0)
            peak = float(self.peaks[row])
            held = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "nothing but -inf"
            raise InputError(
                f"row {row} of the logits holds {held}; expected finite logits, -inf only for tokens not to choose. "
                "NaN from a model usually means that its weights or its dtype do not suit: try dtype float32. "
                "Nothing but -inf may come from banned_tokens, allowed_tokens and a structure."
            )
        return ids

    def each(self) -> list[Choice]:
        """The choice of each row by itself, on the host."""
        tokens, peaks = self.tokens.cpu(), self.peaks.cpu()
        return [Choice(tokens[i : i + 1], peaks[i : i + 1], self.logprobs[i : i + 1]) for i in range(len(tokens))]


def choose(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    texts: Sequence[History | None] | None = None,
    logprobs: Sequence[int | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> Choice:
    """Choose a token for each row of ``logits`` [B, V].

    ``positions``: where the chosen tokens will stand. ``texts``: prompt and reply of each row so far, needed where
    ``Sampling.reads_text``; they are only read. ``logprobs``: of how many top tokens to tell the log-probability,
    beside the chosen one's; None: of none at all. ``masks``: bool [V] a row, False for tokens that must not be chosen;
    None: all may be. Row i comes out as it does alone, bit for bit. Nothing waits for the device but log-probabilities,
    filters and masks.
    Raises InputError where arguments do not fit; rows that hold NaN, +inf or nothing but -inf show when they are read.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InputError(f"logits have the shape {list(logits.shape)}; expected [B, V], V at least 1")
    batch, vocab = logits.shape
    texts = [None] * batch if texts is None else texts
    asked = [None] * batch if logprobs is None else logprobs
    masks = [None] * batch if masks is None else masks
    lists = {"samplings": samplings, "positions": positions, "texts": texts, "logprobs": asked, "masks": masks}
    for name, given in lists.items():
        if len(given) != batch:
            raise InputError(f"{len(given)} {name} were given for {batch} rows; expected one a row")
    for sampling, count in zip(samplings, asked, strict=True):
        if sampling.greatest_id >= vocab:
            raise InputError(f"sampling names token {sampling.greatest_id}; the vocabulary is 0 to {vocab - 1}")
        if count is not None and (not is_int(count) or count < 0):
            raise InputError(f"logprobs is {count!r}; expected an integer >= 0, or None")
    peaks, tokens = logits.max(dim=1)  # NaN wins; of equal logits the first
    peaks = peaks.double()
    told: list[Logprobs | None] = [None] * batch
    plain: list[int] = []  # rows that need nothing but temperature: one call where launches cost more than arithmetic
    for row, (sampling, text, count, mask) in enumerate(zip(samplings, texts, asked, masks, strict=True)):
        if sampling.edits or sampling.filters or count is not None or mask is not None:
            tokens[row], peaks[row], told[row] = _alone(logits[row], sampling, positions[row], text, count, mask)
        elif sampling.temperature > 0:
            plain.append(row)
    if logits.is_cuda and plain:
        parts = [(plain, logits[plain], peaks[plain])]
    else:
        parts = [([row], logits[row : row + 1], peaks[row : row + 1]) for row in plain]
    for rows, part, greatest in parts:
        scaled = _scaled(part, greatest, [samplings[r].temperature for r in rows])
        tokens[rows] = _drawn(scaled, [samplings[r].seed for r in rows], [positions[r] for r in rows])
    return Choice(torch.where(torch.isfinite(peaks), tokens, -1), peaks, tuple(told))


def choose_run(
    logits: Tensor,
    sampling: Sampling,
    position: int,
    text: History | None = None,
    draft: Sequence[int] = (),
    logprobs: int | None = None,
) -> Choice:
    """Choose for T successive positions of one text, the first at ``position``, as one at a time. ``logits`` [T, V].

    Row t is chosen as if ``draft[:t]`` had been added to ``text``, so ``draft`` has T - 1 tokens. ``text`` stays as it
    was.
    """
    count = logits.shape[0]
    if len(draft) != max(0, count - 1):
        raise InputError(f"the draft has {len(draft)} tokens for {count} rows of logits; expected one token fewer")
    positions = range(position, position + count)
    if count == 0 or not sampling.reads_text or text is None:
        return choose(logits, [sampling] * count, positions, [text] * count, [logprobs] * count)
    length, choices = len(text), []
    try:
        for t in range(count):
            choices.append(choose(logits[t : t + 1], [sampling], positions[t : t + 1], [text], [logprobs]))
            text.extend(draft[t : t + 1])
    finally:
        text.rewind(length)
    tokens, peaks = (torch.cat(parts) for parts in zip(*((c.tokens, c.peaks) for c in choices), strict=True))
    return Choice(tokens, peaks, tuple(told for c in choices for told in c.logprobs))


def _alone(
    logits: Tensor, sampling: Sampling, position: int, text: History | None, count: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Logprobs | None]:
    """The token of one row [V], its peak, and what was asked for beside."""
    row = edited(logits, sampling, text) if sampling.edits else logits
    if mask is not None:
        row = row.masked_fill(~mask.to(row.device), -math.inf)
    best, greatest = logits.max(), row.max()
    peak = torch.where(torch.isfinite(best), greatest, best)
    if (sampling.temperature == 0 and count is None) or not bool(torch.isfinite(peak)):
        return row.argmax(), peak, None
    if sampling.temperature == 0:
        token = row.argmax()
        drawn = None
    else:
        scaled = _scaled(row[None], greatest[None], [sampling.temperature])[0]
        ids, drawn = remaining(scaled, sampling, position)
        place = _drawn(drawn[None], [sampling.seed], [position], ids)[0]
        token = place if ids is None else ids[place]
    if count is None:
        return token, peak, None
    chosen = int(token)
    own = torch.log_softmax(logits.double(), dim=0)
    if drawn is None:
        after, top_after = 0.0, ((chosen, 0.0),)[:count]
    else:
        sampled = torch.log_softmax(drawn, dim=0)
        after, top_after = float(sampled[place]), ranked(sampled, count, ids)
    return token, peak, Logprobs(chosen, float(own[chosen]), ranked(own, count), after, top_after)


def ranked(logs: Tensor, count: int, ids: Tensor | None = None) -> Ranked:
    """The ``count`` greatest of ``logs`` [N] that are not -inf. ``ids``: their tokens; None: 0 to N - 1."""
    if count == 0:
        return ()
    top = leading(logs, count)
    top = top[logs[top].argsort(descending=True, stable=True)]
    named = top if ids is None else ids[top]
    pairs = zip(named.tolist(), logs[top].tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > -math.inf)


def _scaled(rows: Tensor, peaks: Tensor, temperatures: Sequence[float]) -> Tensor:
    """float64 [B, V], at most 0, so that it never overflows."""
    divisors = torch.tensor(temperatures, dtype=torch.float64).to(rows.device)
    return (rows.double() - peaks[:, None].double()).div_(divisors[:, None])


def _drawn(scaled: Tensor, seeds: Sequence[int], positions: Sequence[int], ids: Tensor | None = None) -> Tensor:
    """Indices [B] into the columns of ``scaled`` [B, N], whose token ids are ``ids`` (None: 0 to N - 1)."""
    device = scaled.device
    ids = torch.arange(scaled.shape[1], device=device) if ids is None else ids
    first, second = (torch.tensor(list(numbers), dtype=torch.int64).to(device) for numbers in (seeds, positions))
    return gumbel(first, second, ids).add_(scaled).argmax(dim=1)
