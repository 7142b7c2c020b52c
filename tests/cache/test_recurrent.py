"""Recurrent layers in a cache: states stand where they say, whatever was fed, rewound, forked, joined or given up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import exactkv.cache
from exactkv.cache import RecurrentLayer, join
from exactkv.errors import InputError, IntegrityError
from tests.cache.helpers import assert_exact, feed
from tests.cache.test_machine import CacheMachine
from tests.hybrid import MAMBA, MAMBA2, MIXED, MIXERS, hybrid_model
from tests.tiny import FULL, chunk, fed_in_pieces, random_tokens, window, with_ops

HYBRID = hybrid_model()
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}


class HybridMachine(CacheMachine):
    """Random operations on every kind of layer at once."""

    model, reference, last_layer = HYBRID, with_ops(HYBRID), len(MIXERS) - 1


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# Pieces.


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("pieces", [[1] * 24, [2] * 12, [3] * 8, [1, 2, 3, 1, 17], [23, 1]], ids=str)
def test_pieces_equal_one_pass(mixer, pieces, dtype):
    """Kind D: pieces shorter than the convolution, too. No cache and an empty cache are the same."""
    model = hybrid_model([MIXERS[mixer]], dtype)
    tokens = torch.tensor([random_tokens(24), random_tokens(24, 1)])
    whole = with_ops(model)(tokens)
    assert difference(model(tokens), whole) <= BOUND[dtype]
    assert difference(model(tokens, cache=model.new_cache(2)), whole) <= BOUND[dtype]
    for slack in (0, 5):
        assert difference(fed_in_pieces(model, tokens, pieces, slack=slack), whole) <= BOUND[dtype]


def test_the_final_state_does_not_depend_on_the_pieces():
    tokens = torch.tensor([random_tokens(24)])
    states = []
    for pieces in ([24], [1] * 24, [5, 1, 18]):
        cache, at = HYBRID.new_cache(slack=2), 0
        for n in pieces:
            HYBRID(tokens[:, at : at + n], cache=cache)
            at += n
        states.append(cache._rows[0].states)
    for other in states[1:]:
        assert [s.position for s in other] == [s.position for s in states[0]] == [21, 22, 23, 24]
        for mine, its in zip(states[0], other, strict=True):
            for a, b in zip(mine.layers, its.layers, strict=True):
                assert all((a[name] - b[name]).abs().max() < 1e-12 for name in a)


def test_a_state_is_filed_under_its_own_position():
    """Kind H: the state under label p is that of a pass over p tokens."""
    cache, ids = HYBRID.new_cache(slack=4), random_tokens(20)
    feed(HYBRID, cache, ids[:17])
    feed(HYBRID, cache, ids[17:])
    assert [s.position for s in cache._rows[0].states] == [15, 16, 17, 18, 19, 20]
    for state in cache._rows[0].states:
        fresh = HYBRID.new_cache()
        feed(HYBRID, fresh, ids[: state.position])
        for a, b in zip(state.layers, fresh._rows[0].states[-1].layers, strict=True):
            assert all((a[name] - b[name]).abs().max() < 1e-12 for name in a)


# Batches.


@pytest.mark.parametrize("mixer", [*MIXERS, "mixed"])
def test_row_of_a_batch_equals_the_row_alone(mixer):
    """Kind J: rows of 1, 3, 9 and no tokens, then more steps, in which a row now and then has nothing."""
    model = HYBRID if mixer == "mixed" else hybrid_model([MIXERS[mixer]])
    together, alone = model.new_cache(4, slack=1), [model.new_cache(slack=1) for _ in range(4)]
    for i in range(7):
        counts = (1, 3, 9, 0) if i == 0 else [(i + r) % 4 for r in range(4)]
        rows = [random_tokens(n, seed=10 * i + r) for r, n in enumerate(counts)]
        logits = feed(model, together, *rows)
        without = model([ids + [0] * (9 - len(ids)) for ids in rows], lengths=counts)
        for r, ids in enumerate(rows):
            assert torch.isnan(logits[r, len(ids) :]).all()
            if ids:
                expected = feed(model, alone[r], ids)[0]
                assert (expected - logits[r, : len(ids)]).abs().max() < 1e-11
                whole = model([ids])[0]
                assert (whole - without[r, : len(ids)]).abs().max() < 1e-11
    together.check_integrity()
    assert_exact(model, together)


def test_padded_tokens_change_no_state():
    """Where padding is, embeddings may hold anything, NaN too; it enters nothing."""
    model = hybrid_model()
    embed = model.decoder._embedded

    def poisoned(tokens, step):
        x = embed(tokens, step)
        counts = torch.tensor(step.counts)
        return x.masked_fill((torch.arange(step.width) >= counts[:, None]).unsqueeze(-1), torch.nan)

    model.decoder._embedded = poisoned
    rows = [random_tokens(n, seed=n) for n in (70, 3, 0, 9)]
    for slack in (0, 3):
        cache = model.new_cache(4, slack=slack)
        logits = feed(model, cache, *rows)
        free = model([r + [0] * (70 - len(r)) for r in rows], lengths=[len(r) for r in rows])
        for r, ids in enumerate(rows):
            if ids:
                expected = HYBRID([ids])[0]
                assert (logits[r, : len(ids)] - expected).abs().max() < 1e-10
                assert (free[r, : len(ids)] - expected).abs().max() < 1e-10
        for row in cache._rows:
            assert not any(t.isnan().any() for s in row.states for layer in s.layers for t in layer.values())
        feed(model, cache, *[random_tokens(n, seed=5) for n in (2, 0, 1, 3)])
        assert_exact(model, cache)


def test_logits_last_and_none():
    for mixers in (MIXED, MIXED[::-1], [FULL, MAMBA2], [(window(5), MAMBA)]):
        model = hybrid_model(mixers)
        tokens, lengths = [random_tokens(6, s) for s in range(3)], [6, 2, 0]
        every = model(tokens, cache=model.new_cache(3), lengths=lengths)
        cache = model.new_cache(3)
        last = model(tokens, cache=cache, lengths=lengths, logits="last")
        assert (last[0] - every[0, 5]).abs().max() < 1e-12 and (last[1] - every[1, 1]).abs().max() < 1e-12
        assert torch.isnan(last[2]).all()
        assert_exact(model, cache)
        cache = model.new_cache(3)
        assert model(tokens, cache=cache, lengths=lengths, logits="none") is None
        assert_exact(model, cache)


def test_forks_joins_and_sources_go_their_own_ways():
    """Kinds K, P: states are shared and never written to."""
    cache = HYBRID.new_cache(2, slack=3)
    feed(HYBRID, cache, random_tokens(13), random_tokens(2, 1))
    alone = cache.nbytes
    forks = cache.fork(3)
    shared = [id(t) for s in cache._rows[0].states for layer in s.layers for t in layer.values()]
    assert [id(t) for s in forks._rows[2].states for layer in s.layers for t in layer.values()] == shared
    assert forks.nbytes == alone, "what is shared is counted once"
    feed(HYBRID, forks, *[random_tokens(1 + r % 3, seed=r) for r in range(6)])
    both = join([forks, cache]).drop([1])
    both.rewind([n - 1 for n in both.lengths])
    for c in (cache, forks, both):
        assert_exact(HYBRID, c)
        c.check_integrity()


# Rewinding.


@pytest.mark.parametrize("slack", [0, 1, 4])
@pytest.mark.parametrize("past", [[20], [1] * 20, [11, 3, 6]], ids=str)
def test_slack_guarantees_its_rewinds(slack, past):
    """Kind E: slack + 1 tokens from the furthest position, exactly; all layers then stand at one position."""
    for back in range(slack + 2):
        cache, ids, at = HYBRID.new_cache(slack=slack), random_tokens(20), 0
        for n in past:
            feed(HYBRID, cache, ids[at : at + n])
            at += n
        assert cache.standing(20 - back) == [20 - back] == cache.rewind(20 - back)
        cache.check_integrity()
        assert_exact(HYBRID, cache)


def test_beyond_what_is_kept_a_rewind_goes_to_the_start_and_says_so():
    cache = HYBRID.new_cache(2, slack=1)
    feed(HYBRID, cache, random_tokens(20), random_tokens(3))
    assert cache.standing([17, 1]) == [0, 1]
    assert cache.lengths == [20, 3]
    assert cache.rewind([17, 1]) == [0, 1]
    assert cache._rows[0].states == () and cache.lengths == [0, 1]
    assert_exact(HYBRID, cache)


def test_every_layer_is_asked_until_all_stand():
    """A chunked layer offers its chunk's start, 16, of which the recurrent layer has no state any more: it offers
    none but the start."""
    model = hybrid_model([chunk(8), MAMBA])
    cache = model.new_cache(slack=2)
    feed(model, cache, random_tokens(21))
    assert cache.standing(21) == [21] and cache.standing(18) == [18]
    assert cache.standing(17) == [0]
    cache.rewind(19)
    assert [s.position for s in cache._rows[0].states] == [18, 19]
    feed(model, cache, random_tokens(1, 3))
    assert [s.position for s in cache._rows[0].states] == [18, 19, 20]
    assert cache.standing(18) == [18]
    assert_exact(model, cache)


def test_slack_raised_later_keeps_more_from_then_on():
    cache = HYBRID.new_cache()
    feed(HYBRID, cache, random_tokens(10))
    cache.slack = 3
    assert cache.standing(8) == [0]
    feed(HYBRID, cache, random_tokens(2, 1))
    assert [s.position for s in cache._rows[0].states] == [9, 10, 11, 12]
    assert cache.rewind(9) == [9]
    assert_exact(HYBRID, cache)


# Memory and contract.


def test_memory_is_a_formula_and_flat():
    """Kind Q: slack + 2 states a row, whatever was fed, of just the bytes of their parts."""
    model = hybrid_model([MAMBA2, window(4)], torch.float32)
    cache = model.new_cache(slack=1, step=4)
    state = 4 * (3 * 44 + 4 * 6 * 5)
    rows = 4 * 2 * 2 * 8 * 6  # window + slack rows and a quarter
    feed(model, cache, random_tokens(50))
    seen = set()
    for i in range(300):
        feed(model, cache, [i % 97])
        seen.add(cache.nbytes)
    assert max(seen) <= 3 * state + rows and len(seen) <= 2
    feed(model, cache, random_tokens(100))
    cache.check_integrity()
    assert cache.nbytes <= max(seen)


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps():
    model = hybrid_model([MAMBA, (window(4), MAMBA2)], torch.float32)
    cache = model.new_cache(2)
    sizes = set()
    for i in range(10_000):
        model([[i % 97], [i % 89]], cache=cache, logits="none")
        if i >= 20:
            sizes.add(cache.nbytes)
    assert len(sizes) == 1
    cache.check_integrity()


def test_kinds_of_numbers():
    """Sums run on in the compute dtype; a convolution's tail is inputs, in the model's."""
    model = hybrid_model([MAMBA, MAMBA2], torch.bfloat16)
    cache = model.new_cache()
    feed(model, cache, random_tokens(9))
    for layer in cache._rows[0].states[-1].layers:
        assert layer["tail"].dtype == torch.bfloat16 and layer["state"].dtype == torch.float32
    assert "recurrent" in repr(cache) and "2 layers" in repr(cache) and "states at 8..9" in repr(cache)


def test_a_step_that_is_not_committed_changes_nothing():
    model = hybrid_model([MAMBA])
    cache = model.new_cache()
    feed(model, cache, random_tokens(5))
    before = cache._rows[0].states
    layer, step = cache.spec.recurrent[0], cache.begin(2, None, [[1, 2]])
    assert step.stretches == ((0, 1), (1, 2))
    state = layer.read(step)
    with pytest.raises(IntegrityError, match="before the recurrent layers"):
        cache.commit(step)
    with pytest.raises(InputError, match="parts"):
        layer.write(step, 1, {"state": state["state"]})
    with pytest.raises(InputError, match="expected torch.float64"):
        layer.write(step, 1, {**state, "state": state["state"].float()})
    layer.write(step, 1, state)
    with pytest.raises(IntegrityError, match="twice"):
        layer.write(step, 1, state)
    assert cache._rows[0].states is before
    cache.begin(1, None, [[1]])
    with pytest.raises(IntegrityError, match="void"):
        layer.write(step, 2, state)
    assert_exact(model, cache)


def test_integrity_sees_a_state_under_another_position():
    cache = HYBRID.new_cache()
    feed(HYBRID, cache, random_tokens(5))
    cache.check_integrity()
    row = cache._rows[0]
    moved = tuple(s._replace(position=s.position - 1) for s in row.states)
    cache._rows = (type(row)(row.owner, row.length, row.runs, moved),)
    with pytest.raises(IntegrityError, match="states at"):
        cache.check_integrity()


@pytest.mark.parametrize("width", [1, 3, 30])
def test_interrupted_at_any_write(width, monkeypatch):
    write = RecurrentLayer.write
    for layer in range(len(HYBRID.spec.cache_spec("").recurrent)):
        cache = HYBRID.new_cache(2, slack=1)
        feed(HYBRID, cache, random_tokens(11), random_tokens(5))

        def failing(self, *arguments, layer=layer):
            write(self, *arguments)
            if self.index == layer:
                raise KeyboardInterrupt

        monkeypatch.setattr(RecurrentLayer, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            feed(HYBRID, cache, random_tokens(width), random_tokens(width))
        monkeypatch.undo()
        assert cache.lengths == [11, 5]
        cache.check_integrity()
        assert_exact(HYBRID, cache)


@pytest.mark.parametrize("operation", ["feed", "rewind", "fork and feed"])
def test_interrupted_at_any_line_of_the_cache(operation):
    """Ctrl-C comes between any two lines: raise at every 13th line run within exactkv.cache."""
    home, lines, finished = str(Path(exactkv.cache.__file__).parent), 0, False
    model = hybrid_model([MAMBA, (window(5), MAMBA2)])
    while not finished:
        cache = model.new_cache(2, slack=4)
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
                feed(model, cache, random_tokens(3, 2), random_tokens(3, 3))
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert cache.lengths in ([21, 5], [19, 3] if operation == "rewind" else [24, 8])
        assert cache.lengths != [21, 5] or not finished
        cache.check_integrity()
        assert_exact(model, cache)
        if other is not None:
            assert other.lengths == [21, 5]
            assert_exact(model, other)
        lines += 13
