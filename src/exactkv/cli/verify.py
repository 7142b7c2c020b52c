"""`exactkv verify`: whether decoding with a cache equals one full forward pass, as a command with an exit code."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.cli.output import print_json
from exactkv.errors import ExactKVError

if TYPE_CHECKING:
    from rich.console import Console

    from exactkv.verify.report import Outcome, Report

EXACT, VIOLATION, COULD_NOT_RUN = 0, 1, 2
"""Exit codes. A crash is never a 1, which a build would take for a fault of the engine verified."""
PIPE_WIDTH = 120


class Engine(StrEnum):
    exactkv = "exactkv"
    transformers = "transformers"
    mlx = "mlx"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model directory, a .gguf file, a hub id (org/name), or a bare config.json, of which a tiny random "
            "model of the same architecture is made.",
        ),
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option(show_default=False, help="Whose caches are verified. Default: exactkv."),
    ] = None,
    schedules: Annotated[
        str, typer.Option(metavar="all|NAME,...", help="What is done with the caches; see --list-schedules.")
    ] = "all",
    dtype: Annotated[Dtype, typer.Option(help="Of weights and arithmetic; auto: float32.")] = Dtype.auto,
    seed: Annotated[int, typer.Option(min=0, help="Of the texts, and of random weights.")] = 0,
    length: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Tokens of the main text. Default: past each boundary."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the report as one HTML file, too.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Write the script that reproduces the first violation, if any."
        ),
    ] = None,
    list_schedules: Annotated[
        bool, typer.Option("--list-schedules", help="List the schedules and the kinds of fault they are for.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the verdict.")] = False,
) -> None:
    """Prove that decoding with a KV cache equals one full forward pass, or show where it does not.

    Exit code 0: exact; 1: a violation; 2: it could not be run or decided.
    """
    if list_schedules:
        _list_schedules(as_json)
        return
    if not model:
        raise typer.BadParameter("there is no MODEL; expected: exactkv verify MODEL, such as a path to a config.json")
    files = [_checked(path, option) for path, option in ((html, "--html"), (script, "--script")) if path is not None]
    if len(set(files)) < len(files):
        raise typer.BadParameter("--html and --script name the same file")
    if not schedules.strip(", "):
        raise typer.BadParameter("--schedules is empty; expected all, or names from --list-schedules")
    with _crash_is_no_violation():
        report = _run(
            model, quiet, engine=engine.value if engine else None, schedules=schedules, dtype=dtype.value, seed=seed,
            length=length,
        )  # fmt: skip
        _write_files(report, html, script, quiet)
        _print(report, as_json, quiet)
    code = exit_code(report)
    if code == COULD_NOT_RUN:
        print(f"exactkv: {undecided_because(report)}", file=sys.stderr)
    raise typer.Exit(code)


def exit_code(report: Report) -> int:
    """A violation is one whatever else happened; what was not decided is no proof."""
    if report.violations:
        return VIOLATION
    return EXACT if report.exact else COULD_NOT_RUN


def undecided_because(report: Report) -> str:
    """Why neither 0 nor 1 is right, for standard error."""
    undecided = report.of("undecided")
    if undecided:
        first = undecided[0]
        reason = f" ({first.schedule}: {first.reason})" if first.reason else ""
        return f"{len(undecided)} of {len(report.outcomes)} schedules could not be decided{reason}"
    if report.outcomes:
        return "nothing was proved: the target supports none of these schedules"
    return "nothing was proved: no schedule was run"


def strict(value: Any) -> Any:
    """``value`` as JSON has it: null for what is not finite, strings for what JSON has no word for."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) or hasattr(value, "__float__"):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _names(schedules: str) -> str | list[str]:
    """The names in a list with commas."""
    names = [" ".join(part.split()) for part in schedules.split(",") if part.strip()]
    return "all" if names == ["all"] else names


# Running.


@contextlib.contextmanager
def _crash_is_no_violation() -> Iterator[None]:
    """What nobody foresaw ends with the traceback and 2. What the command group knows goes on to it."""
    try:
        yield
    except (ExactKVError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"exactkv: could not run: {type(error).__name__}, see above", file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None


def _run(model: str, quiet: bool, schedules: str, **options: Any) -> Report:
    """Verify, with progress on a terminal. Whatever libraries print on the way is no part of the result."""
    stderr = sys.stderr
    with contextlib.redirect_stdout(stderr), _Bar(shown=not quiet and _is_terminal(stderr)) as bar:
        from exactkv.verify import runner

        names = _names(schedules)
        return runner.verify(model, progress=bar, schedules=names, **options)


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


class _Bar:
    """Which schedule is run, the how manieth it is, what was found so far, and the time."""

    def __init__(self, shown: bool):
        self.violations = 0
        self.display: Any = None
        self.task: Any = None
        if shown:
            self.display = self._columns()

    def _columns(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        words = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        columns = (SpinnerColumn(), words, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)

    def __enter__(self) -> _Bar:
        if self.display is not None:
            self.display.start()
            self.task = self.display.add_task("loading", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.display is not None:
            self.display.stop()

    def __call__(self, done: int, total: int, name: str, outcome: Outcome | None) -> None:
        self.violations += outcome is not None and outcome.status == "violation"
        if self.display is not None:
            found = f"  ({self.violations} violation{'s' * (self.violations > 1)})" if self.violations else ""
            words = "diagnosis" if done == total else name
            self.display.update(self.task, total=total, completed=done, description=words + found)


# Printing.


def _print(report: Report, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(strict(report.to_json()))
        return
    from exactkv.verify.show import terminal

    console = _console()
    with console.capture() as captured:  # rich would end the process itself when the reader of a pipe has left
        (terminal.verdict if quiet else terminal.render)(report, console)
    sys.stdout.writelines(line.rstrip(" ") + "\n" for line in captured.get().splitlines())
    sys.stdout.flush()


def _console() -> Console:
    """Standard output, as wide as the terminal; a pipe has no width of its own."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def _list_schedules(as_json: bool) -> None:
    with _crash_is_no_violation():
        from exactkv.verify.runner import schedule_names

        found = schedule_names()
    if as_json:
        rows = [{"name": name, "kinds": kinds, "description": description} for name, kinds, description in found]
        print_json({"schedules": rows})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("schedule", "kinds", "what it does"):
        table.add_column(title, overflow="fold", no_wrap=title == "schedule")
    for row in found:
        table.add_row(*row)
    _console().print(table)


# Files.


def _checked(path: Path, option: str) -> Path:
    """That the file can be written is seen before minutes are spent."""
    place = path.resolve()
    if not place.parent.is_dir():
        raise typer.BadParameter(f"{option}: the directory {path.parent} does not exist")
    if place.exists() and not place.is_file():
        raise typer.BadParameter(f"{option}: {path} is not a file")
    if not os.access(place.parent, os.W_OK):
        raise typer.BadParameter(f"{option}: the directory {path.parent} cannot be written to")
    return place


def _write_files(report: Report, html: Path | None, script: Path | None, quiet: bool) -> None:
    """Before anything is printed, so that a reader that leaves does not cost the file."""
    if html is not None:
        from exactkv.verify.show.html import html as page

        _write(html, page(report))
        _tell(f"the report is in {html}", quiet)
    if script is not None:
        from exactkv.verify.show.words import script_of

        found = script_of(report)
        if found is None:
            why = "no violation has one" if report.violations else "there is no violation"
            _tell(f"no script was written to {script}: {why}", quiet=False)
            return
        _write(script, found[1].rstrip("\n") + "\n")
        _tell(f"the script for {found[0].schedule!r} is in {script}", quiet)


def _tell(words: str, quiet: bool) -> None:
    if not quiet:
        print(f"exactkv: {words}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    """All of the file or nothing: a half-written report would be read as a whole one."""
    place = path.resolve()
    temporary = place.with_name(f".exactkv-{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, place)
    except OSError as error:
        raise ExactKVError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
