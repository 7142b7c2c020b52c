"""Puts every deliberate fault in, runs `exactkv verify` on it, and prints what was caught and how it was named:

    python -m tests.faults [--kinds ABC] [--markdown] [--all-schedules]

The exit code is 1 if a fault was not caught."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from exactkv.verify import KINDS, Report, schedule_names, verify
from tests.faults.registry import FAULTS, Fault

ALWAYS = ("one pass", "visibility", "steps")
COLUMNS = ("kind", "fault", "what it does", "caught by", "diagnosed as", "right")


@dataclass(frozen=True)
class Line:
    """What came of a fault. ``named``: the kind in the first diagnosis."""

    fault: Fault
    caught_by: tuple[str, ...]
    named: str

    @property
    def right(self) -> bool:
        return self.named == self.fault.kind

    def cells(self) -> tuple[str, ...]:
        caught = ", ".join(self.caught_by) or "nothing"
        fault = self.fault
        return (fault.kind, fault.name, fault.about, caught, self.named or "–", "yes" if self.right else "no")


def schedules_of(fault: Fault) -> list[str]:
    """Those for the fault's kind, the plain ones, and those by which it is known to be caught."""
    also = (*ALWAYS, *fault.schedules)
    return [name for name, kinds, _ in schedule_names() if fault.kind in kinds or name in also]


def examined(fault: Fault, schedules: Sequence[str] | str, seed: int = 0) -> Line:
    with fault.target(seed) as target:
        report: Report = verify(target, schedules=schedules, seed=seed)
    caught = tuple(dict.fromkeys(o.schedule for o in report.violations))
    first = next((o.diagnosis for o in report.violations if o.diagnosis), None)
    return Line(fault, caught, first.kind if first else "")


def show(lines: Sequence[Line], console: Console) -> None:
    table = Table(*COLUMNS, title="Deliberate faults", show_lines=True)
    for line in lines:
        colour = "red" if not line.caught_by else "" if line.right else "yellow"
        table.add_row(*line.cells(), style=colour)
    console.print(table)
    caught, right = sum(bool(x.caught_by) for x in lines), sum(x.right for x in lines)
    console.print(f"{len(lines)} faults of {len({x.fault.kind for x in lines})} kinds: {caught} caught, {right} named")


def markdown(lines: Sequence[Line]) -> str:
    """The table for the docs, a heading for each kind."""
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join(rows + [f"| {' | '.join(line.cells())} |" for line in lines])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kinds", default="".join(KINDS), help="letters of the kinds to try (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    parser.add_argument("--all-schedules", action="store_true", help="not only those for the kind")
    given = parser.parse_args()
    wanted = [f for f in FAULTS if f.kind in given.kinds.upper()]
    lines = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for fault in wanted:
            progress.update(task, description=f"{fault.kind}  {fault.name}")
            lines.append(examined(fault, "all" if given.all_schedules else schedules_of(fault)))
            progress.advance(task)
    if given.markdown:
        print(markdown(lines))
    else:
        show(lines, Console())
    return 0 if lines and all(line.caught_by for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
