"""What the terminal and the HTML file have in common: numbers in a few characters, and what belongs together."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from exactkv.verify.report import EXACT, NOT_SUPPORTED, UNDECIDED, VIOLATION, Diagnosis, Outcome, Report

SYMBOLS = {EXACT: "✓", VIOLATION: "✗", NOT_SUPPORTED: "–", UNDECIDED: "?"}
"""Beside the word, so that neither colour nor font is needed."""
MOST_RUNS = 6
MOST_RULES = 48
"""Chunks so small that there are more rules than this would hide the map."""


def clean(text: object) -> str:
    """One line without control characters: names and reasons come from elsewhere, and must not move the cursor."""
    joined = " ".join(str(text).split())
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cs") else c for c in joined)


def plain_lines(text: str) -> str:
    """As `clean`, for a text of several lines."""
    kept = text.replace("\r\n", "\n").expandtabs(4)
    return "".join("�" if c != "\n" and unicodedata.category(c) in ("Cc", "Cs") else c for c in kept)


def number(value: float | None) -> str:
    """Two digits and an exponent, such as 1.2e-3."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def times(value: float | None, tolerance: float | None) -> float | None:
    """``value`` in tolerances; infinite if it is not finite. None where that says nothing."""
    if value is None or tolerance is None or not math.isfinite(tolerance) or tolerance <= 0:
        return None
    return value / tolerance if math.isfinite(value) else math.inf


def times_text(value: float | None, tolerance: float | None) -> str:
    """Such as "400×", or "" where there is nothing to compare with."""
    ratio = times(value, tolerance)
    return "" if ratio is None or math.isinf(ratio) else f"{number(ratio)}×"


def tolerance_of(outcome: Outcome, report: Report) -> float:
    return report.tolerance if outcome.tolerance is None else outcome.tolerance


def label(outcome: Outcome) -> str:
    """Such as "steps [dynamic]", as in the progress. Checks of the one pass have no cache."""
    return f"{clean(outcome.schedule)} [{clean(outcome.cache)}]" if outcome.cache else clean(outcome.schedule)


def position_words(position: int | None, relation: str) -> str:
    """The first wrong position and how it lies to boundaries, in words."""
    if position is None:
        return clean(relation) or "not known"
    return f"{position}, {clean(relation)}" if relation else str(position)


def layer_words(diagnosis: Diagnosis) -> str:
    """The first wrong layer and its kind, in words."""
    kind = clean(diagnosis.layer_kind)
    if diagnosis.first_layer is None:
        return kind or "not known"
    return f"{diagnosis.first_layer} ({kind})" if kind else str(diagnosis.first_layer)


def seed_words(diagnosis: Diagnosis) -> str:
    return "shown by a second seed too" if diagnosis.confirmed else "NOT shown by a second seed"


def layers_words(layers: list[str]) -> str:
    """Such as "4: 3 × sliding 8, full"; in order while that is short."""
    names = [clean(name) for name in layers]
    if not names:
        return "not told by the target"
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    if len(runs) > MOST_RUNS:
        runs = Counter(names).most_common()
    return f"{len(names)}: " + ", ".join(name if count == 1 else f"{count} × {name}" for name, count in runs)


def facts(report: Report) -> list[tuple[str, str]]:
    """What was verified and what it is judged by: names and values."""
    versions = " · ".join(f"{clean(name)} {clean(version)}" for name, version in report.versions.items())
    compared = sum(outcome.compared for outcome in report.outcomes)
    rows = [
        ("engine", clean(report.engine) + (f" ({versions})" if versions else "")),
        ("model", clean(report.model)),
        ("numbers", f"{clean(report.dtype)}, seed {report.seed}, a text of {report.length} tokens"),
        ("layers", layers_words(report.layers)),
        ("scale", f"max |logit| {number(report.scale)}"),
        ("noise", f"{number(report.noise)}, the largest |difference| between equal computations"),
        ("measured by", "; ".join(clean(way) for way in report.judged_by)),
        ("tolerance", _tolerance_words(report)),
        ("compared", f"{compared} rows of logits, tokens and counts in {report.seconds:.1f} s"),
    ]
    rows += [("note", clean(note)) for note in report.notes]
    return [(name, value) for name, value in rows if value]


def _tolerance_words(report: Report) -> str:
    """Such as "1.0e-5, 8.3× the noise, 3e-6 of max |logit|"."""
    noise = times_text(report.tolerance, report.noise)
    parts = [number(report.tolerance), f"{noise} the noise" if noise else ""]
    if report.scale > 0:
        parts.append(f"{number(report.tolerance / report.scale)} of max |logit|")
    return ", ".join(part for part in parts if part)


@dataclass
class Finding:
    """One kind of fault and all outcomes that look like it. ``outcome``: the one whose diagnosis is shown."""

    outcome: Outcome
    diagnosis: Diagnosis
    outcomes: list[Outcome]

    def seen_by(self, most: int = 8) -> str:
        names = [label(o) for o in self.outcomes]
        more = f", and {len(names) - most} more" if len(names) > most else ""
        return ", ".join(names[:most]) + more


def findings(report: Report) -> list[Finding]:
    """Violations by what they look like. Of each the best evidence is shown: confirmed, with a script, and short."""
    groups: dict[tuple[str, str], list[tuple[Outcome, Diagnosis]]] = {}
    for outcome in report.outcomes:
        if outcome.diagnosis is not None:
            key = (outcome.diagnosis.kind, outcome.diagnosis.title)
            groups.setdefault(key, []).append((outcome, outcome.diagnosis))
    found = []
    for group in groups.values():
        outcome, diagnosis = min(
            group, key=lambda p: (not p[1].confirmed, not p[1].script, len(p[1].operations) or math.inf)
        )
        found.append(Finding(outcome, diagnosis, [o for o, _ in group]))
    return found


def script_of(report: Report) -> tuple[Outcome, str] | None:
    """The script that ``--script`` writes: of the first finding that has one."""
    for finding in findings(report):
        if finding.diagnosis.script:
            return finding.outcome, finding.diagnosis.script
    return None


def not_supported(report: Report) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """By cache, then by reason: the schedules that did not apply."""
    caches: dict[str, dict[str, list[str]]] = {}
    for outcome in report.of(NOT_SUPPORTED):
        reasons = caches.setdefault(clean(outcome.cache), {})
        reasons.setdefault(clean(outcome.reason), []).append(clean(outcome.schedule))
    return [(cache, list(reasons.items())) for cache, reasons in caches.items()]


@dataclass(frozen=True)
class Boundary:
    """A position at which a layer of some kind begins to forget. ``kind``: "sliding" or "chunked"."""

    position: int
    kind: str
    layer: str


def boundaries(layers: list[str], length: int) -> list[Boundary]:
    """Where windows first push a token out, and where each chunk begins, for layers such as "sliding 8"."""
    found = []
    for layer in dict.fromkeys(layers):
        match = re.search(r"(sliding|chunked)\D*(\d+)", layer)
        size = int(match[2]) if match else 0
        if match is None or size <= 0:
            continue
        places = range(size, length, size) if match[1] == "chunked" else range(size, min(length, size + 1))
        if len(places) <= MOST_RULES:
            found += [Boundary(place, match[1], clean(layer)) for place in places]
    return found
