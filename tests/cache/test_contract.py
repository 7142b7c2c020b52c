"""The contract, point by point: retention, rewinds, memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from exactkv.errors import InputError
from tests.cache.helpers import MIXED, assert_exact, feed
from tests.tiny import FULL, chunk, random_tokens, tiny_model, window

# 2.3, 2.4: what is held does not depend on allocation.


@pytest.mark.parametrize("pieces", [[1] * 40, [7] * 5 + [5], [33, 7], [3, 30, 1, 6]])
def test_allocation_steps_give_the_same_results_and_the_same_standing(pieces):
    model, tokens = tiny_model(MIXED), random_tokens(40)
    results = []
    for step in (1, 4, 8, 256):
        cache, logits, at = model.new_cache(step=step, slack=2), [], 0
        for n in pieces:
            logits.append(feed(model, cache, tokens[at : at + n])[0])
            at += n
        results.append((torch.cat(logits), [cache.standing(p) for p in range(41)]))
    for logits, standing in results[1:]:
        assert standing == results[0][1]
        assert (logits - results[0][0]).abs().max() <= 1e-13 * logits.abs().max()


@pytest.mark.parametrize("slack", [0, 1, 5])
@pytest.mark.parametrize(
    "pattern", [window(1), window(4), window(9), chunk(1), chunk(4), chunk(9), window(4, 3), chunk(5, 2)], ids=str
)  # fmt: skip
def test_slack_guarantees_rewinds_of_slack_plus_one(pattern, slack):
    model = tiny_model([FULL, pattern])
    for length in range(slack + 1, 30):
        cache = model.new_cache(slack=slack)
        feed(model, cache, random_tokens(length))
        for back in range(slack + 2):
            assert cache.standing(length - back) == [length - back], (length, back)
        assert cache.rewind(length - slack - 1) == [length - slack - 1]
        assert_exact(model, cache)


def test_slack_raised_later_holds_from_then_on():
    model = tiny_model([FULL, window(6)])
    cache = model.new_cache()
    feed(model, cache, random_tokens(20))
    assert cache.standing(17) == [0]
    cache.slack = 4
    assert cache.standing(17) == [0]
    feed(model, cache, random_tokens(4))
    assert cache.standing(19) == [19]
    with pytest.raises(InputError, match="only raised"):
        cache.slack = 3


# 2.7: rewinding never lies.


def test_rewind_reaches_the_greatest_position_where_every_layer_stands():
    """Two chunk sizes: 12 of 4s and 10 of 5s; from 18 both can only meet at a common boundary, or 0."""
    model = tiny_model([FULL, chunk(4), chunk(10)])
    cache = model.new_cache()
    feed(model, cache, random_tokens(39))
    assert cache.standing(38) == [38]  # inside both newest chunks
    assert cache.standing(33) == [32]  # the chunk of 4 must stand at its boundary, that of 10 holds 30 on
    assert cache.standing(29) == [20]  # 28 suits the 4s, not the 10s; 20 suits both
    assert cache.standing(19) == [0]
    assert cache.rewind(29) == [20]
    assert cache.tokens(0) == random_tokens(39)[:20]
    assert_exact(model, cache)


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize(
    "pattern", [window(5), chunk(6), window(3, 2), window(3, 7), chunk(4, 3), chunk(4, 9)], ids=str
)
def test_standing_is_the_greatest_position_where_going_on_could_be_exact(pattern, slack):
    """By search: a layer stands at p if it still holds every row that a query at p sees; what it holds is what the
    definition of retention says, written here once more."""
    model = tiny_model([FULL, pattern])
    tokens = random_tokens(23)
    cache = model.new_cache(slack=slack)
    feed(model, cache, tokens[:15])
    feed(model, cache, tokens[15:])
    oldest = pattern.first_visible(23 - slack - 1)

    def holds(p):
        needed = {j for j in range(p) if j >= pattern.first_visible(p) or j < pattern.anchors}
        return needed <= {j for j in range(23) if j >= oldest or j < pattern.anchors}

    for to in range(24):
        assert cache.standing(to) == [max(p for p in range(to + 1) if holds(p))]
        copy = cache.fork(1)
        assert copy.rewind(to) == cache.standing(to)
        assert_exact(model, copy)


@pytest.mark.parametrize("to", [-1, 13, 12.5, True, "3", [3, 4], []])
def test_rewinding_forward_below_zero_or_by_nonsense_is_refused(to):
    model = tiny_model(MIXED)
    cache = model.new_cache()
    feed(model, cache, random_tokens(12))
    with pytest.raises(InputError):
        cache.rewind(to)
    assert cache.lengths == [12]
    assert_exact(model, cache)


def test_rewind_one_a_row_is_atomic():
    model = tiny_model(MIXED)
    cache = model.new_cache(2)
    feed(model, cache, random_tokens(12), random_tokens(3))
    with pytest.raises(InputError, match="row 1"):
        cache.rewind([11, 4])
    assert cache.lengths == [12, 3]
    assert cache.rewind([11, 2]) == [11, 2]
    assert_exact(model, cache)


def test_rewound_rows_are_not_diluting():
    """Zeroed or stale rows would still weigh exp(score): compare with a cache that never saw them."""
    model = tiny_model(MIXED)
    seen, unseen = model.new_cache(slack=6), model.new_cache(slack=6)
    feed(model, seen, random_tokens(9))
    feed(model, unseen, random_tokens(9))
    feed(model, seen, random_tokens(6, seed=3))
    seen.rewind(9)
    more = random_tokens(20, seed=4)
    for a, b in zip(feed(model, seen, more)[0], feed(model, unseen, more)[0], strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


# 2.10: memory is a formula.


def rows_allocated(cache, z):
    return cache._rows[0].runs[z].memory.capacity


@pytest.mark.parametrize("slack", [0, 3])
def test_bounded_layers_stay_flat(slack):
    model = tiny_model([window(16), chunk(32), window(8, anchors=4)], torch.float32)
    cache = model.new_cache(slack=slack)
    row = 2 * 8 * 4 * 2  # heads, size, bytes of float32, k and v
    formula = sum(n + slack + max(1, (n + slack) // 4) for n in (16, 32, 8)) + 4
    sizes = set()
    for i in range(600):
        model([[i % 97]], cache=cache, logits="none")
        sizes.add(cache.nbytes)
        if i % 50 == 0:
            cache.check_integrity()
    assert max(sizes) == cache.nbytes == formula * row
    feed(model, cache, random_tokens(500))  # a piece far larger than any of them
    cache.check_integrity()
    assert cache.nbytes <= formula * row


def test_full_runs_grow_by_a_step_or_an_eighth():
    model = tiny_model([FULL], torch.float32)
    cache = model.new_cache(step=8)
    capacities = []
    for i in range(400):
        model([[i % 97]], cache=cache, logits="none")
        capacities.append(rows_allocated(cache, 0))
    steps = sorted(set(capacities))
    assert steps[:3] == [8, 16, 24]
    assert all(b - a == max(8, a // 8) for a, b in itertools.pairwise(steps))


def test_max_length_reserves_exactly_and_is_a_limit():
    model = tiny_model([FULL, window(8)], torch.float32)
    cache = model.new_cache(2, max_length=40)
    before = cache.nbytes
    assert before == 2 * (40 + 10) * 2 * 8 * 4 * 2
    feed(model, cache, random_tokens(40), random_tokens(39))
    assert cache.nbytes == before
    with pytest.raises(InputError, match="at most 40"):
        feed(model, cache, [1], [1])
    assert cache.lengths == [40, 39]
    feed(model, cache, [], [1])
    assert cache.lengths == [40, 40]
    small = model.new_cache(max_length=5)
    assert small.nbytes == (5 + 5) * 2 * 8 * 4 * 2


def test_the_models_maximum_is_a_limit_too():
    model = tiny_model([FULL], max_length=16)
    cache = model.new_cache()
    feed(model, cache, random_tokens(16))
    with pytest.raises(InputError, match="at most 16"):
        feed(model, cache, [1])
    with pytest.raises(InputError, match="at most 16"):
        model([random_tokens(17)])
    with pytest.raises(InputError, match="max_length"):
        model.new_cache(max_length=17)
    assert cache.lengths == [16]
