"""Scores of continuations are those of one forward pass over each text alone, whatever is shared and batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.integrations.scoring import score
from tests.generation.tiny_text import VOCAB, text_model

MODEL = text_model(max_length=64)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple)
long = st.builds(lambda head, tail: (*head, *tail), st.sampled_from([(), (1, 2) * 10, (5,) * 30]), tokens)


def alone(context, continuation):
    logits = MODEL([[*context, *continuation][:-1]])[0, len(context) - 1 :]
    wanted = torch.tensor(continuation)
    values = torch.log_softmax(logits, dim=1).gather(1, wanted[:, None]).sum()
    return float(values), bool((logits.argmax(dim=1) == wanted).all())


@settings(max_examples=30)
@given(
    st.lists(st.tuples(long, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10).map(tuple)), max_size=9),
    st.integers(1, 5),
    st.sampled_from([1, 7, 64]),
)
def test_scores_are_those_of_each_text_alone(pairs, max_rows, step_tokens):
    found = dict(score(MODEL, pairs, max_rows, step_tokens))
    assert sorted(found) == list(range(len(pairs)))
    for place, (context, continuation) in enumerate(pairs):
        logprob, greedy = alone(context, continuation)
        assert found[place].logprob == pytest.approx(logprob, abs=1e-8) and found[place].greedy == greedy


def test_what_contexts_share_is_fed_once():
    class Counted(type(MODEL)):
        fed = 0

        def __call__(self, ids, *args, **options):
            lengths = options.get("lengths") or [len(row) for row in ids]
            Counted.fed += sum(lengths)
            return super().__call__(ids, *args, **options)

    model = text_model(max_length=512, make=Counted)
    shots = tuple(i % 200 for i in range(300))
    pairs = [((*shots, i), (j, j)) for i in range(8) for j in range(4)]
    list(score(model, pairs))
    assert Counted.fed <= 300 + 32 * 2 + 8


def test_greedy_text_is_greedy():
    text = [3]
    for _ in range(12):
        text.append(int(MODEL([text])[0, -1].argmax()))
    ((_, found),) = score(MODEL, [((3,), tuple(text[1:]))], step_tokens=4)
    assert found.greedy
    ((_, other),) = score(MODEL, [((3,), (*text[1:-1], (text[-1] + 1) % VOCAB))], step_tokens=4)
    assert not other.greedy and other.logprob < found.logprob
