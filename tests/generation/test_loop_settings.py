"""The token loop with settings that look at the text, with log-probabilities and stops: hot = cold, and as defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactkv.errors import InputError
from exactkv.generation import History, Sampling, choose, stream
from tests.generation.tiny_text import END, VOCAB, byte_tokenizer, scripted, text_model

PROMPT = [5, 9, 2, 9, 9, 40, 41, 5, 9]
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8, "banned_tokens": [7]},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4, "penalty_window": 12},
    {"temperature": 0.2, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": [9], "seed": 3},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.01, "logit_bias": {3: 2.0}, "repetition_penalty": 1.2, "seed": 5},
    {"temperature": 1.2, "allowed_tokens": range(60), "xtc_probability": 0.5, "xtc_threshold": 0.02, "seed": 8},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_token_is_chosen_from_the_whole_text_so_far(settings: dict[str, Any]) -> None:
    """Against a loop without a cache, with a new history a token. The prompt counts too, with the cache cold, hot,
    partly hot and left over from another text (kind S: a reused prefix is not forgotten)."""
    model, sampling = text_model(), Sampling(**settings)
    text = list(PROMPT)
    for _ in range(25):
        logits = model([text])
        assert logits is not None
        text += choose(logits[:, -1], [sampling], [len(text)], [History(text)]).ids()
    expected = text[len(PROMPT) :]
    cold = stream(model, PROMPT, 25, sampling, stop_token_ids=())
    list(cold)
    assert cold.tokens == expected
    for held in (PROMPT, PROMPT[:4], [*PROMPT, 1, 2, 3], [*PROMPT[:4], 0, 0, 0]):
        cache = model.new_cache()
        model([held], cache=cache)
        hot = stream(model, PROMPT, 25, sampling, cache=cache, stop_token_ids=())
        list(hot)
        assert hot.stats.cached_tokens > 0
        assert hot.tokens == expected
    plain = stream(model, PROMPT, 25, Sampling(sampling.temperature, seed=sampling.seed), stop_token_ids=())
    list(plain)
    assert plain.tokens != expected  # the settings do something here


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=5, seed=2), Sampling(presence_penalty=1.5)])
def test_log_probabilities_go_with_the_tokens(sampling: Sampling) -> None:
    model = text_model()
    generation = stream(model, PROMPT, 12, sampling, stop_token_ids=(), logprobs=3)
    pieces = list(generation)
    assert [told for p in pieces for told in p.logprobs] == generation.logprobs
    assert [told.token for told in generation.logprobs] == generation.tokens
    logits = model([[*PROMPT, *generation.tokens]])
    assert logits is not None
    own = torch.log_softmax(logits[0, len(PROMPT) - 1 : -1], dim=-1)
    for at, told in zip(own, generation.logprobs, strict=True):
        assert told.logprob == pytest.approx(float(at[told.token]), abs=1e-9)
        assert [t for t, _ in told.top_logprobs] == at.topk(3).indices.tolist()
        assert told.sampled_logprob == 0 or sampling.temperature > 0
        assert len(told.sampled_top_logprobs) == (3 if sampling.temperature > 0 else 1)
    unasked = stream(model, PROMPT, 12, sampling, stop_token_ids=())
    assert all(p.logprobs == () for p in unasked)
    assert unasked.tokens == generation.tokens and unasked.logprobs == []


def test_log_probabilities_of_tokens_held_back() -> None:
    """Those of a stop string's tokens too: one a token, in the piece of the token."""
    generation = stream(scripted("ab日 stop now", END), "x", stop="stop", logprobs=0)
    pieces = list(generation)
    assert generation.text == "ab日 "
    assert [len(p.tokens) for p in pieces] == [len(p.logprobs) for p in pieces]
    assert len(generation.logprobs) == len(generation.tokens) == len("ab日 stop".encode())
    assert all(told.top_logprobs == () for told in generation.logprobs)


def test_closed_and_interrupted_while_text_is_held_back() -> None:
    generation = stream(scripted("ab<en", END), "x", stop="<end>")
    assert [next(generation).text for _ in range(2)] == ["a", "b"]
    generation.close()
    assert generation.text == "ab" and generation.finish_reason is None and len(generation.tokens) == 2

    class Stopped(Exception):
        pass

    model = scripted("ab<e", END)
    calls = model.decoder.layers[0].mlp

    def mlp(x: Any) -> Any:
        if model.calls == 4:
            raise Stopped
        return calls(x)

    model.decoder.layers[0].mlp = mlp  # type: ignore[assignment]
    generation = stream(model, "x", stop="<end>", logprobs=1)
    with pytest.raises(Stopped):
        list(generation)
    assert generation.text == "ab" and len(generation.tokens) == len(generation.logprobs) == 4
    assert generation.cache.tokens(0) == [*generation.prompt, *generation.tokens[:-1]]


def test_breakers_are_resolved_or_refused() -> None:
    sampling = Sampling(dry_multiplier=1.0)
    tokenizer = byte_tokenizer()
    generation = stream(text_model(tokenizer=tokenizer), "x", 3, sampling)
    assert generation.sampling.breakers == tuple(tokenizer.encode('\n:"*', add_special_tokens=False))
    list(generation)
    with pytest.raises(InputError, match="this model has no tokenizer; give token ids"):
        stream(text_model(), [1], 3, sampling)
    with pytest.raises(InputError, match=f"sampling names token {VOCAB}; the vocabulary is 0 to {VOCAB - 1}"):
        stream(text_model(), [1], 3, Sampling(banned_tokens=[VOCAB]))


def test_a_ban_of_all_that_the_model_wants_is_said_when_it_matters() -> None:
    model = text_model()
    generation = stream(model, [1, 2], 5, Sampling(allowed_tokens=[8], logit_bias={8: -1e308}), stop_token_ids=())
    list(generation)
    assert generation.tokens == [8] * 5  # as improbable as it is
