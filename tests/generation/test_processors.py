"""Each setting against its plain, slow definition, and against transformers where that has it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactkv.generation.sampling import History, Sampling
from exactkv.generation.sampling.filters import leading, nucleus, remaining, typical, without_top_choices
from exactkv.generation.sampling.history import LONGEST
from exactkv.generation.sampling.processors import edited

LEVELS = st.lists(st.integers(-6, 6).map(float) | st.just(-math.inf), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)
"""Few distinct logits, so that ties are common."""


def scaled(row: list[float]) -> Tensor:
    made = torch.tensor(row, dtype=torch.float64)
    return made - made.max()


def ordered(keys: list[float]) -> list[int]:
    return sorted(range(len(keys)), key=lambda i: (-keys[i], i))


def smallest_set(keys: list[float], weights: list[float], mass: float) -> list[int]:
    kept, total = [], 0.0
    for token in ordered(keys):
        kept.append(token)
        total += weights[token]
        if total >= mass:
            break
    return sorted(kept)


@given(LEVELS, st.integers(1, 50))
def test_top_k(row: list[float], k: int) -> None:
    assert leading(scaled(row), k).tolist() == sorted(ordered(row)[:k])


@given(LEVELS, st.floats(0.01, 1.0) | st.sampled_from([0.25, 0.5, 0.75]))
def test_top_p(row: list[float], top_p: float) -> None:
    probabilities = torch.softmax(scaled(row), dim=0).tolist()
    assert nucleus(scaled(row), top_p).tolist() == smallest_set(probabilities, probabilities, top_p)


@given(LEVELS, st.floats(0.01, 1.0))
def test_typical(row: list[float], mass: float) -> None:
    logs = torch.log_softmax(scaled(row), dim=0).tolist()
    weights = torch.log_softmax(scaled(row), dim=0).exp().tolist()
    entropy = float(
        -torch.tensor([lg * w if w > 0 else 0.0 for lg, w in zip(logs, weights, strict=True)]).double().sum()
    )
    keys = [-abs(-lg - entropy) for lg in logs]
    found = typical(scaled(row), mass).tolist()
    border = sorted(keys, reverse=True)
    if all(abs(a - b) > 1e-12 or a == b for a, b in pairwise(border) if math.isfinite(a)):
        assert found == smallest_set(keys, weights, mass)
    assert math.fsum(weights[t] for t in found) >= mass - 1e-12


@given(LEVELS, st.floats(0.01, 0.5))
def test_xtc(row: list[float], threshold: float) -> None:
    probabilities = torch.softmax(scaled(row), dim=0).tolist()
    top = [t for t in ordered(probabilities) if probabilities[t] >= threshold]
    assert without_top_choices(scaled(row), threshold).tolist() == [t for t in range(len(row)) if t not in top[:-1]]


@given(LEVELS, st.sampled_from([0.001, 0.03, 0.3, 1.0]))
def test_min_p(row: list[float], min_p: float) -> None:
    ids, _ = remaining(scaled(row), Sampling(1.0, min_p=min_p), 0)
    assert ids is not None
    assert ids.tolist() == [t for t, s in enumerate(scaled(row).tolist()) if math.exp(s) >= min_p]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999999])
def test_a_large_flat_vocabulary(top_p: float) -> None:
    """The set is far larger than the first look at the most probable tokens; every third logit is equal."""
    row = torch.randn(6000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    row[::3] = 0.05
    row -= row.max().item()
    probabilities = torch.softmax(row, dim=0).tolist()
    assert nucleus(row, top_p).tolist() == smallest_set(probabilities, probabilities, top_p)
    assert leading(row, 5000).tolist() == sorted(ordered(row.tolist())[:5000])


@settings(max_examples=60)
@given(st.data())
def test_chains_are_those_of_transformers(data: st.DataObject) -> None:
    """Without ties, which it keeps all; penalties, temperature and filters in the same order as ours."""
    hf = pytest.importorskip("transformers.generation.logits_process")
    seed = data.draw(st.integers(0, 1000))
    logits = torch.randn(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    text = data.draw(st.lists(st.integers(0, 59), min_size=1, max_size=30))
    penalty, temperature = data.draw(st.sampled_from([0.7, 1.0, 1.4])), data.draw(st.sampled_from([0.5, 1.0, 1.5]))
    k, p = data.draw(st.sampled_from([0, 3, 20])), data.draw(st.sampled_from([1.0, 0.6, 0.95]))
    min_p, typical_p = data.draw(st.sampled_from([0.0, 0.02, 0.2])), data.draw(st.sampled_from([1.0, 0.4, 0.9]))
    chain = [hf.RepetitionPenaltyLogitsProcessor(penalty), hf.TemperatureLogitsWarper(temperature)]
    chain += [hf.TopKLogitsWarper(k)] if k else []
    chain += [hf.TopPLogitsWarper(p)] if p < 1 else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p else []
    chain += [hf.TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    expected = logits[None].clone()
    for one in chain:
        expected = one(torch.tensor([text]), expected)
    sampling = Sampling(
        temperature, top_k=k, top_p=p, min_p=min_p, typical_p=typical_p, repetition_penalty=penalty
    )  # fmt: skip
    row = edited(logits, sampling, History(text))
    ids, kept = remaining((row - row.max()) / temperature, sampling, 0)
    ids = torch.arange(60) if ids is None else ids
    assert ids.tolist() == (expected[0] > -math.inf).nonzero().flatten().tolist()
    ours, theirs = torch.softmax(kept, dim=0), torch.softmax(expected[0, ids], dim=0)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)


def plainly_edited(logits: list[float], sampling: Sampling, text: list[int]) -> list[float]:
    """Settings 1 to 5 by their definitions."""
    row = list(logits)
    counts = Counter(text if sampling.penalty_window is None else text[-sampling.penalty_window :])
    for token, count in counts.items():
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= sampling.frequency_penalty * count
        row[token] -= sampling.presence_penalty
    for token, length in plain_dry(text, sampling).items():
        if length >= sampling.dry_allowed_length:
            row[token] -= sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
    for token, value in sampling.bias:
        row[token] += value
    for token in range(len(row)):
        if token in sampling.banned or (sampling.allowed is not None and token not in sampling.allowed):
            row[token] = -math.inf
    return row


def plain_dry(text: list[int], sampling: Sampling) -> dict[int, int]:
    """The longest match before each next token, as the first implementation finds them."""
    if sampling.dry_range is not None:
        text = text[-sampling.dry_range :]
    lengths: dict[int, int] = {}
    if not text or text[-1] in sampling.breakers:
        return lengths
    for place in range(len(text) - 1):
        if text[place] != text[-1] or text[place + 1] in sampling.breakers:
            continue
        length = 1
        while length < 50 and place - length >= 0 and text[place - length] == text[-1 - length]:
            if text[-1 - length] in sampling.breakers:
                break
            length += 1
        lengths[text[place + 1]] = max(length, lengths.get(text[place + 1], 0))
    return lengths


WINDOWS = st.none() | st.integers(1, 9)


@settings(max_examples=150)
@given(st.data())
def test_logits_are_edited_by_definition_while_the_text_grows_and_is_cut(data: st.DataObject) -> None:
    """One history through any appends and rewinds (drafts), asked at any time or not (fault S: a prefix counts too)."""
    tokens = st.integers(0, data.draw(st.integers(0, 4)))
    sampling = Sampling(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -0.25])),
        penalty_window=data.draw(WINDOWS),
        dry_multiplier=data.draw(st.sampled_from([0.0, 0.5])),
        dry_base=data.draw(st.sampled_from([1.0, 1.75])),
        dry_allowed_length=data.draw(st.integers(1, 3)),
        dry_sequence_breakers=data.draw(st.sets(tokens, max_size=1)),
        dry_range=data.draw(WINDOWS),
        logit_bias={2: 1.5},
        banned_tokens=[3],
    )
    logits = torch.tensor([1.0, -2.0, 0.0, 5.0, -math.inf, 0.5], dtype=torch.float64)
    text = data.draw(st.lists(tokens, max_size=12))
    history = History(text)
    for action in data.draw(
        st.lists(st.sampled_from(["append", "append", "extend", "rewind", "ask", "ask"]), max_size=12)
    ):
        if action == "append":
            text = [*text, data.draw(tokens)]
            history.append(text[-1])
        elif action == "extend":
            more = data.draw(st.lists(tokens, max_size=5))
            text = text + more
            history.extend(more)
        elif action == "rewind":
            text = text[: data.draw(st.integers(0, len(text)))]
            history.rewind(len(text))
        else:
            found = edited(logits, sampling, history).tolist()
            assert found == pytest.approx(plainly_edited(logits.tolist(), sampling, text), abs=1e-12)
        assert len(history) == len(text)


def test_dry_stops_counting_at_fifty() -> None:
    history = History([1, 2] * 100)
    for step in range(3):
        assert history.repeats(None, frozenset()) == {1 + step % 2: LONGEST}
        history.append(1 + step % 2)
    assert History([0, *[7] * 20]).repeats(None, frozenset()) == {7: 19}
    assert History([1, 2, 3, 1, 2]).repeats(None, frozenset([3])) == {}
    sampling = Sampling(dry_multiplier=1.0, dry_base=100, dry_sequence_breakers=())
    assert math.isfinite(edited(torch.zeros(3), sampling, History([1, 2] * 100)).min())


def test_many_tokens_and_a_window() -> None:
    """More distinct tokens than there was room for; a window that moves by many at once."""
    text = torch.randint(0, 500, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    history, sampling = History(text[:10]), Sampling(frequency_penalty=1.0, penalty_window=700)
    for end in (10, 11, 900, 2999, 3000, 1500):
        history.extend(text[len(history) : end])
        history.rewind(end)
        counted = -edited(torch.zeros(500), sampling, history)
        expected = Counter(text[max(0, end - 700) : end])
        assert counted.tolist() == [expected[t] for t in range(500)]


def test_the_models_logits_are_left_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.ones(8, dtype=dtype)
        edited(logits, Sampling(presence_penalty=1.0, banned_tokens=[2], logit_bias={3: 1.0}), History([1]))
        assert logits.tolist() == [1.0] * 8
