"""What judges: the tolerance follows the engine's noise, ties are told from faults, and the probe checks the tool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from exactkv.verify import Layer, Target, verify
from exactkv.verify.judge import Judge
from exactkv.verify.minimize import minimize
from exactkv.verify.operations import Feed, Fork, New, Rewind
from exactkv.verify.probe import ENOUGH, probe, reach, visible
from exactkv.verify.report import EXACT, UNDECIDED, VIOLATION
from exactkv.verify.shadow import Violation
from exactkv.verify.target import Array, Tokens
from tests.faults.fault import full, sliding
from tests.verify.toy import Config, ToyTarget

TEXT = tuple(1 + (7 * i * i + 3 * i) % 90 for i in range(40))


class Altered(ToyTarget):
    """The toy with its results changed by ``passes`` (without a cache) and ``feeds``: (logits, tokens) -> logits."""

    def __init__(self, *layers, passes=lambda x, tokens: x, feeds=lambda x, tokens: x, seed=0):
        super().__init__(Config(layers or (full(), sliding(6))), seed)
        self.passes, self.feeds = passes, feeds

    def reseeded(self, seed: int) -> Target:
        return type(self)(*self.model.config.layers, passes=self.passes, feeds=self.feeds, seed=seed)

    def forward(self, rows: Sequence[Tokens]) -> Array:
        whole = super().forward(rows)
        return np.stack([self.passes(x, list(row)) for x, row in zip(whole, rows, strict=True)])

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        whole = super().jittered(rows, scale, seed)
        return np.stack([self.passes(x, list(row)) for x, row in zip(whole, rows, strict=True)])

    def feed(self, cache, tokens, positions=False):
        return self.feeds(super().feed(cache, tokens, positions), list(tokens))


def noisy(size):
    """Rounding that depends on the shape of the call, as that of matrix products does."""

    def change(logits, tokens):
        drawn = np.random.default_rng(len(tokens)).uniform(-1, 1, logits.shape)
        return logits + size * drawn

    return change


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-4])
def test_the_tolerance_is_a_multiple_of_the_targets_own_noise(size):
    target = Altered(passes=noisy(size))
    target.dtype = "float64" if size < 1e-8 else "float32"  # more noise than float64 could have
    judge = Judge(target, TEXT)
    assert size < judge.noise < 3 * size
    assert 4 * size < judge.tolerance < 40 * size


@pytest.mark.parametrize(("error", "status"), [(2e-6, EXACT), (2e-4, VIOLATION)])
def test_noise_is_no_violation_and_what_exceeds_it_is(error, status):
    target = Altered(passes=noisy(1e-6), feeds=lambda x, tokens: x + error)
    (outcome,) = verify(target, schedules=["steps"])
    assert outcome.status == status


def test_not_a_number_is_a_violation():
    target = Altered(feeds=lambda x, tokens: np.where(np.arange(x.shape[1]) == 3, np.nan, x))
    (outcome,) = verify(target, schedules=["steps"])
    assert outcome.status == VIOLATION
    assert outcome.not_finite > 0
    assert "not a number" in outcome.reason


def test_a_pass_that_sees_the_future_is_a_violation():
    target = Altered(passes=lambda x, tokens: x + 1e-2 * len(tokens))
    found = {o.schedule: o.status for o in verify(target, schedules=["one pass", "steps"])}
    assert found["one pass"] == VIOLATION


def test_rows_that_depend_on_their_batch_are_a_violation():
    class Coupled(ToyTarget):
        def forward(self, rows):
            whole = super().forward(rows)
            return whole + 0.01 * (len(rows) - 1)

    (outcome,) = verify(Coupled(Config((full(),))), schedules=["one pass"])
    assert outcome.status == VIOLATION
    assert outcome.diagnosis is not None and outcome.diagnosis.kind == "J"


class Routed(ToyTarget):
    """An expert is added where a router's logit is positive; at one position it is as good as zero. Of a call of one
    token the router's rounding is another, so that decoding may choose otherwise."""

    TIED = 9

    def _route(self, logits: Array, first: int, rounding: float) -> Array:
        out = logits.copy()
        for i in range(len(out)):
            margin = rounding if first + i == self.TIED else float(logits[i, 0]) + 0.3
            out[i] += 0.5 * (margin > 0)
        return out

    def forward(self, rows):
        return np.stack([self._route(x, 0, 1e-17) for x in super().forward(rows)])

    def jittered(self, rows, scale, seed):
        sign = 1.0 if seed % 2 else -1.0
        return np.stack([self._route(x, 0, sign * scale) for x in super().jittered(rows, scale, seed)])

    def feed(self, cache, tokens, positions=False):
        first = cache.lengths[0]
        rounding = -1e-17 if len(tokens) == 1 else 1e-17
        return self._route(super().feed(cache, tokens, positions), first, rounding)


def test_a_near_tie_is_told_from_a_fault():
    target = Routed(Config((full(), sliding(6))))
    (outcome,) = verify(target, schedules=["steps"])
    assert outcome.status == EXACT
    assert "near-tie" in outcome.reason

    class Faulty(Routed):
        def feed(self, cache, tokens, positions=False):
            first = cache.lengths[0]
            logits = super().feed(cache, tokens, positions)
            return logits + (0.4 if first > 12 else 0.0)

    (outcome,) = verify(Faulty(Config((full(), sliding(6)))), schedules=["steps"])
    assert outcome.status == VIOLATION


def test_wrong_tokens_are_told_from_ties_by_their_margin():
    target = ToyTarget(Config((full(),)))
    judge = Judge(target, TEXT)
    right = judge.greedy(TEXT[:5], 4)
    assert judge.wrong_token(TEXT[:5], right) is None
    wrong = [*right[:2], (right[2] + 1) % 97, right[3]]
    found = judge.wrong_token(TEXT[:5], wrong)
    assert found is not None and found[:2] == (2, right[2])


def test_a_model_whose_attention_does_not_matter_proves_nothing():
    class Deaf(ToyTarget):
        def forward(self, rows):
            return np.stack([np.stack([super(Deaf, self).forward([[t]])[0, 0] for t in row]) for row in rows])

    (outcome,) = verify(Deaf(Config((full(),))), schedules=["visibility"], length=20)
    assert outcome.status == UNDECIDED


def test_reach_composes_what_layers_see():
    layers = (Layer("sliding", 3), Layer("chunked", 4))
    reached = reach(layers, 12)
    assert [int(np.argmax(row)) for row in reached] == [0, 0, 0, 0, 2, 2, 2, 2, 6, 6, 6, 6]
    assert visible(Layer("sliding", 3, anchors=1), 8)[7].nonzero()[0].tolist() == [0, 5, 6, 7]


@pytest.mark.parametrize("claimed", [5, 7])
def test_a_window_that_is_not_the_one_claimed_shows(claimed):
    target = ToyTarget(Config((sliding(6), sliding(6))))
    assert not probe(target, Judge(target, TEXT), TEXT[:30]).wrong
    target.layers = (Layer("sliding", claimed),) * 2
    found = probe(target, Judge(target, TEXT), TEXT[:30])
    assert found.wrong
    assert found.share > 0.5 * ENOUGH


def test_a_violation_is_made_as_small_as_it_can_be():
    case = [
        New("cache"), Feed("cache", tuple(range(1, 9))), Fork("cache", "twin"), Feed("cache", (20,)),
        Feed("cache", (21,)), Rewind("cache", 1), Feed("cache", (66, 77)), Feed("cache", (5,)),
    ]  # fmt: skip

    def failing(smaller):
        """Fails as soon as 77 is fed after a rewind."""
        rewound = False
        for i, op in enumerate(smaller):
            rewound = rewound or isinstance(op, Rewind)
            if isinstance(op, Feed) and 77 in op.tokens and rewound:
                return Violation("logits", "wrong", i)
        return None

    found = failing(case)
    smallest, violation = minimize(case, found, failing)
    assert smallest == [Rewind("cache", 1), Feed("cache", (77,))]
    assert violation.operation == 1
