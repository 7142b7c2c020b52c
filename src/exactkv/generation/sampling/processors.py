"""What changes a row's logits before temperature: penalties, DRY, bias, banned and allowed tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exactkv.errors import InputError
from exactkv.generation.sampling.history import History
from exactkv.generation.sampling.settings import Sampling


def edited(logits: Tensor, sampling: Sampling, text: History | None) -> Tensor:
    """``logits`` [V] as float64 with the settings 1 to 5 of ``sampling`` applied; a new tensor. ``text`` is needed
    where ``sampling.reads_text``."""
    row = logits.to(torch.float64, copy=True)
    if sampling.reads_text:
        if text is None:
            raise InputError(
                "these settings look at the text, which was not given; expected a History of prompt and reply"
            )
        if sampling.penalises:
            _penalise(row, sampling, text)
        if sampling.dry_multiplier > 0:
            _discourage_repeats(row, sampling, text)
    if sampling.bias:
        ids, values = zip(*sampling.bias, strict=True)
        row[_on(row, ids)] += torch.tensor(values, dtype=row.dtype).to(row.device)
    if sampling.banned:
        row[_on(row, sampling.banned)] = -math.inf
    if sampling.allowed is not None:
        allowed = _on(row, sampling.allowed)
        row = torch.full_like(row, -math.inf).index_copy_(0, allowed, row[allowed])
    return row


def _penalise(row: Tensor, sampling: Sampling, text: History) -> None:
    ids, counts = (held.to(row.device) for held in text.counts(sampling.penalty_window))
    if len(ids) and len(row) <= int(text.greatest):
        raise InputError(f"token id {text.greatest} of the text is outside the vocabulary: 0 to {len(row) - 1}")
    held, present = row[ids], counts > 0
    penalty = sampling.repetition_penalty
    if penalty != 1:
        held = torch.where(present, torch.where(held > 0, held / penalty, held * penalty), held)
    row[ids] = held - sampling.frequency_penalty * counts - sampling.presence_penalty * present


def _discourage_repeats(row: Tensor, sampling: Sampling, text: History) -> None:
    breakers = frozenset(b for b in sampling.breakers if isinstance(b, int))
    if len(breakers) < len(set(sampling.breakers)):
        raise InputError(
            f"dry_sequence_breakers are {sampling.breakers!r}; expected token ids by now: "
            "sampling.resolved(tokenizer) gives them"
        )
    least = sampling.dry_allowed_length
    lengths = {t: n for t, n in text.repeats(sampling.dry_range, breakers).items() if n >= least}
    if lengths:
        penalties = [sampling.dry_multiplier * sampling.dry_base ** (n - least) for n in lengths.values()]
        row[_on(row, tuple(lengths))] -= torch.tensor(penalties, dtype=row.dtype).to(row.device)


def _on(row: Tensor, ids: tuple[int, ...]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64).to(row.device)
