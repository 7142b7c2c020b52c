"""No alarm on engines that are right, whatever their layers and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from exactkv.verify import Target, assert_exact, verify
from exactkv.verify.report import NOT_SUPPORTED
from tests.faults.fault import chunked, full, recurrent, sliding, tiny, toy
from tests.tiny import FULL, chunk, window
from tests.verify.toy import ToyTarget

MIXES: dict[str, Callable[[int], Target]] = {
    "toy: all kinds": toy(full(), sliding(6), recurrent(), sliding(6, shares=1)),
    "toy: bounded only": toy(sliding(6), chunked(5), recurrent()),
    "toy: own sizes": toy(full(rope_base=500.0), chunked(8, head_dim=6), full(shares=0), sliding(3)),
    "toy: long rope": toy(full(), sliding(6), long_after=16),
    "toy: no slack": toy(sliding(6), full(), recurrent(), slack=0),
    "exactkv: full": tiny(FULL, FULL),
    "exactkv: windows": tiny(window(6), FULL, window(1)),
    "exactkv: chunks": tiny(chunk(5), FULL, chunk(8)),
    "exactkv: anchors": tiny(window(6, anchors=2), chunk(5, anchors=1)),
}
WHOLE = ("toy: all kinds", "exactkv: anchors")
"""Verified by all schedules in the quick test; the others by those that take least."""
QUICK = ("one pass", "visibility", "steps", "pieces", "warm pieces", "rewind", "draft rounds", "fork", "ragged pieces",
         "leaving rows", "joining rows", "prefix store", "generate", "requests")  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one thread, above all where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mix", MIXES)
def test_no_alarm(mix: str, seed: int) -> None:
    assert_exact(MIXES[mix](seed), seed=seed, schedules="all" if mix in WHOLE and not seed else QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(2, 52))
def test_no_alarm_over_many_seeds(mix: str, seed: int) -> None:
    assert_exact(MIXES[mix](seed), seed=seed)


def test_the_toy_can_do_everything() -> None:
    target = ToyTarget.__dict__
    # float64 has nothing wider; no script; nothing to settle; a quantized pass is a feed
    left_out = {"precise", "preamble", "settle", "quantized"}
    abilities = {name for name, value in vars(Target).items() if callable(value) and not name.startswith("_")}
    assert abilities - left_out <= set(target)
    report = verify(toy(full(), sliding(3), recurrent())(0), length=40)
    assert report.of(NOT_SUPPORTED) == []
    assert not any("in part not supported" in outcome.reason for outcome in report)
