from __future__ import annotations

from typing import Any

import pytest
import torch

from exactkv.errors import InputError
from exactkv.generation import Sampling, end_token_ids, stream
from exactkv.generation.reuse import PREFILL_WIDTH
from exactkv.models.model import Model
from tests.generation.tiny_text import BOS, END, EOS, VOCAB, byte_tokenizer, scripted, text_model

SAMPLED = Sampling(1.0, 0.9, seed=4)


def test_greedy_is_the_argmax_of_a_forward_pass() -> None:
    model = text_model()
    generation = stream(model, [5, 9, 2], max_tokens=40, stop_token_ids=())
    pieces = list(generation)
    whole = model([[5, 9, 2, *generation.tokens]])
    assert whole is not None
    assert generation.tokens == whole[0, 2:-1].argmax(dim=-1).tolist()
    assert [t for piece in pieces for t in piece.tokens] == generation.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * 39 + ["length"]
    assert generation.cache.tokens(0) == [5, 9, 2, *generation.tokens[:-1]]


@pytest.mark.parametrize("length", [1, PREFILL_WIDTH, PREFILL_WIDTH + 1, 2 * PREFILL_WIDTH + 300])
def test_a_long_prompt_is_fed_in_pieces(length: int) -> None:
    model, calls = text_model(), []
    prompt = [i * 7 % 250 for i in range(length)]
    once = model.new_cache()
    model([prompt[:-1]], cache=once) if length > 1 else None
    expected = stream(model, prompt, max_tokens=5, sampling=SAMPLED, cache=once, stop_token_ids=())
    list(expected)

    class Counting(Model):
        def __call__(self, tokens: Any, **options: Any) -> torch.Tensor | None:
            calls.append((len(tokens[0]), options["logits"]))
            return super().__call__(tokens, **options)

    generation = stream(text_model(make=Counting), prompt, max_tokens=5, sampling=SAMPLED, stop_token_ids=())
    list(generation)
    assert generation.tokens == expected.tokens
    prefill, decode = calls[:-4], calls[-4:]
    assert decode == [(1, "last")] * 4 and sum(width for width, _ in prefill) == length
    assert [kind for _, kind in prefill] == ["none"] * (len(prefill) - 1) + ["last"]
    assert max(width for width, _ in prefill) <= PREFILL_WIDTH and len(prefill) <= (length - 1) // PREFILL_WIDTH + 2
    assert generation.stats.prompt_tokens == generation.stats.fed_tokens == length
    assert (expected.stats.cached_tokens, expected.stats.fed_tokens) == (length - 1, 1)


def test_characters_come_whole() -> None:
    text = "naïve 日本 🎉 end"
    generation = stream(scripted(text, END), "x", max_tokens=100)
    pieces = list(generation)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert [len(piece.tokens) for piece in pieces if piece.text in ("ï", "日", "🎉")] == [2, 3, 4]
    assert generation.finish_reason == pieces[-1].finish_reason == "stop"
    assert pieces[-1].text == "" and pieces[-1].tokens == (END,)
    assert [t for piece in pieces for t in piece.tokens] == generation.tokens


def test_a_character_cut_off_by_the_limit_is_not_lost() -> None:
    pieces = list(stream(scripted("ab日本"), "x", max_tokens=7))  # 2 bytes, 3 bytes, 2 of 3
    assert "".join(piece.text for piece in pieces) == "ab日\ufffd"
    assert pieces[-1].finish_reason == "length"


def test_end_tokens_are_the_configs_and_the_tokenizers_unless_given() -> None:
    model = text_model(tokenizer=byte_tokenizer())
    assert end_token_ids(model) == {END, EOS}
    model.generation_config["eos_token_id"] = 7
    assert end_token_ids(model) == {7, EOS}
    assert end_token_ids(text_model()) == {END}
    for end in (END, EOS):
        assert "".join(p.text for p in stream(scripted("ab", end, 65), "x")) == "ab"
    ignored = stream(scripted("ab", END, EOS), "x", max_tokens=4, stop_token_ids=())
    assert "".join(p.text for p in ignored) == "ab" and ignored.finish_reason == "length"
    own = stream(scripted("abc"), "x", stop_token_ids=byte_tokenizer().encode("b", add_special_tokens=False))
    assert "".join(p.text for p in own) == "a" and own.finish_reason == "stop"


def test_it_ends_where_the_model_does() -> None:
    generation = stream(text_model(max_length=10), [1, 2, 3], max_tokens=50, stop_token_ids=())
    pieces = list(generation)
    assert len(generation.tokens) == 8 and pieces[-1].finish_reason == "length"
    assert generation.cache.lengths == [10]
    full = stream(text_model(max_length=10), [1] * 10, stop_token_ids=())
    assert len(list(full)) == 1 and full.finish_reason == "length"


def test_prompts_in_every_form() -> None:
    tokenizer = byte_tokenizer()
    model = text_model(tokenizer=tokenizer)
    assert stream(model, "hi").prompt == (BOS, *tokenizer.encode("hi", add_special_tokens=False))
    assert stream(model, [1, 2]).prompt == stream(model, (1, 2)).prompt == (1, 2)
    assert stream(model, torch.tensor([1, 2])).prompt == (1, 2)  # type: ignore[arg-type]
    chat = stream(model, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert chat.prompt == tuple(tokenizer.encode("system:s\nuser:u\nassistant:", add_special_tokens=False))
    assert stream(model, "").prompt == (BOS,)


def test_a_conversation_goes_on_in_its_cache() -> None:
    model, cache = text_model(), None
    said: list[int] = []
    for turn in ([1, 2, 3], [4] * 20, [5]):
        generation = stream(model, [*said, *turn], max_tokens=9, sampling=SAMPLED, cache=cache, stop_token_ids=())
        list(generation)
        cache = generation.cache
        assert cache.tokens(0) == [*said, *turn, *generation.tokens[:-1]]
        assert (generation.stats.cached_tokens, generation.stats.fed_tokens) == (len(said), len(turn))
        said = cache.tokens(0)
        fresh = stream(model, said[: -len(generation.tokens) + 1], max_tokens=9, sampling=SAMPLED, stop_token_ids=())
        list(fresh)
        assert fresh.tokens == generation.tokens


class Interrupting(Model):
    """Raises KeyboardInterrupt in the middle of the n-th layer that is computed."""

    countdown = -1

    def arm(self, countdown: int) -> None:
        self.countdown = countdown
        for layer in self.decoder.layers:
            layer.attention = self._counting(layer.attention)  # type: ignore[assignment]

    def _counting(self, inner: Any) -> Any:
        def call(*args: Any) -> torch.Tensor | None:
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt
            return inner(*args)  # type: ignore[no-any-return]

        return call


@pytest.mark.parametrize("countdown", [1, 2, 3, 4, 5, 6, 7, 30])
def test_ctrl_c_leaves_the_cache_exact(countdown: int) -> None:
    """Two layers a forward pass, two passes of prefill: so both are interrupted, and decoding too."""
    model = text_model(make=Interrupting)
    assert isinstance(model, Interrupting)
    prompt = [i % 200 for i in range(PREFILL_WIDTH + 40)]
    model.arm(countdown)
    generation = stream(model, prompt, max_tokens=50, stop_token_ids=())
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert list(generation) == []
    cache, stats = generation.cache, generation.stats
    cache.check_integrity()
    done = (countdown - 1) // 2
    stands = [0, PREFILL_WIDTH, *([len(prompt) - 1] if cache.spec.forgets else [])]  # before each pass of the prefill
    passes = len(stands)
    assert cache.lengths == [stands[done] if done < passes else len(prompt) + done - passes]
    assert stats.fed_tokens == min(cache.lengths[0], len(prompt))
    assert stats.generated_tokens == len(generation.tokens) == max(0, done - passes + 1)
    assert (stats.first_token_seconds is None) == (done < passes)
    rest = [*prompt, *generation.tokens][cache.lengths[0] :]
    going_on = model([rest], cache=cache, logits="last")
    whole = model([[*prompt, *generation.tokens]])
    assert going_on is not None and whole is not None
    assert float((going_on[0] - whole[0, -1]).abs().max()) < 1e-12 * float(whole.abs().max())


def test_closed_between_pieces() -> None:
    generation = stream(text_model(), [1, 2], max_tokens=30, stop_token_ids=())
    for _ in range(3):
        next(generation)
    generation.close()
    assert list(generation) == []
    assert generation.cache.tokens(0) == [1, 2, *generation.tokens[:2]]
    assert generation.finish_reason is None and generation.stats.generated_tokens == 3


def test_statistics() -> None:
    generation = stream(text_model(), [1, 2, 3], max_tokens=6, stop_token_ids=())
    before = generation.stats
    assert (before.prompt_tokens, before.fed_tokens, before.generated_tokens) == (3, 0, 0)
    assert before.prompt_rate is before.decode_rate is before.first_token_seconds is None
    list(generation)
    stats = generation.stats
    assert stats.generated_tokens == 6 and stats.cache_bytes == generation.cache.nbytes > 0
    assert stats.prompt_rate == 3 / stats.prefill_seconds
    assert stats.decode_rate == 5 / stats.decode_seconds
    assert stats.first_token_seconds == stats.prefill_seconds


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"max_tokens": 2.5}, "max_tokens is 2.5"),
        ([1], {"sampling": 0.7}, "sampling is 0.7"),
        ([1] * 33, {}, "the prompt has 33 tokens; at most 32 fit"),
        ([[1, 2]], {}, "expected one text, one list of token ids"),
        (["a", "b"], {}, "expected one text"),
        ([1.5], {}, "expected one text"),
        (None, {}, "the prompt is 'None'"),
        ([1, VOCAB], {}, f"token id {VOCAB} of the prompt is outside"),
        ([-1], {}, "token id -1"),
        ("text", {}, "this model has no tokenizer"),
        ([{"role": "user", "content": "x"}], {}, "this model has no tokenizer"),
    ],
)
def test_arguments_are_checked(prompt: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        stream(text_model(max_length=32), prompt, **options)


def test_caches_are_checked() -> None:
    model = text_model(max_length=32)
    with pytest.raises(InputError, match="the cache has 2 rows"):
        stream(model, [1], cache=model.new_cache(2))
    other = text_model(max_length=32)
    other.decoder.weights["final_norm.weight"].fill_(2)
    cache = Model(other.spec, other.decoder.weights).new_cache()
    with pytest.raises(InputError, match="another model's"):
        stream(model, [1, 2, 3], cache=cache)
    with pytest.raises(InputError, match="no chat template"):
        stream(text_model(tokenizer=byte_tokenizer(None)), [{"role": "user", "content": "x"}])


def test_a_cache_that_somebody_else_moves_is_noticed() -> None:
    model = text_model()
    cache = model.new_cache()
    first, second = (stream(model, [1, 2, 3], max_tokens=9, stop_token_ids=(), cache=cache) for _ in range(2))
    next(first)
    with pytest.raises(InputError, match="something else used it"):
        next(second)
    assert len(list(first)) == 8
    alone = stream(model, [1, 2, 3], max_tokens=9, stop_token_ids=())
    next(alone)
    alone.cache.rewind(0)
    with pytest.raises(InputError, match="something else used it"):
        list(alone)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": 3}, "cache is a int"),
        ({"stop_token_ids": 3}, "stop_token_ids is a int"),
        ({"stop_token_ids": ["a"]}, "token ids, which are integers"),
        ({"stop_token_ids": [[1]]}, "token ids, which are integers"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        stream(text_model(), [1], **options)
    with pytest.raises(InputError, match="model is a str"):
        stream("smollm2", "hi")  # type: ignore[arg-type]


def test_nan_is_said_to_be_nan() -> None:
    model = text_model()
    model.decoder.weights["final_norm.weight"].fill_(torch.nan)
    broken = Model(model.spec, model.decoder.weights)
    with pytest.raises(InputError, match="holds NaN.*float32"):
        next(stream(broken, [1, 2]))
