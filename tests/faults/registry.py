"""All deliberate faults, by kind."""

from __future__ import annotations

from tests.faults import batches, pieces, prompts, rewinds, saving, serving, sharing, stores, windows
from tests.faults import fault as made
from tests.faults.fault import Fault

__all__ = [
    "FAULTS",
    "Fault",
    "batches",
    "pieces",
    "prompts",
    "rewinds",
    "saving",
    "serving",
    "sharing",
    "stores",
    "windows",
]

FAULTS: list[Fault] = sorted(made.FAULTS, key=lambda f: f.kind)
