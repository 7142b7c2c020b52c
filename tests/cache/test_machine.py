"""Random sequences of operations on several caches at once; every row must equal one plain forward pass."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import exactkv.cache as cache_package
from exactkv.cache import AttentionLayer, RecurrentLayer
from tests.tiny import FULL, VOCAB, chunk, tiny_model, window, with_ops

PATTERNS = [FULL, window(5), chunk(8), window(4, anchors=2), chunk(6, anchors=3), window(1), chunk(8)]
MODEL = tiny_model(PATTERNS)
REFERENCE = with_ops(MODEL)
MOST = 90  # tokens a row: past every window and chunk many times


class Interrupted(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


class CacheMachine(RuleBasedStateMachine):
    """``held``: pairs of a cache and its shadow, the token ids of each row as this test fed them."""

    model, reference, last_layer = MODEL, REFERENCE, len(PATTERNS) - 1

    def __init__(self):
        super().__init__()
        self.held = []
        self.expected = {}

    def one_pass(self, ids):
        """Logits of one forward pass by the reference, without a cache."""
        key = tuple(ids)
        if key not in self.expected:
            self.expected[key] = self.reference([ids])[0]
        return self.expected[key]

    def pick(self, data):
        return data.draw(st.integers(0, len(self.held) - 1), label="which cache")

    @rule(batch=st.integers(0, 3), slack=st.integers(0, 6), step=st.sampled_from([1, 3, 8, 256]))
    @precondition(lambda self: len(self.held) < 3)
    def new(self, batch, slack, step):
        self.held.append((self.model.new_cache(batch, slack=slack, step=step), [[] for _ in range(batch)]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), width=st.integers(1, 24), fails_at=st.integers(-12, len(PATTERNS) - 1))
    def feed(self, data, width, fails_at):
        """Feed a ragged piece; now and then an interrupt comes at one of the layers."""
        cache, shadow = self.held[self.pick(data)]
        lengths = [
            min(data.draw(st.integers(0, width)), MOST - len(ids))
            if data.draw(st.booleans())
            else min(width, MOST - len(ids))
            for ids in shadow
        ]
        tokens = data.draw(
            st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width),
                     min_size=len(shadow), max_size=len(shadow))
        )  # fmt: skip
        given = torch.tensor(tokens, dtype=torch.int64).reshape(len(shadow), width)
        if fails_at >= 0:
            self.feed_interrupted(cache, given, lengths, min(fails_at, self.last_layer))
            return
        logits = self.model(given, cache=cache, lengths=lengths)
        for r, (ids, n) in enumerate(zip(shadow, lengths, strict=True)):
            past = len(ids)
            ids += tokens[r][:n]
            assert torch.isnan(logits[r, n:]).all()
            if n:
                expected = self.one_pass(ids)[past:]
                assert (logits[r, :n] - expected).abs().max() <= 1e-10 * expected.abs().max()

    def feed_interrupted(self, cache, given, lengths, fails_at):
        """Each kind of layer calls this method of its layer of the cache."""
        before = cache.lengths
        methods = {AttentionLayer: AttentionLayer.extend, RecurrentLayer: RecurrentLayer.write}

        def failing(method):
            def failing_method(layer, *arguments):
                result = method(layer, *arguments)
                if layer.index == fails_at:
                    raise Interrupted
                return result

            return failing_method

        AttentionLayer.extend, RecurrentLayer.write = (failing(method) for method in methods.values())
        try:
            self.model(given, cache=cache, lengths=lengths)
        except Interrupted:
            pass
        finally:
            AttentionLayer.extend, RecurrentLayer.write = methods.values()
        assert cache.lengths == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def rewind(self, data):
        cache, shadow = self.held[self.pick(data)]
        to = [data.draw(st.integers(max(0, len(ids) - data.draw(st.integers(0, 12))), len(ids))) for ids in shadow]
        standing = cache.standing(to)
        assert cache.lengths == [len(ids) for ids in shadow], "standing must not move anything"
        reached = cache.rewind(to)
        assert reached == standing == cache.lengths
        for r, ids in enumerate(shadow):
            assert reached[r] <= to[r]
            del ids[reached[r] :]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def select(self, data, keep):
        i = self.pick(data)
        cache, shadow = self.held[i]
        rows = data.draw(st.lists(st.integers(0, len(shadow) - 1), max_size=3)) if shadow else []
        made = (cache.select(rows), [list(shadow[r]) for r in rows])
        self.put(i, made, keep)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(1, 2), keep=st.booleans())
    def fork(self, data, n, keep):
        i = self.pick(data)
        cache, shadow = self.held[i]
        self.put(i, (cache.fork(n), [list(ids) for ids in shadow for _ in range(n)]), keep)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def join(self, data, keep):
        i, j = self.pick(data), self.pick(data)
        caches, shadows = zip(self.held[i], self.held[j], strict=True)
        self.put(i, (cache_package.join(caches), [list(ids) for s in shadows for ids in s]), keep)

    def put(self, i, made, keep):
        """Beside its source, which then goes on too, or in its place."""
        while made[0].batch_size > 4:
            made = (made[0].drop([1]), made[1][:1] + made[1][2:])
        if keep and len(self.held) < 4:
            self.held.append(made)
        else:
            self.held[i] = made

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(0, 4))
    def raise_slack(self, data, more):
        cache, _ = self.held[self.pick(data)]
        cache.slack += more

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def forget(self, data):
        self.held.pop(self.pick(data))

    @invariant()
    def whole(self):
        for cache, shadow in self.held:
            cache.check_integrity()
            assert cache.lengths == [len(ids) for ids in shadow]
            assert [cache.tokens(r) for r in range(len(shadow))] == shadow


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
