"""Checkpoints: filed where they say, reached by rewinds, copied out of, shared, thinned, and never more than needed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exactkv.cache
from exactkv import CheckpointPolicy
from exactkv.cache import join
from exactkv.cache.checkpoint import nbytes, thinned
from exactkv.errors import InputError, IntegrityError
from tests.cache.helpers import MIXED, assert_exact, feed
from tests.hybrid import MAMBA, MAMBA2, hybrid_model
from tests.tiny import FULL, chunk, random_tokens, tiny_model, window

TINY = tiny_model(MIXED)
HYBRID = hybrid_model()
SMALL = hybrid_model([MAMBA, (window(5), MAMBA2)])
MODELS = {"attention": TINY, "hybrid": HYBRID}


def filled(model, length=40, at=(), **options):
    """A cache of one row of random tokens, with checkpoints at those positions."""
    cache = model.new_cache(**{"step": 4, **options})
    tokens = random_tokens(length, 3)
    for low, high in itertools.pairwise(sorted({0, *at, length})):
        feed(model, cache, tokens[low:high])
        if high in at:
            assert cache.checkpoint() == [high]
            cache.check_integrity()
    return cache


# Where it can stand.


@pytest.mark.parametrize("at", range(1, 36))
@pytest.mark.parametrize("name", MODELS)
def test_a_rewind_reaches_each_checkpoint_and_goes_on_exactly(name, at):
    cache = filled(MODELS[name], at=(at,))
    assert cache.checkpoints(0) == [at] == cache.rewind(at + 2)
    cache.check_integrity()
    assert cache.tokens(0) == random_tokens(40, 3)[:at]
    assert_exact(MODELS[name], cache)
    assert cache.rewind(at) == [at], "it is there for the next time"
    assert_exact(MODELS[name], cache, random_tokens(20, 4))


@pytest.mark.parametrize("name", MODELS)
def test_float32_within_its_bound(name):
    model = tiny_model(MIXED, torch.float32) if name == "attention" else hybrid_model(dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        at = sorted({int(p) for p in torch.randint(1, 40, (4,), generator=generator)})
        cache = filled(model, at=at)
        (reached,) = cache.rewind(int(torch.randint(0, 41, (1,), generator=generator)))
        more = random_tokens(11, 8)
        whole = model([cache.tokens(0) + more])[0, reached:]
        assert (feed(model, cache, more)[0] - whole).abs().max() <= 5e-6 * whole.abs().max()


@given(
    st.lists(st.integers(1, 60), max_size=5), st.integers(0, 4),
    st.sampled_from([[window(5)], [chunk(8)], MIXED, [FULL, chunk(5), chunk(7)], [FULL]]),
)  # fmt: skip
@settings(max_examples=40)
def test_standing_is_the_greatest_position_that_holds(at, slack, patterns):
    cache = filled(tiny_model(patterns), 60, tuple(at), slack=slack)
    stands = [p for p in range(61) if cache.standing(p) == [p]]
    assert {0, 60, *cache.checkpoints(0)} <= set(stands)
    for to in range(61):
        assert cache.standing(to) == [max(p for p in stands if p <= to)]
        copy = cache.select([0])
        assert copy.rewind(to) == cache.standing(to) == copy.lengths
    without = filled(tiny_model(patterns), 60, slack=slack)
    alone = {p for p in range(61) if without.standing(p) == [p]}
    assert set(stands) == alone | set(cache.checkpoints(0))


def test_nothing_is_filed_where_it_would_be_of_no_use():
    full = filled(tiny_model([FULL, FULL]), at=(9,))
    assert full.checkpoints(0) == [] and full.rewind(9) == [9]
    chunked = filled(tiny_model([chunk(8), FULL, chunk(4)]), at=(8, 16, 20))
    assert chunked.checkpoints(0) == [20] and chunked.rewind(17) == [16]
    assert chunked.checkpoint_nbytes == 0, "20 has gone, and none is needed at 16"
    empty = TINY.new_cache(2)
    assert empty.checkpoint(label="prompt") == [0, 0] and empty.checkpoints(1) == []
    cache = filled(TINY, at=(9, 40))
    held = cache._rows[0].checkpoints
    assert cache.checkpoint() == [40] and cache._rows[0].checkpoints is held
    cache.checkpoint(label="message")
    assert [c.label for c in cache._rows[0].checkpoints] == ["", "message"], "the label is added"
    assert cache._rows[0].checkpoints[1].zones is held[1].zones


def test_states_are_filed_under_their_own_position():
    """Kind H: the state under position p is that of one pass over p tokens, and of no other number."""
    tokens = random_tokens(40, 3)
    cache = filled(HYBRID, at=(1, 7, 8, 23, 39))
    for filed in cache._rows[0].checkpoints:
        fresh = HYBRID.new_cache()
        feed(HYBRID, fresh, tokens[: filed.position])
        assert filed.state.position == filed.position
        for mine, its in zip(filed.state.layers, fresh._rows[0].states[-1].layers, strict=True):
            assert all((mine[k] - its[k]).abs().max() <= 1e-12 * (1 + its[k].abs().max()) for k in its)


def test_another_text_after_a_rewind_is_never_answered_from_the_old_one():
    for model in MODELS.values():
        cache = filled(model, at=(10, 20, 30))
        assert cache.rewind(12) == [10] and cache.checkpoints(0) == [10]
        feed(model, cache, random_tokens(25, 8))
        assert cache.checkpoints(0) == [10] and cache.standing(31) == [10]
        cache.checkpoint()
        feed(model, cache, random_tokens(20, 9))
        assert cache.rewind(44) == [35]
        assert_exact(model, cache)


# Memory.


def rows_at(position, patterns=MIXED, item=8):
    """Bytes of the rows that bounded layers need at ``position``: k and v, 2 heads of 8."""
    rows = 0
    for pattern in patterns:
        if pattern.bound is not None:
            low = max(pattern.anchors, pattern.first_visible(position))
            rows += max(0, position - low)
    return rows * 2 * 2 * 8 * item


@pytest.mark.parametrize("position", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32])
def test_bytes_are_a_formula(position):
    cache, without = filled(TINY, at=(position,)), filled(TINY)
    assert cache.checkpoint_nbytes == rows_at(position)
    assert cache.nbytes == without.nbytes + rows_at(position)
    assert f"checkpoints at [{position}]" in repr(cache)
    fork = cache.fork(3)
    assert fork.nbytes == cache.nbytes and fork.checkpoint_nbytes == rows_at(position)
    assert join([cache, fork]).checkpoint_nbytes == rows_at(position)
    with_states = filled(HYBRID, at=(position,))
    state = sum(t.nbytes for layer in with_states._rows[0].states[-1].layers for t in layer.values())
    assert with_states.checkpoint_nbytes == rows_at(position, [window(5), chunk(8)]) + state
    assert with_states.nbytes == filled(HYBRID).nbytes + with_states.checkpoint_nbytes


def test_rows_are_shared_between_checkpoints():
    model = tiny_model([window(20), chunk(32)])
    one, two = (filled(model, 60, at).checkpoint_nbytes for at in ((40,), (40, 45)))
    assert two - one == 5 * 2 * (2 * 2 * 8 * 8), "five rows more of two layers"
    far = filled(model, 100, (40, 58)).checkpoint_nbytes
    alone = sum(filled(model, 100, (p,)).checkpoint_nbytes for p in (40, 58))
    assert alone - far == 8 * 2 * 2 * 8 * 8, "the chunk's, but not the window's: one row would keep nineteen alive"


def contents(cache):
    return [
        [t.clone() for m in (s.memory for zone in c.zones for s in zone or ()) for p in m.buffers for t in p.values()]
        for row in cache._rows for c in row.checkpoints
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_nobody_writes_to_what_a_checkpoint_holds(name):
    """Kind H, F: forks rewind to the same checkpoints and go on with texts of their own."""
    model = MODELS[name]
    cache = filled(model, at=(10, 20, 30))
    before = contents(cache)
    forks = [cache.fork(2), cache.select([0]), cache.fork(1)]
    for i, fork in enumerate([*forks, cache]):
        assert fork.rewind((30, 20, 10, 21)[i]) == [(30, 20, 10, 20)[i]] * fork.batch_size
        assert_exact(model, fork, random_tokens(30, i))
        fork.check_integrity()
        assert_exact(model, fork)
    assert forks[0].rewind(30) == [30, 30]
    after = contents(forks[0].select([1]))
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    assert_exact(model, forks[0])


def test_the_bound_holds_after_a_rewind_to_a_checkpoint():
    model = tiny_model([window(8), chunk(12), FULL])
    cache = filled(model, 70, (33,), slack=2)
    for _ in range(6):
        cache.rewind(33)
        cache.check_integrity()
        feed(model, cache, random_tokens(37))
        cache.check_integrity()
    assert cache.nbytes - cache.checkpoint_nbytes <= filled(model, 70, slack=2).nbytes


# The policy.


def test_every_files_where_a_call_ends():
    for model in MODELS.values():
        cache = model.new_cache(2, checkpoints=CheckpointPolicy(every=8))
        assert [cache.next_checkpoint(r) for r in (0, 1)] == [8, 8]
        feed(model, cache, random_tokens(8), random_tokens(5))
        assert [cache.checkpoints(r) for r in (0, 1)] == [[8], []]
        assert [cache.next_checkpoint(r) for r in (0, 1)] == [16, 8]
        feed(model, cache, random_tokens(9), random_tokens(3))
        assert [cache.checkpoints(r) for r in (0, 1)] == [[8], [8]], "a call that crosses 16 files nothing"
        for _ in range(9):
            feed(model, cache, [1], [2])
        assert [cache.checkpoints(r) for r in (0, 1)] == [[8, 24], [8, 16]]
        cache.check_integrity()
        assert cache.rewind([25, 10]) == [25, 8] and cache.select([0]).checkpoint_policy.every == 8
        assert_exact(model, cache)
    assert tiny_model([FULL]).new_cache(checkpoints=CheckpointPolicy(every=4)).next_checkpoint(0) is None
    assert TINY.new_cache(checkpoints=CheckpointPolicy(every=40), max_length=30).next_checkpoint(0) is None
    assert TINY.new_cache().next_checkpoint(0) is None


@pytest.mark.parametrize("name", MODELS)
def test_thinned_to_what_fits(name):
    model = MODELS[name]
    one = filled(model, 32, (31,)).checkpoint_nbytes
    cache = model.new_cache(checkpoints=CheckpointPolicy(every=4, max_bytes=8 * one))
    for n in range(200):
        feed(model, cache, [n % 97])
        if n == 21:
            cache.checkpoint(label="message")
        assert cache.checkpoint_nbytes <= 8 * one
    at = cache.checkpoints(0)
    assert 22 in at and at[-1] == 200, "labelled ones and the newest are kept"
    cache.check_integrity()
    assert len(at) >= 6
    for position in reversed(at):
        assert cache.rewind(position) == [position]
        assert_exact(model, cache)
        cache.rewind(position)
    cache.checkpoint_policy = CheckpointPolicy(max_bytes=0)
    feed(model, cache, [1])
    cache.checkpoint(label="message")
    assert cache.checkpoints(0) == []


def test_gaps_grow_with_age():
    model = tiny_model([window(3)])
    cache = model.new_cache(checkpoints=CheckpointPolicy(every=4, max_bytes=13 * 2 * 2 * 2 * 8 * 8))
    for n in range(400):
        feed(model, cache, [n % 97])
    at = [0, *cache.checkpoints(0)]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert len(gaps) == 13 and gaps[-1] <= 16 and max(gaps[:3]) >= 4 * gaps[-1]
    for position, gap in zip(at[1:-1], gaps[:-1], strict=True):
        assert gap <= 2 * (400 - position), "old ones are thinned, not dropped one after the other"


def test_cheap_positions_are_kept_rather_than_dear_ones():
    cache = filled(tiny_model([chunk(64)]), 130, (62, 66))
    filed = cache._rows[0].checkpoints + (replace(cache._rows[0].checkpoints[1], position=129),)
    assert [c.position for c in thinned(filed, nbytes(filed) - 1)] == [66, 129]


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
def test_policies_are_checked(value):
    with pytest.raises(InputError, match="every"):
        CheckpointPolicy(every=value)
    with pytest.raises(InputError):
        CheckpointPolicy(max_bytes=value if value != 0 else -1)
    with pytest.raises(InputError, match="CheckpointPolicy"):
        TINY.new_cache(checkpoints=value)
    with pytest.raises(InputError):
        TINY.new_cache().checkpoint([value if value not in (0, -1) else 7])
    with pytest.raises(InputError, match="label"):
        TINY.new_cache().checkpoint(label=3)


# Failures.


@pytest.mark.parametrize("operation", ["checkpoint", "rewind", "feed"])
@pytest.mark.parametrize("model", [tiny_model([window(6), chunk(8), FULL]), SMALL], ids=["attention", "hybrid"])
def test_interrupted_at_any_line(operation, model):
    home, lines, finished = str(Path(exactkv.cache.__file__).parent), 0, False
    while not finished:
        cache = model.new_cache(2, step=4, checkpoints=CheckpointPolicy(every=3 if operation == "feed" else None))
        feed(model, cache, random_tokens(21), random_tokens(9))
        cache.checkpoint()
        feed(model, cache, random_tokens(9, 2), random_tokens(12, 2))
        other, seen = cache.fork(1), 0

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

        before = [cache.checkpoints(r) for r in (0, 1)]
        sys.settrace(trace)
        try:
            if operation == "rewind":
                cache.rewind([22, 10])
            elif operation == "checkpoint":
                cache.checkpoint()
            else:
                feed(model, cache, random_tokens(3, 2), random_tokens(3, 3))
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        lengths, filed = {
            "rewind": ([21, 9], [[21], [9]]),
            "checkpoint": ([30, 21], [[21, 30], [9, 21]]),
            "feed": ([33, 24], [[21, 30, 33], [9, 21, 24]]),
        }[operation]
        state = cache.lengths, [cache.checkpoints(r) for r in (0, 1)]
        assert state in (([30, 21], before), (lengths, filed))
        cache.check_integrity()
        assert other.lengths == [30, 21]
        if lines % 3 == 0 or finished:
            assert_exact(model, cache)
            assert other.rewind([22, 10]) == [21, 9]
            assert_exact(model, other)
        lines += 17


@pytest.mark.parametrize("operation", ["rewind", "checkpoint"])
def test_no_memory_midway_changes_nothing(operation, monkeypatch):
    storage = exactkv.cache.storage.Storage
    allocate, allowed, finished = storage.allocate, 0, False
    while not finished:
        cache, left = filled(TINY, at=(20,)).fork(2), allowed

        def failing(self, *arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise MemoryError
            return allocate(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(storage, "allocate", failing)
            try:
                cache.rewind(21) if operation == "rewind" else cache.checkpoint()
                finished = True
            except MemoryError:
                assert cache.lengths == [40, 40] and [cache.checkpoints(r) for r in (0, 1)] == [[20], [20]]
        cache.check_integrity()
        assert_exact(TINY, cache)
        allowed += 1
    assert allowed > 4, "rows of two caches in several zones"


def broken():
    yield "state", lambda c: replace(c, state=c.state._replace(position=c.position - 1))
    yield "position", lambda c: replace(c, position=c.position + 1)
    yield "a row too few", lambda c: replace(c, zones=(_cut(c.zones[0], 1), *c.zones[1:]))
    yield "beyond its memory", lambda c: replace(c, zones=((replace(c.zones[0][0], origin=c.position),), *c.zones[1:]))
    yield "no rows", lambda c: replace(c, zones=(None, *c.zones[1:]))
    yield "no state", lambda c: replace(c, state=None)


def _cut(zone, n):
    return (replace(zone[0], start=zone[0].start + n), *zone[1:])


@pytest.mark.parametrize("name,change", list(broken()), ids=[n for n, _ in broken()])
def test_integrity_sees(name, change):
    cache = filled(HYBRID, at=(20,))
    row = cache._rows[0]
    cache._rows = (replace(row, checkpoints=(change(row.checkpoints[0]),)),)
    with pytest.raises(IntegrityError, match="checkpoint"):
        cache.check_integrity()


def test_integrity_sees_shared_poisoned_and_misplaced_memory():
    cache = filled(HYBRID, at=(20,))
    row = cache._rows[0]
    memory = row.checkpoints[0].zones[0][0].memory
    memory.shared = False
    with pytest.raises(IntegrityError, match="shared"):
        cache.check_integrity()
    memory.shared = True
    cache._rows = (replace(row, runs=(replace(row.runs[0], memory=memory), *row.runs[1:])),)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
    cache._rows = (replace(row, checkpoints=row.checkpoints * 2),)
    with pytest.raises(IntegrityError, match="order"):
        cache.check_integrity()
    cache._rows = (row,)
    memory.buffers[0]["k"][0, 1, 0] = torch.nan
    with pytest.raises(IntegrityError, match="dead"):
        cache.check_integrity()
