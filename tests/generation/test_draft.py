"""Drafts change how fast a text comes, never the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation import Sampling, stream
from exactkv.generation.draft import DraftLength, ModelDraft, PromptLookup, make_draft
from tests.generation.test_conversation import KINDS, chat_model
from tests.generation.test_engine import Wrong
from tests.generation.tiny_text import VOCAB

MODELS = {kind: chat_model(kind) for kind in KINDS}
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.8, presence_penalty=0.5)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_every_draft(kind: str, sampling: Sampling) -> None:
    model = MODELS[kind]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    plain = stream(model, prompt, 40, sampling, stop_token_ids=())
    list(plain)
    whole = [*prompt, *plain.tokens]
    drafts: list[Any] = ["lookup", model, chat_model("full"), *(Wrong(whole, right) for right in (0, 1, 3, 99))]
    for draft in drafts:
        made = stream(model, prompt, 40, sampling, stop_token_ids=(), draft=draft, draft_tokens=5)
        pieces = list(made)
        assert made.tokens == plain.tokens and "".join(p.text for p in pieces) == plain.text
        assert made.cache.lengths == [len(whole) - 1] and made.cache.tokens(0) == whole[:-1]
        made.cache.check_integrity()
        stats = made.stats
        assert stats.prompt_tokens == stats.cached_tokens + stats.fed_tokens
        assert 0 <= stats.accepted_tokens <= stats.drafted_tokens
        if draft is model or (isinstance(draft, Wrong) and draft.right == 99):
            assert stats.accepted_tokens > 25  # it says the same: the noise is the same


@pytest.mark.parametrize("kind", KINDS)
def test_ends_within_a_draft(kind: str) -> None:
    model = MODELS[kind]
    prompt = [7, 7, 7]
    plain = stream(model, prompt, 30, stop_token_ids=())
    list(plain)
    for place in (3, 8, 17):
        stops = [plain.tokens[place]]
        short = stream(model, prompt, 30, stop_token_ids=stops)
        list(short)
        made = stream(model, prompt, 30, stop_token_ids=stops, draft=Wrong([*prompt, *plain.tokens], 99))
        list(made)
        assert (made.tokens, made.finish_reason) == (short.tokens, "stop")
        assert made.cache.lengths == [len(prompt) + len(made.tokens) - 1]
    for most in (1, 2, 5):
        made = stream(model, prompt, most, stop_token_ids=(), draft=Wrong([*prompt, *plain.tokens], 99))
        list(made)
        assert made.tokens == plain.tokens[:most]


def test_up_to_the_models_length() -> None:
    model = chat_model("hybrid", max_length=40)
    prompt = [5, 6] * 4
    plain = stream(model, prompt, 100, stop_token_ids=())
    list(plain)
    made = stream(model, prompt, 100, stop_token_ids=(), draft=Wrong([*prompt, *plain.tokens], 99))
    list(made)
    assert made.tokens == plain.tokens and made.finish_reason == plain.finish_reason == "length"


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6), st.integers(0, 3))
def test_lookup_copies_what_followed_the_longest_ending(tokens: list[int], most: int, start: int) -> None:
    draft = PromptLookup(longest=8, shortest=2)
    for end in range(min(start, len(tokens)), len(tokens)):  # it reads what is added
        draft.propose(tokens[:end], most)
    guess = draft.propose(tokens, most)
    for size in (8, 4, 2):
        places = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        if size <= len(tokens) and places:
            assert guess == tokens[places[-1] : places[-1] + most]
            return
    assert guess == []


def test_length_grows_with_success_and_rests_after_failures() -> None:
    length = DraftLength(most=16)
    for _ in range(5):
        length.learn(length.next(), length.size)
    assert length.next() == 16
    asked = 0
    for _ in range(400):
        if guessed := length.next():
            asked += guessed
            length.learn(guessed, 0)
    assert asked < 60  # of 400 tokens


def test_what_is_no_draft_is_refused() -> None:
    model = MODELS["full"]
    for wrong in ("lokup", 3, object(), PromptLookup):
        with pytest.raises(InputError, match="expected 'lookup', a model"):
            stream(model, [1], draft=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="draft_tokens"):
        stream(model, [1], draft="lookup", draft_tokens=0)
    with pytest.raises(InputError, match="shortest <= longest"):
        PromptLookup(longest=2, shortest=3)
    assert make_draft(None, model, Sampling()) is None
    assert isinstance(make_draft(model, model, Sampling()), ModelDraft) and model.spec.vocab_size == VOCAB


class Eager:
    """Gives more than it was asked for, and tries to write to what it is shown."""

    def propose(self, tokens: Any, most: int) -> Any:
        if isinstance(tokens, list):
            tokens.append(3)
        return torch.zeros(40, dtype=torch.int64) if len(tokens) % 2 else [0] * 40


@pytest.mark.parametrize("kind", KINDS)
def test_more_guesses_than_asked_for_are_cut(kind: str) -> None:
    model, prompt = MODELS[kind], [(i * 7) % VOCAB for i in range(40)]
    plain, made = (stream(model, prompt, 40, stop_token_ids=(), draft=d, draft_tokens=4) for d in (None, Eager()))
    assert list(plain) and list(made) and made.tokens == plain.tokens
    assert made.stats.drafted_tokens <= 4 * 40


def test_a_draft_model_that_says_nothing_finite_ends_no_text() -> None:
    model, spoiled = MODELS["full"], chat_model("full")
    spoiled.decoder.embedding[:] = torch.nan
    made, plain = (stream(model, [1, 2, 3], 9, stop_token_ids=(), draft=d) for d in (spoiled, None))
    assert list(made) and list(plain) and made.tokens == plain.tokens and made.stats.drafted_tokens == 0
