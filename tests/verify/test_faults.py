"""Every deliberate fault is caught, and named as its kind."""

from __future__ import annotations

from collections import Counter

import pytest

from exactkv.verify import KINDS, verify
from tests.faults.registry import FAULTS, Fault


def test_two_faults_of_each_kind() -> None:
    counts = Counter(fault.kind for fault in FAULTS)
    assert {kind: counts[kind] for kind in KINDS if counts[kind] < 2} == {}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.name.replace(' ', '-')}")
def test_is_caught_and_named(fault: Fault) -> None:
    with fault.target(0) as target:
        report = verify(target, schedules=fault.schedules)
    assert report.violations, f"not caught: {fault.about}"
    diagnosis = report.violations[0].diagnosis
    assert diagnosis is not None
    assert diagnosis.kind == fault.kind, diagnosis.because
