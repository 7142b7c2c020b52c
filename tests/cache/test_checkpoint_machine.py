"""Random operations on caches that file checkpoints: what the cache's own machine does, and these."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from exactkv import CheckpointPolicy, load_cache
from tests.cache.helpers import MIXED
from tests.cache.test_machine import CacheMachine
from tests.hybrid import MIXERS, hybrid_model
from tests.tiny import tiny_model, with_ops

TINY, HYBRID = tiny_model(MIXED), hybrid_model()


class CheckpointMachine(CacheMachine):
    """What the cache's own machine does, and checkpoints, rewinds to anywhere, save and load."""

    @precondition(lambda self: len(self.held) < 3)
    @rule(
        every=st.sampled_from([None, 1, 4, 7]),
        most=st.sampled_from([None, 0, 20_000, 100_000]),
        slack=st.integers(0, 3),
    )
    def new_with_policy(self, every, most, slack):
        cache = self.model.new_cache(2, slack=slack, step=4, checkpoints=CheckpointPolicy(every, most))
        self.held.append((cache, [[], []]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), label=st.sampled_from(["", "message"]))
    def checkpoint(self, data, label):
        cache, shadow = self.held[self.pick(data)]
        rows = data.draw(st.none() | st.lists(st.integers(0, len(shadow) - 1), max_size=2)) if shadow else None
        filed = cache.checkpoint(rows, label)
        assert filed == [len(shadow[r]) for r in (range(len(shadow)) if rows is None else rows)]
        if cache.checkpoint_policy.max_bytes is None:
            for r, ids in enumerate(shadow):
                assert rows is not None or cache.checkpoints(r)[-1:] == [len(ids)][: len(ids)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def rewind_far(self, data):
        cache, shadow = self.held[self.pick(data)]
        to = [data.draw(st.integers(0, len(ids))) for ids in shadow]
        filed = [cache.checkpoints(r) for r in range(len(shadow))]
        standing = cache.standing(to)
        assert cache.rewind(to) == standing == cache.lengths
        for r, ids in enumerate(shadow):
            held = [p for p in filed[r] if p <= to[r]]
            assert max(held, default=0) <= standing[r] <= to[r]
            assert cache.checkpoints(r) == [p for p in held if p <= standing[r]]
            del ids[standing[r] :]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def save_and_load(self, data, keep):
        i = self.pick(data)
        cache, shadow = self.held[i]
        with tempfile.TemporaryDirectory() as directory:
            cache.save(Path(directory) / "cache")
            loaded = load_cache(Path(directory) / "cache", self.model)
        assert loaded.nbytes == cache.nbytes and loaded.checkpoint_nbytes == cache.checkpoint_nbytes
        assert loaded.standing(loaded.lengths) == loaded.lengths
        self.put(i, (loaded, [list(ids) for ids in shadow]), keep)


class HybridCheckpointMachine(CheckpointMachine):
    model, reference, last_layer = HYBRID, with_ops(HYBRID), len(MIXERS) - 1


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHybridCheckpointMachine = HybridCheckpointMachine.TestCase
TestHybridCheckpointMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
