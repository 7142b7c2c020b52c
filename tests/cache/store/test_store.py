"""The prompt store in memory: hot equals cold, the longest exact standing, honest counts, limits, pins, refusals."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import exactkv
from exactkv import CheckpointPolicy, PromptStore
from exactkv.cache import checkpoint
from exactkv.cache.store import pieces, writer
from exactkv.errors import InputError
from exactkv.verify import assert_exact
from exactkv.verify.targets.exactkv import ExactKVTarget
from tests.cache.helpers import feed
from tests.cache.store.helpers import FREE, MODELS, assert_hot_is_cold, check, filled, latent_model, stored
from tests.hybrid import MAMBA, hybrid_model
from tests.tiny import FULL, chunk, random_tokens, tiny_model, window

TEXT = random_tokens(40, 3)
EVERY = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_TOKENS", 7)


# What is reused.


@EVERY
@pytest.mark.parametrize("merge", [True, False])
def test_the_same_again_a_longer_and_a_diverging_text(name, merge):
    model, store = MODELS[name], PromptStore(merge=merge)
    done = stored(store, model, TEXT, every=10)
    assert (done.tokens, done.new, done.in_memory, done.on_disk, done.reason) == (40, 40, True, False, "")
    for asked, least in (
        (TEXT, 39), ([*TEXT, 1, 2], 40), ([*TEXT[:33], 96, 96], 30), (TEXT[:34], 30), (TEXT[:5], 0), ([96, 96], 0),
    ):  # fmt: skip
        found = store.lookup(model, asked)
        assert found.cached >= least and found.cached <= len(asked) - 1
        if name in FREE:
            shared = next((i for i, (a, b) in enumerate(zip(asked, TEXT, strict=False)) if a != b), len(asked))
            assert found.cached == min(shared, 40, len(asked) - 1)
        assert_hot_is_cold(model, found, asked)
        check(store)


@EVERY
def test_a_second_insert_stores_what_is_new_only(name):
    model, store = MODELS[name], PromptStore()
    stored(store, model, TEXT[:20])
    before = store.stats()
    longer = [*TEXT[:20], *random_tokens(9, 5)]
    assert stored(store, model, longer).new == 9
    after = store.stats()
    assert after.tokens - before.tokens == 9
    assert stored(store, model, longer).new == 0
    assert store.stats().bytes == after.bytes and store.stats().pieces == after.pieces
    for asked in ([*TEXT[:20], 3], [*longer, 3]):
        found = store.lookup(model, asked)
        assert found.cached == len(asked) - 1
        assert_hot_is_cold(model, found, asked)


@EVERY
def test_what_was_found_goes_its_own_way(name):
    """Feeding, rewinding and checkpointing what was found changes neither the store nor another that was found."""
    model = MODELS[name]
    for merge in (True, False):
        store = PromptStore(merge=merge)
        stored(store, model, TEXT, every=10)
        first, second = (store.lookup(model, [*TEXT, 1], slack=3) for _ in range(2))
        feed(model, first.cache, random_tokens(30, 8))
        first.cache.checkpoint()
        first.cache.rewind(45)
        first.cache.rewind(20)
        feed(model, first.cache, random_tokens(30, 9))
        assert_hot_is_cold(model, second, [*TEXT, 1])
        assert_hot_is_cold(model, store.lookup(model, TEXT), TEXT)
        check(store)


@EVERY
def test_going_on_is_bit_for_bit_what_it_would_have_been(name):
    """From what was found as from the cache that was inserted."""
    model = MODELS[name]
    store, cache = PromptStore(), filled(model, TEXT)
    store.insert(cache)
    found = store.lookup(model, [*TEXT, 5]).cache
    for token in random_tokens(30, 6):
        assert torch.equal(feed(model, found, [token]), feed(model, cache, [token]))


@pytest.mark.parametrize(
    "model",
    [
        tiny_model([FULL, window(6), chunk(8), window(4, anchors=2)], torch.float32), latent_model(torch.float32),
        hybrid_model(dtype=torch.float32),
    ],
)  # fmt: skip
def test_hot_is_cold_in_float32(model):
    store, drawn = PromptStore(), random.Random(1)
    for _ in range(12):
        asked = random_tokens(drawn.randint(1, 3) * 9, drawn.randint(0, 1)) + random_tokens(drawn.randint(1, 9), 7)
        found = store.lookup(model, asked)
        assert_hot_is_cold(model, found, asked, 5e-6)
        stored(store, model, asked, every=9)
    assert store.stats().hits > 3


def test_a_row_of_a_batch_is_stored_and_the_batch_is_as_it_was():
    model, store = MODELS["hybrid"], PromptStore()
    cache = model.new_cache(3)
    feed(model, cache, TEXT[:9], TEXT, TEXT[:3])
    before, rows = cache.nbytes, cache._rows
    assert store.insert(cache, row=1).tokens == 40
    assert cache.nbytes == before and cache._rows is rows
    assert_hot_is_cold(model, store.lookup(model, [*TEXT, 4]), [*TEXT, 4])


def test_an_empty_row_and_a_forked_one():
    model, store = MODELS["sliding"], PromptStore()
    assert store.insert(model.new_cache()).tokens == 0
    forked = filled(model, TEXT[:20]).fork(2)
    feed(model, forked, [1, 2, 3], [4, 5])
    for row in range(2):
        store.insert(forked, row)
        asked = [*forked.tokens(row), 9]
        assert store.lookup(model, asked).cached == len(asked) - 1
        assert_hot_is_cold(model, store.lookup(model, asked), asked)


def test_options_of_the_cache_hold():
    model, store = MODELS["sliding"], PromptStore()
    stored(store, model, TEXT)
    policy = CheckpointPolicy(every=8)
    cache = store.lookup(model, [*TEXT, 1], slack=5, step=3, max_length=60, checkpoints=policy).cache
    assert (cache.slack, cache.max_length, cache.checkpoint_policy) == (5, 60, policy)
    feed(model, cache, random_tokens(20, 1))
    with pytest.raises(InputError, match="at most 60"):
        feed(model, cache, [1])
    assert store.lookup(model, TEXT, max_length=30).cached <= 30


@pytest.mark.parametrize("name", ["latent", "recurrent"])
def test_verify_knows_the_store(name):
    """The store schedules run on exactkv, and it is exact by them."""
    schedules = ["prefix store", "prefix reuse", "random prefixes", "owners"]
    report = assert_exact(ExactKVTarget(MODELS[name]), schedules=schedules)
    assert [outcome.status for outcome in report.outcomes] == ["exact"] * 4


# What separates entries.


def test_another_salt_dtype_or_model_finds_nothing():
    model, store = MODELS["full"], PromptStore()
    stored(store, model, TEXT, salt="a")
    others = {"model": tiny_model([FULL, FULL], seed=1), "dtype": tiny_model([FULL, FULL], torch.float32)}
    assert store.lookup(model, TEXT).cached == 0
    assert store.lookup(model, TEXT, salt="b").cached == 0
    for other in others.values():
        assert store.lookup(other, TEXT, salt="a").cached == 0
    assert store.lookup(model, TEXT, salt="a").cached == 39
    assert "under another salt" in store.explain(model, TEXT)
    assert "under another model" in store.explain(others["model"], TEXT, salt="a")
    assert "dtype" in store.explain(others["dtype"], TEXT, salt="a")
    assert "salt" not in store.lookup(model, TEXT[:1] + [1]).reason.replace("this model and salt", "")


# In words.


def test_explanations():
    model, store = MODELS["sliding"], PromptStore()
    assert "nothing is stored" in store.explain(model, TEXT)
    stored(store, model, TEXT, every=10)
    for asked, words in (
        (TEXT, "all but the last"),
        ([*TEXT, 1, 2], "the stored text ends at 40"),
        ([*TEXT[:20], 96, 96], "the stored text differs from token 20 on"),
        ([*TEXT[:25], 96], "no checkpoint lies between 20 and there"),
        ([96], "its first token differs"),
    ):
        assert words in store.explain(model, asked) == store.lookup(model, asked).reason
    small = PromptStore(max_bytes=store.stats().bytes)
    stored(small, model, TEXT)
    stored(small, model, random_tokens(40, 5))
    assert "evicted" in small.explain(model, TEXT)
    full = PromptStore(max_bytes=11_000)
    stored(full, MODELS["full"], TEXT[:20])
    stored(full, MODELS["full"], random_tokens(20, 5))
    assert "what was stored of it was evicted" in full.explain(MODELS["full"], TEXT)
    assert small.stats().evictions > 0


# Limits.


@EVERY
def test_the_limit_holds_before_each_allocation(name, monkeypatch):
    model, store = MODELS[name], PromptStore(12_000)
    allocated, take, cut = [], checkpoint.take, pieces.cut

    def counting(made):
        def counted(*arguments, **options):
            free = store._memory.max_bytes - store._memory.nbytes
            result = made(*arguments, **options)
            filed = result if made is take else None
            new = store._memory.missing(pieces.objects(() if filed else result, filed))
            assert new <= free
            allocated.append(new)
            return result

        return counted

    monkeypatch.setattr(checkpoint, "take", counting(take))
    monkeypatch.setattr(pieces, "cut", counting(cut))
    drawn = random.Random(2)
    for _ in range(40):
        text = random_tokens(drawn.randint(1, 4) * 5, drawn.randint(0, 2)) + random_tokens(drawn.randint(0, 6), 1)
        stored(store, model, text)
        check(store)
    assert allocated


def test_what_is_too_large_is_refused_and_the_rest_stays():
    model, store = MODELS["full"], PromptStore(12_000)
    assert stored(store, model, TEXT[:20]).in_memory
    held = store.stats().bytes
    long = random_tokens(200, 4)
    done = stored(store, model, long)
    assert not done.in_memory and "bytes are needed" in done.reason
    stats = store.stats()
    assert (stats.refused, stats.bytes, stats.evictions, stats.last_refusal) == (1, held, 0, done.reason)
    assert "refused" in store.explain(model, [*long, 1])
    assert store.lookup(model, TEXT[:20]).cached == 19
    assert PromptStore(0).insert(filled(model, TEXT)).in_memory is False


def test_shared_prefixes_stay_longest():
    model = MODELS["full"]
    store = PromptStore(24_000)
    system = random_tokens(14, 11)
    for i in range(30):
        stored(store, model, system + random_tokens(14, 100 + i))
        assert store.lookup(model, [*system, 1]).cached == 14
        check(store)
    assert store.stats().evictions > 5


@EVERY
def test_a_pin_keeps_a_text(name):
    model = MODELS[name]
    store = PromptStore(14_000)
    stored(store, model, TEXT[:14])
    with store.pin(model, TEXT[:14]) as pin:
        assert pin.tokens == 14 and store.stats().pinned == 1
        for i in range(20):
            stored(store, model, random_tokens(14, 50 + i))
            check(store)
        assert store.lookup(model, [*TEXT[:14], 1]).cached == 14
    for i in range(20):
        stored(store, model, random_tokens(14, 150 + i))
    assert store.lookup(model, [*TEXT[:14], 1]).cached == 0
    assert store.stats().pinned == 0
    pin.unpin()


def test_a_pin_outlives_clear_and_close():
    model, store = MODELS["full"], PromptStore()
    stored(store, model, TEXT)
    pin = store.pin(model, TEXT)
    store.clear()
    assert store.stats().bytes == 0 and store.lookup(model, TEXT).cached == 0
    pin.unpin()
    stored(store, model, TEXT)
    other = store.pin(model, [*TEXT, 1])
    assert other.tokens == 40
    store.close()
    store.close()
    other.unpin()
    with pytest.raises(InputError, match="closed"):
        store.lookup(model, TEXT)


# Counts, input, threads.


def test_counts_are_those_of_a_shadow():
    model, store, drawn = MODELS["full"], PromptStore(), random.Random(3)
    texts, hits, asked, reused = [], 0, 0, 0
    for _ in range(60):
        text = [drawn.randint(1, 2) for _ in range(drawn.randint(1, 9))]
        shared = [next((i for i, (a, b) in enumerate(zip(text, t, strict=False)) if a != b),
                       min(len(text), len(t))) for t in texts]  # fmt: skip
        expected = min(max(shared, default=0), len(text) - 1)
        found = store.lookup(model, text)
        assert found.cached == expected
        hits, asked, reused = hits + (expected > 0), asked + len(text), reused + expected
        feed(model, found.cache, text[found.cached :])
        store.insert(found.cache)
        texts.append(text)
    stats = store.stats()
    assert (stats.lookups, stats.hits, stats.misses) == (60, hits, 60 - hits)
    assert (stats.asked_tokens, stats.reused_tokens, stats.inserts) == (asked, reused, 60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_bytes": 1.5}, "max_bytes is 1.5"),
        ({"directory_bytes": 5}, "directory is None"),
        ({"directory": "x", "directory_bytes": -1}, "directory_bytes is -1"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(InputError, match=words):
        PromptStore(**arguments)


def test_wrong_input():
    model, store = MODELS["full"], PromptStore()
    for tokens, words in (([], "at least one"), (["a"], "token ids"), ([-1], "token ids"), ("text", "a str")):
        with pytest.raises(InputError, match=words):
            store.lookup(model, tokens)
    with pytest.raises(InputError, match="salt"):
        store.lookup(model, [1], salt=b"x")
    with pytest.raises(InputError, match="cache"):
        store.insert(None)
    with pytest.raises(InputError, match="row 1"):
        store.insert(model.new_cache(), 1)
    assert store.lookup(model, torch.tensor([1, 2])).cached == 0
    assert exactkv.PromptStore is PromptStore


def test_interrupted_midway_it_still_counts_right(monkeypatch):
    model, store = MODELS["hybrid"], PromptStore()
    stored(store, model, TEXT[:20])
    for seed, method in enumerate(("_hold", "add_checkpoint", "make_room", "add")):

        def failing(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(store._memory), method, failing)
            stored(store, model, [*TEXT[:20], *random_tokens(9, 40 + seed)])
        check(store)
        assert_hot_is_cold(model, store.lookup(model, TEXT[:20]), TEXT[:20])


def test_threads_share_a_store():
    model, store, failed = hybrid_model([MAMBA, FULL, window(6)]), PromptStore(30_000), []
    whole = {seed: model([random_tokens(24, seed)])[0, -1] for seed in range(4)}

    def serve(number):
        drawn = random.Random(number)
        try:
            for _ in range(25):
                seed = drawn.randint(0, 3)
                asked = random_tokens(24, seed)
                found = store.lookup(model, asked)
                logits = feed(model, found.cache, asked[found.cached :])[0, -1]
                assert (logits - whole[seed]).abs().max() <= 1e-10 * whole[seed].abs().max()
                store.insert(found.cache)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    check(store)
    assert store.stats().hits > 30
