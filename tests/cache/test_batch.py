"""A batch is a list of rows: ragged, shared, forked, joined; and what can be seen of a cache."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from exactkv.cache import join
from exactkv.errors import InputError, IntegrityError
from tests.cache.helpers import MIXED, assert_exact, feed
from tests.tiny import FULL, chunk, random_tokens, tiny_llama4, tiny_model, window, with_ops

# 2.5: a batch is a list of rows.


def test_row_of_a_batch_equals_the_row_alone():
    """Kind J: rows of 1, 3 and 9 tokens, then 12 steps, in which a row now and then has nothing."""
    model = tiny_model([FULL, window(4), chunk(4)])
    prompts = [random_tokens(n, seed=n) for n in (1, 3, 9)]
    together = model.new_cache(3)
    alone = [model.new_cache() for _ in prompts]
    logits = feed(model, together, *prompts)
    for r, ids in enumerate(prompts):
        assert (feed(model, alone[r], ids)[0] - logits[r, : len(ids)]).abs().max() < 1e-12
        assert torch.isnan(logits[r, len(ids) :]).all()
    for i in range(12):
        rows = [[] if (i + r) % 4 == 0 else random_tokens(1 + r % 2, seed=100 + i) for r in range(3)]
        logits = feed(model, together, *rows)
        for r, ids in enumerate(rows):
            if ids:
                assert (feed(model, alone[r], ids)[0] - logits[r, : len(ids)]).abs().max() < 1e-11
    assert together.lengths == [c.lengths[0] for c in alone]


def test_logits_last_are_each_rows_own_last():
    model = tiny_model(MIXED)
    tokens, lengths = [random_tokens(6, s) for s in range(3)], [6, 2, 0]
    every = model(tokens, cache=model.new_cache(3), lengths=lengths)
    last = model(tokens, cache=model.new_cache(3), lengths=lengths, logits="last")
    assert (last[0] - every[0, 5]).abs().max() < 1e-12 and (last[1] - every[1, 1]).abs().max() < 1e-12
    assert torch.isnan(last[2]).all()
    cache = model.new_cache(3)
    assert model(tokens, cache=cache, lengths=lengths, logits="none") is None
    assert cache.lengths == lengths


@pytest.mark.parametrize("pattern", [FULL, window(1), window(5), chunk(4), window(3, 2), chunk(6, 2)], ids=str)
def test_logits_last_are_those_of_all_where_the_last_layer_has_a_bound(pattern):
    model = tiny_model([FULL, pattern])
    for past in (0, 7):
        for width in range(1, 14):
            caches = [model.new_cache(2), model.new_cache(2)]
            for cache in caches:
                feed(model, cache, random_tokens(past), random_tokens(past, 1))
            tokens, lengths = [random_tokens(width, 2), random_tokens(width, 3)], [width, width - 1]
            every = model(tokens, cache=caches[0], lengths=lengths)
            last = model(tokens, cache=caches[1], lengths=lengths, logits="last")
            assert (last[0] - every[0, -1]).abs().max() < 1e-12
            assert width == 1 or (last[1] - every[1, -2]).abs().max() < 1e-12
            assert (with_ops(model)([tokens[0]])[0, -1] - model([tokens[0]], logits="last")[0]).abs().max() < 1e-12


def test_no_cache_equals_an_empty_cache_and_padding_may_hold_anything():
    model = tiny_model(MIXED)
    tokens, lengths = [random_tokens(6), random_tokens(2) + [-100] * 4], [6, 2]
    a = model(tokens, lengths=lengths)
    b = model(tokens, lengths=lengths, cache=model.new_cache(2))
    assert torch.equal(a.isnan(), b.isnan()) and (a - b).nan_to_num().abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_calls_without_tokens(shape):
    model = tiny_model(MIXED)
    tokens = torch.zeros(shape, dtype=torch.int64)
    cache = model.new_cache(shape[0])
    assert model(tokens, cache=cache).shape == (*shape, 97)
    assert model(tokens).shape == (*shape, 97)
    assert model(tokens, cache=cache, logits="last").shape == (shape[0], 97)
    assert cache.lengths == [0] * shape[0]


def test_the_longest_row_leaves():
    """Kind K: the place to append to is each row's own."""
    model = tiny_model(MIXED)
    cache = model.new_cache(3)
    feed(model, cache, random_tokens(30), random_tokens(2), random_tokens(11))
    cache = cache.drop([0])
    for _ in range(3):
        assert_exact(model, cache)
    assert cache.lengths == [17, 26]


def test_fork_shares_rows_and_the_forks_go_their_own_ways():
    model = tiny_model([FULL, FULL])
    cache = model.new_cache(step=16)
    feed(model, cache, random_tokens(64))
    alone = cache.nbytes
    forks = cache.fork(4)
    assert forks.nbytes == alone
    feed(model, forks, *([random_tokens(3, seed=s) for s in range(4)]))
    assert forks.nbytes < 3 * alone, "the common prefix is shared"
    assert_exact(model, forks)
    assert cache.lengths == [64]
    assert_exact(model, cache)
    del cache
    forks.check_integrity()
    assert_exact(model, forks)


def test_selecting_copies_nothing_when_the_source_is_gone():
    model = tiny_model(MIXED)
    cache = model.new_cache(3)
    feed(model, cache, random_tokens(30), random_tokens(20), random_tokens(10))
    kept = [run.memory for run in cache._rows[2].runs]
    cache = cache.select([2, 0])
    feed(model, cache, [1], [2])
    assert [run.memory for run in cache._rows[0].runs] == kept


def test_both_sides_of_a_select_can_be_used_and_do_not_touch_each_other():
    """Kind P: X then Y = Y on a fresh engine, also when they take turns."""
    model = tiny_model(MIXED)
    cache = model.new_cache(2, step=4, slack=3)
    feed(model, cache, random_tokens(13), random_tokens(6))
    half = cache.select([1])
    for _ in range(4):
        assert_exact(model, cache)
        assert_exact(model, half, random_tokens(3, seed=5))
        half.rewind(half.lengths[0] - 2)
        cache.rewind([n - 1 for n in cache.lengths])


def test_repr_shows_each_kind_of_layer_with_its_span_and_bytes():
    model = tiny_llama4(8)
    cache = model.new_cache(2)
    feed(model, cache, random_tokens(21), random_tokens(5))
    text = repr(cache)
    assert "2 rows of length [21, 5]" in text
    assert "chunk 8" in text and "3 layers" in text and "positions 16..21, 0..5" in text
    assert "full" in text and "1 layer " in text and "positions 0..21, 0..5" in text
    assert text.count("kB") == 3


def test_integrity_is_checkable():
    model = tiny_model(MIXED)
    cache = model.new_cache()
    feed(model, cache, random_tokens(12))
    cache.check_integrity()
    row = cache._rows[0]
    cache._rows = (type(row)(row.owner, 13, row.runs),)
    with pytest.raises(IntegrityError):
        cache.check_integrity()


def test_dead_memory_is_poisoned():
    model = tiny_model([FULL, window(4)])
    cache = model.new_cache(slack=3)
    feed(model, cache, random_tokens(12))
    cache.rewind(10)
    feed(model, cache, random_tokens(1))
    for run, start in zip(cache._rows[0].runs, (0, 12 - 4 - 3), strict=True):
        keys = run.memory.buffers[0]["k"]
        live = keys[:, start - run.origin : 11 - run.origin]
        assert not live.isnan().any()
        assert keys.isnan().sum() == keys.numel() - live.numel()


def test_positions_read_before_an_update_stay_what_they_were():
    """Kind L: lengths are values, not views of a counter that moves."""
    model = tiny_model(MIXED)
    cache = model.new_cache()
    feed(model, cache, random_tokens(7))
    lengths, tokens = cache.lengths, cache.tokens(0)
    feed(model, cache, random_tokens(3))
    assert lengths == [7] and len(tokens) == 7


@pytest.mark.parametrize("reserve", [None, 400])
def test_bounded_layers_keep_their_bound_through_chains_of_forks(reserve):
    """One row after many forks holds in each bounded layer what a fresh one may, and full layers no second reserve."""
    model = tiny_model([FULL, window(16), chunk(8)], torch.float32)
    cache = model.new_cache(step=4, max_length=reserve)
    feed(model, cache, random_tokens(60))
    for i in range(40):
        before, cache = cache, cache.fork(1)
        feed(model, cache, [i])
        del before
        cache.check_integrity()
    row = 2 * 8 * 4 * 2
    held = [
        sum({id(m): m.capacity for m in (run.memory, *(s.memory for s in run.segments))}.values())
        for run in cache._rows[0].runs
    ]
    assert held[1] <= 20 and held[2] <= 10
    assert held[0] <= (reserve or 100) + 2 * 100
    assert cache.nbytes == sum(held) * row
    forks = model.new_cache(max_length=400)
    feed(model, forks, random_tokens(300))
    alone, forks = forks.nbytes, forks.fork(4)
    feed(model, forks, [1], [2], [3], [4])
    assert forks.nbytes < 2.5 * alone


@pytest.mark.parametrize("step", [4, 256])
@pytest.mark.parametrize("other_writes_first", [False, True])
def test_the_source_of_a_select_rewinds_and_goes_on_while_the_other_reads(step, other_writes_first):
    """Rows that another cache still shows must not be written over, nor its token ids."""
    model = tiny_model([FULL, window(40)])
    cache = model.new_cache(step=step, slack=40)
    shown = random_tokens(30)
    feed(model, cache, shown)
    other = cache.select([0])
    if other_writes_first:
        feed(model, other, [5])
        shown = [*shown, 5]
    assert cache.rewind(12) == [12]
    feed(model, cache, random_tokens(25, seed=7))
    assert other.tokens(0) == shown
    assert_exact(model, other)
    assert other.tokens(0)[: len(shown)] == shown
    assert cache.tokens(0) == [*random_tokens(12), *random_tokens(25, seed=7)]
    assert_exact(model, cache)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_goes_its_own_way(copied):
    model = tiny_model(MIXED)
    cache = model.new_cache(2)
    feed(model, cache, random_tokens(20), random_tokens(3))
    other = copied(cache)
    for _ in range(3):
        assert_exact(model, other)
        assert_exact(model, cache, random_tokens(2, seed=8))
    other.check_integrity()
    with pytest.raises(InputError, match="pickled"):
        pickle.dumps(cache)


def test_rows_may_come_from_any_series():
    model = tiny_model([FULL])
    cache = model.new_cache(3)
    assert cache.select(r for r in (0, 2)).batch_size == 2
    assert cache.drop(r for r in (0, -1)).batch_size == 1
    assert join(c for c in (cache, cache)).batch_size == 6
    assert model([[1], [2], [3]], cache=cache, lengths=iter([1, 0, 1])) is not None
    assert cache.lengths == [1, 0, 1]
