"""The whole of a verification: a target, its judge, the schedules one after the other, a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from exactkv.errors import InputError
from exactkv.verify import report as results
from exactkv.verify.diagnose import diagnose
from exactkv.verify.report import Outcome, Report
from exactkv.verify.run import ABOUT, NOTHING, VISIBILITY, Run
from exactkv.verify.schedules import SCHEDULES
from exactkv.verify.target import Target
from exactkv.verify.targets import as_target, load


class Progress(Protocol):
    """Told of each schedule before it runs (``outcome`` None) and after."""

    def __call__(self, done: int, total: int, name: str, outcome: Outcome | None) -> None: ...


def schedule_names() -> list[tuple[str, str, str]]:
    """Name, kinds of fault (letters), and what is done, of every schedule."""
    return [(name, *ABOUT[name]) for name in ABOUT] + [(s.name, s.kinds, s.about) for s in SCHEDULES]


def verify(
    target: Any,
    *,
    engine: str | None = None,
    schedules: str | Sequence[str] = "all",
    dtype: str = "auto",
    seed: int = 0,
    length: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Whether decoding with a cache gives what one full forward pass gives, in every way that ``target`` offers.

    ``target``: a `Target`, a model object of exactkv, transformers or mlx-lm, or a path, hub id, GGUF file or
    bare config.json, which ``engine`` ("exactkv" unless said otherwise) loads. ``schedules``: "all" or names
    (`schedule_names`). ``dtype``: "auto" is float32. ``length``: tokens of the main text.
    Raises InputError or LoadError where it cannot run.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed is {seed!r}; expected an integer from 0 to {2**31 - 1}")
    started = time.monotonic()
    wanted = _wanted(schedules)
    subject, name = _subject(target, engine, "float32" if dtype == "auto" else dtype, seed)
    run = Run(subject, seed, length)
    report = run.report(name)
    jobs = run.jobs(wanted)
    try:
        for done, (label, job) in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs), label, None)
            begun = time.monotonic()
            outcome = job()
            outcome.seconds = time.monotonic() - begun
            if outcome.reason != NOTHING:
                report.outcomes.append(outcome)
            if progress is not None:
                progress(done + 1, len(jobs), label, outcome)
        if VISIBILITY not in wanted and (seen := run.visibility()).status == results.UNDECIDED:
            report.outcomes.append(seen)  # whatever was asked for, it would prove nothing
        diagnose(run, report)
    finally:
        run.close()
    report.seconds = time.monotonic() - started
    return report


def assert_exact(target: Any, **options: Any) -> Report:
    """`verify` for a test: raises AssertionError, with the diagnosis, where anything is not exact.
    Returns the report."""
    report = verify(target, **options)
    if not report.exact:
        raise AssertionError(explain(report))
    return report


def explain(report: Report) -> str:
    """The verdict and its reasons as plain text."""
    lines = [report.summary()]
    for outcome in report.violations + report.of(results.UNDECIDED):
        lines.append(f"- {outcome.schedule} [{outcome.cache}]: {outcome.reason}")
        if outcome.diagnosis:
            d = outcome.diagnosis
            lines.append(f"  kind {d.kind} ({d.title}): {d.because}")
            lines += [f"    {i}. {text}" for i, text in enumerate(d.operations, 1)]
    return "\n".join(lines)


def _wanted(schedules: str | Sequence[str]) -> set[str]:
    known = [name for name, _, _ in schedule_names()]
    if schedules == "all":
        return set(known)
    given = [s.strip() for s in schedules.split(",")] if isinstance(schedules, str) else list(schedules)
    unknown = [s for s in given if s not in known]
    if unknown or not given:
        raise InputError(
            f"unknown schedules: {', '.join(map(repr, unknown))}; expected 'all' or of: {', '.join(known)}"
        )
    return set(given)


def _subject(target: Any, engine: str | None, dtype: str, seed: int) -> tuple[Target, str]:
    if isinstance(target, str | Path):
        return load(engine or "exactkv", str(target), dtype=dtype, seed=seed), str(target)
    subject = as_target(target)
    if engine is not None and engine != subject.engine:
        raise InputError(f"engine is {engine!r}, but the target is of {subject.engine!r}; leave engine out")
    return subject, subject.name
