"""A report on a terminal: what was verified, a table of schedules, what is wrong and where, the verdict."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exactkv.verify.report import EXACT, NOT_SUPPORTED, UNDECIDED, VIOLATION, Outcome, Report
from exactkv.verify.show.words import (
    SYMBOLS,
    Finding,
    clean,
    facts,
    findings,
    label,
    layer_words,
    not_supported,
    number,
    position_words,
    script_of,
    seed_words,
    times_text,
    tolerance_of,
)

STYLES = {EXACT: "green", VIOLATION: "bold red", NOT_SUPPORTED: "dim", UNDECIDED: "yellow"}
WIDE = 130
"""From so many columns on there is room for reasons in the table; else they are listed below it."""
ASCII = str.maketrans({"✓": "+", "✗": "x", "–": "-", "×": "x", "∞": "inf", "·": "-", "…": "...", "�": "?"})


class Page:
    """A console, and whether it can show more than ASCII."""

    def __init__(self, console: Console):
        self.console = console
        self.ascii = console.options.ascii_only

    def text(self, words: str, style: str = "") -> Text:
        """Never read as markup. Where the encoding has no "✓" it must not become the "?" of undecided."""
        return Text(words.translate(ASCII) if self.ascii else words, style=style)

    def put(self, words: str = "", style: str = "") -> None:
        self.console.print(self.text(words, style))

    def pairs(self, rows: list[tuple[str, str, str]], indent: int = 2) -> None:
        """Names and values below each other: (name, value, style of the value)."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value, style in rows:
            grid.add_row(self.text(name, "dim"), self.text(value, style))
        self.console.print(Padding(grid, (0, 0, 0, indent)))


def render(report: Report, console: Console) -> None:
    """Print ``report``: readable without colour, from 80 columns on."""
    page = Page(console)
    _header(report, page)
    _table(report, page)
    _reasons(report, page)
    _unsupported(report, page)
    writable = script_of(report)
    for finding in findings(report):
        _finding(finding, page, is_first_script=writable is not None and finding.outcome is writable[0])
    verdict(report, console)


def verdict(report: Report, console: Console) -> None:
    """The last line, which also stands alone with ``--quiet``."""
    page = Page(console)
    status = EXACT if report.exact else VIOLATION if report.violations else UNDECIDED
    page.put(f"{SYMBOLS[status]} {clean(report.summary())}", f"bold {STYLES[status]}".replace("bold bold", "bold"))


# What was verified.


def _header(report: Report, page: Page) -> None:
    page.put(f"verify {clean(report.target)}", "bold")
    page.pairs([(name, value, "") for name, value in facts(report)])
    page.put()


# Schedules.


def _table(report: Report, page: Page) -> None:
    shown = [o for o in report.outcomes if o.status != NOT_SUPPORTED]
    if not shown:
        page.put("No schedule could be run.", "yellow")
        page.put()
        return
    wide = page.console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("schedule", overflow="fold", max_width=None if wide else 26)
    table.add_column("cache", overflow="fold", max_width=None if wide else 20)
    table.add_column("status", no_wrap=True)
    table.add_column("kinds", overflow="fold", min_width=5, max_width=8)
    table.add_column("worst", justify="right", no_wrap=True)
    table.add_column(page.text("× tol."), justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    if wide:
        table.add_column("reason", overflow="fold", ratio=1)
    for outcome in shown:
        table.add_row(*_cells(outcome, report, page, wide))
    page.console.print(table)
    page.put()


def _cells(outcome: Outcome, report: Report, page: Page, wide: bool) -> list[Text]:
    style = STYLES.get(outcome.status, "")
    row = [
        (clean(outcome.schedule), ""),
        (clean(outcome.cache), ""),
        (f"{SYMBOLS.get(outcome.status, ' ')} {clean(outcome.status)}", style),
        (clean(outcome.kinds), ""),
        (number(outcome.worst), style if outcome.status != EXACT else ""),
        (times_text(outcome.worst, tolerance_of(outcome, report)).rstrip("×"), ""),
        (str(outcome.compared), ""),
        (f"{outcome.seconds:.1f}", ""),
    ]
    if wide:
        row.append((clean(outcome.reason), ""))
    return [page.text(words, style) for words, style in row]


def _reasons(report: Report, page: Page) -> None:
    """On narrow terminals: a reason a line, as the table has no room for them."""
    if page.console.width >= WIDE:
        return
    found = [o for o in report.outcomes if o.status != NOT_SUPPORTED and o.reason]
    for outcome in found:
        line = page.text(f"{SYMBOLS.get(outcome.status, ' ')} ", STYLES.get(outcome.status, ""))
        line.append_text(page.text(f"{label(outcome)}: {clean(outcome.reason)}"))
        page.console.print(_hanging(line))
    if found:
        page.put()


def _hanging(line: Text, indent: int = 4) -> Table:
    """A long line whose further lines are indented."""
    grid = Table.grid()
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    grid.add_row(line[:2], line[2:])
    return grid


def _unsupported(report: Report, page: Page) -> None:
    caches = not_supported(report)
    if not caches:
        return
    page.put(f"Not supported ({len(report.of(NOT_SUPPORTED))}), so not verified:", "dim")
    rows = []
    for cache, reasons in caches:
        parts = [f"{reason or 'no reason given'} ({', '.join(names)})" for reason, names in reasons]
        rows.append((cache, "; ".join(parts), "dim"))
    page.pairs(rows)
    page.put()


# What is wrong.


def _finding(finding: Finding, page: Page, is_first_script: bool) -> None:
    diagnosis = finding.diagnosis
    page.put(f"{SYMBOLS[VIOLATION]} {clean(diagnosis.kind)}  {clean(diagnosis.title)}", STYLES[VIOLATION])
    rows = [
        ("because", clean(diagnosis.because), ""),
        ("first position", position_words(diagnosis.first_position, diagnosis.relation), ""),
        ("first layer", layer_words(diagnosis), ""),
        ("seeds", seed_words(diagnosis), "" if diagnosis.confirmed else "yellow"),
        ("seen by", finding.seen_by(), ""),
        ("shown for", label(finding.outcome) if len(finding.outcomes) > 1 else "", ""),
        ("script", script_words(finding, is_first_script), ""),
    ]
    page.pairs([row for row in rows if row[1]])
    if diagnosis.operations:
        page.put("  smallest operations that show it", "dim")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for i, operation in enumerate(diagnosis.operations, 1):
            grid.add_row(page.text(f"{i}.", "dim"), page.text(clean(operation)))
        page.console.print(Padding(grid, (0, 0, 0, 4)))
    page.put()


def script_words(finding: Finding, is_first: bool) -> str:
    """How to get the reproduction."""
    if not finding.diagnosis.script:
        return "none: the target's adapter writes no scripts"
    where = "--script FILE writes it" if is_first else "in the file of --html FILE, and in --json"
    return f"{where}; it runs without exactkv"
