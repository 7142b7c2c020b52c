"""The contract, point by point: retention, rewinds, memory, interrupts, errors, sharing."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

import exactkv.cache
from exactkv.cache import join
from exactkv.errors import ExactKVError, InputError, IntegrityError
from tests.tiny import FULL, chunk, random_tokens, tiny_llama4, tiny_model, window

MIXED = [FULL, window(6), chunk(8), window(4, anchors=2)]


def feed(model, cache, *rows, lengths=None):
    width = max(len(r) for r in rows)
    counts = [len(r) for r in rows] if lengths is None else lengths
    return model([r + [0] * (width - len(r)) for r in rows], cache=cache, lengths=counts)


MORE = random_tokens(5, seed=9)


def assert_exact(model, cache, more=MORE):
    """Whatever is fed next gives what one forward pass over the row's tokens gives."""
    lengths, tokens = cache.lengths, [cache.tokens(r) for r in range(cache.batch_size)]
    logits = feed(model, cache, *([more] * cache.batch_size))
    for r, ids in enumerate(tokens):
        whole = model([ids + more])[0, lengths[r] :]
        assert (logits[r] - whole).abs().max() <= 1e-10 * whole.abs().max()


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


def test_standing_equals_what_a_brute_force_search_finds():
    for pattern in (window(5), chunk(6), window(3, anchors=2), chunk(4, anchors=3)):
        model = tiny_model([FULL, pattern])
        tokens = random_tokens(23)
        cache = model.new_cache(slack=1)
        feed(model, cache, tokens[:15])
        feed(model, cache, tokens[15:])
        for to in range(24):
            (reached,) = cache.fork(1).rewind(to)
            exact = [p for p in range(to + 1) if p == reached]
            assert exact == cache.standing(to)
            copy = cache.fork(1)
            copy.rewind(to)
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


# 2.1: interrupted anywhere, the cache stands where it stood.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("width", [1, 3, 30])
def test_interrupted_at_any_layer(error, width, monkeypatch):
    model = tiny_model(MIXED)
    extend = exactkv.cache.AttentionLayer.extend
    for layer in range(len(MIXED)):
        cache = model.new_cache(2, step=4)
        feed(model, cache, random_tokens(11), random_tokens(5))

        def failing(self, step, rows, layer=layer):
            view = extend(self, step, rows)
            if self.index == layer:
                raise error
            return view

        monkeypatch.setattr(exactkv.cache.AttentionLayer, "extend", failing)
        with pytest.raises(error):
            feed(model, cache, random_tokens(width), random_tokens(width))
        monkeypatch.undo()
        assert cache.lengths == [11, 5]
        cache.check_integrity()
        assert_exact(model, cache)


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", ["feed 1", "feed 3", "feed 30", "rewind", "fork and feed"])
def test_interrupted_at_any_line_of_the_cache(operation, stride):
    """Ctrl-C comes between any two lines: raise at every ``stride``-th line run within exactkv.cache."""
    model = tiny_model(MIXED)
    home = str(Path(exactkv.cache.__file__).parent)
    lines, finished = 0, False
    while not finished:
        cache = model.new_cache(2, step=4, slack=4)
        feed(model, cache, random_tokens(21), random_tokens(5))
        other = cache.fork(1) if operation == "fork and feed" else None
        seen = 0

        def trace(frame, event, _, lines=lines):
            nonlocal seen
            if not frame.f_code.co_filename.startswith(home):
                return None
            if event == "line":
                seen += 1
                if seen > lines:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            if operation == "rewind":
                cache.rewind([19, 3])
            else:
                width = 1 if other is not None else int(operation.split()[1])
                feed(model, cache, random_tokens(width, 2), random_tokens(width, 3))
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        after = {"rewind": [19, 3], "fork and feed": [22, 6]}.get(operation)
        after = after or [n + int(operation.split()[1]) for n in (21, 5)]
        assert cache.lengths in ([21, 5], after)
        assert cache.lengths == after or not finished
        cache.check_integrity()
        if lines % 4 == 0 or finished:
            assert_exact(model, cache)
            if other is not None:
                assert other.lengths == [21, 5]
                assert_exact(model, other)
        lines += stride
    assert lines > 20


def test_a_step_given_up_is_void():
    model = tiny_model([FULL])
    cache = model.new_cache()
    old = cache.begin(1, None, [[5]])
    new = cache.begin(1, None, [[6]])
    rows = {"k": torch.zeros(1, 2, 1, 8, dtype=torch.float64), "v": torch.zeros(1, 2, 1, 8, dtype=torch.float64)}
    with pytest.raises(IntegrityError, match="void"):
        cache.layers[0].extend(old, rows)
    with pytest.raises(IntegrityError, match="void"):
        cache.commit(old)
    with pytest.raises(IntegrityError, match="before the layers"):
        cache.commit(new)
    cache.layers[0].extend(new, rows)
    with pytest.raises(IntegrityError, match="twice"):
        cache.layers[0].extend(new, rows)
    cache.commit(new)
    assert cache.tokens(0) == [6]


# Errors: each leaves the cache as it was.


def wrong_calls():
    model = tiny_model(MIXED)
    other = tiny_model(MIXED, seed=1)
    yield "batch", lambda c: model([[1, 2]], cache=c), "rows"
    yield "floats", lambda c: model([[1.5], [2.0]], cache=c), "expected integers"
    yield "bools", lambda c: model(torch.tensor([[True], [False]]), cache=c), "expected integers"
    yield "ragged list", lambda c: model([[1, 2], [3]], cache=c), "tokens"
    yield "strings", lambda c: model([["a"], ["b"]], cache=c), "tokens"
    yield "one dimension", lambda c: model([1, 2], cache=c), "shape"
    yield "above vocabulary", lambda c: model([[96], [97]], cache=c), "vocabulary"
    yield "negative", lambda c: model([[0], [-1]], cache=c), "vocabulary"
    yield "huge id", lambda c: model([[2**70], [1]], cache=c), "tokens"
    yield "lengths count", lambda c: model([[1], [2]], cache=c, lengths=[1]), "lengths"
    yield "lengths too long", lambda c: model([[1], [2]], cache=c, lengths=[1, 2]), "lengths"
    yield "lengths negative", lambda c: model([[1], [2]], cache=c, lengths=[1, -1]), "lengths"
    yield "lengths float", lambda c: model([[1], [2]], cache=c, lengths=[1, 1.0]), "lengths"
    yield "logits", lambda c: model([[1], [2]], cache=c, logits="first"), "logits"
    yield "another model", lambda c: other([[1], [2]], cache=c), "another model"
    yield "not a cache", lambda c: model([[1], [2]], cache=[c]), "new_cache"
    yield "dtype", lambda c: tiny_model(MIXED, torch.float32)([[1], [2]], cache=c), "dtype"
    yield "select", lambda c: c.select([0, 2]), "does not exist"
    yield "select float", lambda c: c.select([0.0]), "does not exist"
    yield "fork", lambda c: c.fork(0), "integer"
    yield "join other", lambda c: join([c, other.new_cache()]), "differs"
    yield "join none", lambda c: join([]), "no caches"
    yield "join junk", lambda c: join([c, 3]), "expected caches"
    yield "tokens of no row", lambda c: c.tokens(2), "does not exist"


@pytest.mark.parametrize("name,call,words", list(wrong_calls()), ids=[n for n, _, _ in wrong_calls()])
def test_bad_input_is_one_clear_error_and_changes_nothing(name, call, words):
    model = tiny_model(MIXED)
    cache = model.new_cache(2)
    feed(model, cache, random_tokens(9), random_tokens(4))
    before = repr(cache)
    with pytest.raises(InputError, match=words) as caught:
        call(cache)
    assert isinstance(caught.value, ExactKVError)
    assert repr(cache) == before
    cache.check_integrity()
    assert_exact(model, cache)


@pytest.mark.parametrize("options", [{"batch_size": -1}, {"batch_size": 1.0}, {"slack": -1}, {"step": 0},
                                     {"storage": "int3"}, {"max_length": 0}])  # fmt: skip
def test_new_cache_checks_its_arguments(options):
    with pytest.raises(InputError):
        tiny_model([FULL]).new_cache(**options)


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
    model = tiny_model([FULL, window(40)], torch.float64)
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
