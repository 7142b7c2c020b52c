"""What a verification found: plain records, and their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
"""Version of the JSON; raised when a field changes its meaning or goes. Fields may be added."""

EXACT, VIOLATION, NOT_SUPPORTED, UNDECIDED = "exact", "violation", "not supported", "undecided"
STATUSES = (EXACT, VIOLATION, NOT_SUPPORTED, UNDECIDED)
"""Undecided: the model's own noise or near-ties leave nothing to judge by."""


@dataclass
class Diagnosis:
    """What a violation looks like. ``kind``: a letter of the 20 kinds of fault (`exactkv.verify.kinds.KINDS`)."""

    kind: str
    title: str
    because: str
    """Why this kind, in a sentence or two."""
    first_position: int | None = None
    """The first wrong position of the text."""
    relation: str = ""
    """How that position lies to windows, chunks, pieces, rewinds, in words."""
    first_layer: int | None = None
    layer_kind: str = ""
    layer_differences: list[float] = field(default_factory=list)
    """Largest difference of hidden states by layer (the first entry: what goes into layer 0)."""
    confirmed: bool = False
    """Whether another seed shows it too."""
    operations: list[str] = field(default_factory=list)
    """The smallest sequence of operations found that still shows it, in words."""
    script: str = ""
    """A script that shows it without exactkv, where the target has a library of its own."""


@dataclass
class Outcome:
    """One schedule on one kind of cache."""

    schedule: str
    cache: str
    kinds: str
    """The letters of the kinds of fault that this schedule is there for."""
    status: str
    worst: float | None = None
    """Largest |difference| of logits that counted. None where nothing was compared."""
    tolerance: float | None = None
    compared: int = 0
    """Rows of logits, tokens and counts that were compared."""
    differences: list[float | None] = field(default_factory=list)
    """By position of the text: the largest |difference| of logits there; None where nothing was compared."""
    not_finite: int = 0
    """Rows of logits that held NaN or infinity; their difference is infinite (null in JSON)."""
    reason: str = ""
    """What went wrong, or what is not supported, or why it cannot be decided."""
    seconds: float = 0.0
    diagnosis: Diagnosis | None = None


@dataclass
class Report:
    """The result of `exactkv.verify`."""

    target: str
    engine: str
    versions: dict[str, str]
    model: str
    dtype: str
    seed: int
    layers: list[str]
    """Each layer's memory, such as "sliding 8"."""
    length: int
    """Tokens of the main text."""
    noise: float = 0.0
    """The engine's own rounding noise: largest |difference| of logits between equal computations."""
    tolerance: float = 0.0
    scale: float = 0.0
    """max |logit| of the one pass."""
    judged_by: list[str] = field(default_factory=list)
    """How the noise was measured, in words."""
    config: dict[str, Any] | None = None
    """The shrunk config, where the model was made from one."""
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def of(self, status: str) -> list[Outcome]:
        return [o for o in self.outcomes if o.status == status]

    @property
    def violations(self) -> list[Outcome]:
        return self.of(VIOLATION)

    @property
    def exact(self) -> bool:
        """No violation, nothing undecided, and something was found exact."""
        return not self.violations and not self.of(UNDECIDED) and bool(self.of(EXACT))

    def __bool__(self) -> bool:
        return self.exact

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    def summary(self) -> str:
        """One line: the verdict with its counts."""
        counts = ", ".join(f"{n} {_plural(s, n)}" for s in STATUSES if (n := len(self.of(s))))
        verdict = "exact" if self.exact else "NOT exact" if self.violations else "undecided"
        return f"{self.target}: {verdict} ({counts or 'nothing was run'}; tolerance {self.tolerance:.1e})"

    def to_json(self) -> dict[str, Any]:
        """The whole report as plain values (docs/verify.md describes them)."""
        return {"format": FORMAT, "exact": self.exact, **asdict(self)}


def _plural(status: str, count: int) -> str:
    return "violations" if status == VIOLATION and count != 1 else status
