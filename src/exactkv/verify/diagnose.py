"""From a violation to its diagnosis: confirmed, made small, located, named, and written as a script."""

from __future__ import annotations

import time
from contextlib import suppress

from exactkv.verify import operations as ops
from exactkv.verify.classify import Clues, classify
from exactkv.verify.kinds import KINDS
from exactkv.verify.localize import Replay, Seen, first_wrong, layer_differences, replayable, seen
from exactkv.verify.minimize import Case, minimize
from exactkv.verify.report import UNDECIDED, Diagnosis, Outcome, Report
from exactkv.verify.run import Evidence, Run
from exactkv.verify.script import script
from exactkv.verify.shadow import Violation
from exactkv.verify.target import NotSupported

BUDGET = 6.0
"""Seconds for making violations small and locating them; when they are spent, the rest is only classified."""
EACH = 1.5


def diagnose(run: Run, report: Report) -> None:
    """Fill in ``diagnosis`` of every violation of ``report``. Those that follow from others (the same subject on
    the same cache) come after what they follow from, when time is short."""
    until = time.monotonic() + BUDGET
    subjects: set[tuple[str, str, str]] = set()
    first: list[tuple[Outcome, Evidence]] = []
    later: list[tuple[Outcome, Evidence]] = []
    for outcome in report.violations:
        evidence = run.evidence.get((outcome.schedule, outcome.cache))
        if evidence is None:
            outcome.diagnosis = _of_the_pass(run, outcome)
            continue
        subject = (evidence.schedule.build.__module__, outcome.cache, evidence.violation.how)
        (later if subject in subjects else first).append((outcome, evidence))
        subjects.add(subject)
    for outcome, evidence in [*first, *later]:
        confirmed = run.other.violation(evidence.schedule, outcome.cache, evidence.number) is not None
        if not confirmed and _doubtful(run, evidence.violation):
            outcome.status = UNDECIDED
            outcome.reason = f"not seen with another seed, and small: {outcome.reason}"
            continue
        seconds = min(EACH, until - time.monotonic())
        outcome.diagnosis = _diagnosis(run, report, outcome, evidence, confirmed, seconds)


def _of_the_pass(run: Run, outcome: Outcome) -> Diagnosis:
    """The one pass itself is wrong."""
    inconsistencies = run.judge.inconsistencies
    kind = inconsistencies[0].kind if outcome.schedule == "one pass" and inconsistencies else "C"
    position = inconsistencies[0].position if inconsistencies else None
    because = "the fault is in the pass without a cache; what follows from it is compared with it nevertheless"
    return Diagnosis(kind, KINDS[kind], because, first_position=position, confirmed=True)


def _doubtful(run: Run, violation: Violation) -> bool:
    return violation.how == "logits" and violation.difference < 50 * run.judge.tolerance


def _diagnosis(
    run: Run, report: Report, outcome: Outcome, evidence: Evidence, confirmed: bool, seconds: float
) -> Diagnosis:
    def failing(case: Case) -> Violation | None:
        for violation in run.session(outcome.cache, stop=True).run(case).violations:
            if violation.how == evidence.violation.how and violation.hint == evidence.violation.hint:
                alike = violation.message.split(":")[0] == evidence.violation.message.split(":")[0]
                if violation.how != "crash" or alike:
                    return violation
        return None

    case, violation = minimize(evidence.case, evidence.violation, failing, seconds)
    located = _located(run, outcome, case, violation) if seconds > 0 else ([], None, None)
    differences, layer, sight = located
    clues = Clues(run, report, evidence, outcome.cache, violation, layer, sight)
    kind, because = classify(clues)
    first = evidence.violation.position
    text = ""
    with suppress(NotSupported):
        text = script(run.target, case, outcome.cache)
    layers = run.target.layers
    return Diagnosis(
        kind=kind,
        title=KINDS[kind],
        because=because,
        first_position=first,
        relation=relation(run, evidence) if first is not None else "",
        first_layer=layer,
        layer_kind=report.layers[layer] if layer is not None and layer < len(layers) else "",
        layer_differences=differences,
        confirmed=confirmed,
        operations=[str(op) for op in case],
        script=text,
    )


def _located(
    run: Run, outcome: Outcome, case: Case, violation: Violation
) -> tuple[list[float], int | None, Seen | None]:
    """Differences by layer, the first wrong layer, and what the wrong row depended on there: as far as it goes."""
    if violation.how != "logits" or not replayable(case) or outcome.cache not in run.target.caches:
        return [], None, None
    replay = Replay(run.target, run.judge, outcome.cache)
    differences: list[float] = []
    layer, sight = None, None
    with suppress(Exception):  # a target under test; without hidden states there is less to say
        differences = layer_differences(replay, case)
        layer = first_wrong(differences, run.judge)
        if layer is not None and run.target.small and violation.position is not None:
            sight = seen(replay, case, layer, violation.position)
    return differences, layer, sight


def relation(run: Run, evidence: Evidence) -> str:
    """How the first wrong position lies to windows, chunks, pieces and rewinds, in words."""
    position = evidence.violation.position or 0
    said = []
    for layer in dict.fromkeys(run.target.layers):
        size = layer.size
        if size is None:
            continue
        if layer.kind == "chunked" and position % size == 0 and position:
            said.append(f"the first of a chunk of {size}")
        elif layer.kind == "chunked" and position >= size:
            said.append(f"token {position % size} of chunk {position // size} (of {size})")
        elif position == size:
            said.append(f"the first whose window of {size} leaves something out")
        elif position == size - 1:
            said.append(f"the last before a window of {size} leaves something out")
        elif position > size:
            said.append(f"{position - size} past the first that a window of {size} leaves something out for")
    said += _fed(evidence)
    return "; ".join(said)


def _fed(evidence: Evidence) -> list[str]:
    """How it was fed."""
    at = evidence.violation.operation
    op = evidence.case[at] if at < len(evidence.case) else None
    said = []
    if isinstance(op, ops.Feed):
        tokens = len(op.tokens)
        said.append("fed alone" if tokens == 1 else f"fed in a piece of {tokens}")
        before = [x for x in evidence.case[:at] if getattr(x, "name", None) == op.name and not isinstance(x, ops.New)]
        if not before:
            said.append("into an empty cache")
        elif isinstance(before[-1], ops.Rewind):
            said.append(f"just after {before[-1].count} tokens were taken back")
        elif any(isinstance(x, ops.Rewind) for x in before):
            said.append("some time after tokens were taken back")
    return said
