"""Every deliberate fault is caught, and named as its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exactkv.verify import KINDS, verify
from tests.faults.registry import FAULTS, Fault


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one thread, above all where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_the_table_in_the_docs_has_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    assert [f.name for f in FAULTS if f"| {f.kind} | {f.name} |" not in page] == []
