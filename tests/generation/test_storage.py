"""Texts from quantized caches: alone, in a batch, through a store and in a conversation they are the same."""

from __future__ import annotations

import pytest

from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.generation import generate, perplexity, stream
from exactkv.generation.conversation import Conversation
from exactkv.generation.engine import Engine
from tests.generation.test_conversation import chat_model
from tests.tiny import FULL, random_tokens, tiny_model, window

MODEL = tiny_model([FULL, window(5), FULL])
PROMPTS = [random_tokens(n, n) for n in (3, 17, 40)]


@pytest.mark.parametrize("storage", ["int8", "int4:4"])
def test_each_way_to_generate_says_what_plain_decoding_says(storage):
    plain = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(12):  # one full pass a token
            text.append(int(MODEL([text], storage=storage)[0, -1].argmax()))
        plain.append(text[len(prompt) :])
    store = PromptStore()
    for options in ({}, {"draft": "lookup"}, {"store": store}, {"store": store}, {"max_rows": 2, "step_tokens": 8}):
        done = generate(MODEL, PROMPTS, max_tokens=12, stop_token_ids=(), storage=storage, **options)
        assert [list(one.tokens) for one in done] == plain, options
    assert sum(one.usage.cached_tokens for one in generate(
        MODEL, PROMPTS, max_tokens=2, stop_token_ids=(), storage=storage, store=store)) > 50  # fmt: skip
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        running = stream(MODEL, prompt, 12, stop_token_ids=(), storage=storage)
        for _ in running:
            pass
        assert running.tokens == expected and running.cache.storage.name == storage


def test_a_given_cache_has_its_own_storage():
    cache = MODEL.new_cache(storage="int8")
    assert stream(MODEL, [1, 2], 2, cache=cache).cache.storage.name == "int8"
    with pytest.raises(InputError, match="the cache's is 'int8'"):
        stream(MODEL, [1, 2], 2, cache=cache, storage="int4")
    with pytest.raises(InputError, match="storage is 'int5'"):
        Engine(MODEL, storage="int5")


def test_engine_counts_quantized_bytes():
    dense, small = Engine(MODEL), Engine(MODEL, storage="int8")
    assert small._most(100) < dense._most(100) / 4, "of float64"


def test_perplexity_sees_the_loss():
    text = random_tokens(120)
    dense, again, small = (perplexity(MODEL, text, 64, storage=s).nats for s in ("dense", "dense", "int4"))
    assert dense == again and 1e-6 < abs(small - dense) < dense


def test_a_conversation_keeps_its_storage(tmp_path):
    model = chat_model("sliding")
    talk = Conversation(model, max_tokens=4, storage="int4", store=PromptStore())
    list(talk.reply("Hello"))
    assert talk.cache.storage.name == "int4"
    talk.save(tmp_path / "talk")
    held = talk.cache.lengths
    loaded = Conversation.load(tmp_path / "talk", model)
    assert loaded.cache.storage.name == "int4" and loaded.cache.lengths == held and loaded.refused is None
    other = Conversation.load(tmp_path / "talk", model, storage="int8")
    assert other.cache.storage.name == "int8" and other.cache.lengths == [0] and "int4, not int8" in other.refused
    list(other.reply("And?"))
    assert other.cache.lengths[0] > held[0]
