"""Interrupted anywhere or given bad input, the cache stands where it stood."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import exactkv.cache
from exactkv.cache import join
from exactkv.errors import ExactKVError, InputError, IntegrityError
from tests.cache.helpers import MIXED, assert_exact, feed
from tests.tiny import FULL, random_tokens, tiny_model, window

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


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_interrupted_while_rows_move_to_the_front(copies, monkeypatch):
    """A window of 20 moves where source and destination overlap: one layer is moved, the other not yet."""
    model = tiny_model([window(20), window(20)])
    cache = model.new_cache(step=1)
    feed(model, cache, random_tokens(20))
    while cache._rows[0].runs[0].memory.capacity < 25 or cache.lengths[0] - cache._rows[0].runs[0].origin < 25:
        feed(model, cache, [cache.lengths[0] % 97])
    copy, seen = torch.Tensor.__setitem__, 0

    def failing(tensor, place, value):
        nonlocal seen
        copy(tensor, place, value)
        seen += isinstance(value, torch.Tensor)
        if seen == copies:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "__setitem__", failing)
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, [1])
    monkeypatch.undo()
    cache.check_integrity()
    assert_exact(model, cache)


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
    yield "select a number", lambda c: c.select(0), "expected a list"
    yield "select nothing", lambda c: c.select(None), "expected a list"
    yield "select names", lambda c: c.select({0: 1}), "expected a list"
    yield "drop a number", lambda c: c.drop(0), "expected a list"
    yield "drop a bool", lambda c: c.drop([True]), "does not exist"
    yield "join a cache", lambda c: join(c), "expected a list"
    yield "fork a bool", lambda c: c.fork(True), "integer"
    yield "lengths a number", lambda c: model([[1], [2]], cache=c, lengths=1), "expected a list"
    yield "lengths a scalar", lambda c: model([[1], [2]], cache=c, lengths=torch.tensor(1)), "expected a list"
    yield "lengths a dict", lambda c: model([[1], [2]], cache=c, lengths={0: 1, 1: 1}), "expected a list"
    yield "sparse", lambda c: model(torch.eye(2, dtype=torch.int64).to_sparse(), cache=c), "dense"
    yield "meta", lambda c: model(torch.zeros((2, 1), dtype=torch.int64, device="meta"), cache=c), "dense"
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


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name in ("batch_size", "slack", "step", "max_length") for value in (-1, 1.0, True, "2")),
        {"step": 0},
        {"max_length": 0},
        {"storage": "int3"},
        {"storage": []},
    ],
    ids=str,
)
def test_new_cache_checks_its_arguments(options):
    with pytest.raises(InputError):
        tiny_model([FULL]).new_cache(**options)
