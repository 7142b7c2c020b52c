"""`exactkv generate --file`: a result for each line of a file, many at once, to be taken up again where it ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from exactkv.cli.generate import INTERRUPTED, default_model
from exactkv.cli.lines import Defaults, Id, error_line, id_of, parse, result_line
from exactkv.cli.options import load_draft
from exactkv.cli.results import Results
from exactkv.errors import InputError
from exactkv.generation import GREEDY, Completion, Engine, Sampling, generate_each, make_text
from exactkv.generation.draft import make_draft
from exactkv.models.load import load

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from exactkv.models.model import Model

SOME_FAILED = 1
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Job:
    """What the command was asked for."""

    file: str
    out: Path
    model: str | None
    device: str
    dtype: str
    accept_fields: Collection[str]
    defaults: Mapping[str, Any]
    sampling: Sampling
    chat: bool | None
    system: str | None
    max_rows: int
    step_tokens: int
    max_bytes: int | None
    draft: str
    draft_tokens: int
    kv_storage: str


def run(job: Job) -> int:
    """Do it. Returns the exit code: 0 where every line has a result, 1 where some are errors, 130 after Ctrl-C."""
    with _opened(job.file) as file:
        results = Results(job.out)
        try:
            name = job.model if job.model is not None else default_model()
            model = load(name, device=job.device, dtype=job.dtype, accept_fields=job.accept_fields)
            draft = load_draft(job.draft, job.device, job.dtype, job.accept_fields)
            make_draft(draft, model, GREEDY)  # what is wrong with the options is told before anything is done
            make_text(model, [0], sampling=job.sampling, **job.defaults)
            Engine(model, job.max_rows, job.step_tokens, job.max_bytes, storage=job.kv_storage)
            has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
            if not has_template and (job.chat or job.system is not None):
                raise InputError("this model has no chat template; leave out --chat and --system")
            results.prepare()
        except BaseException:
            results.close(unused=True)
            raise
        defaults = Defaults(job.defaults, job.sampling, job.chat, job.system)
        progress = Progress(_count_lines(file))
        work = Work(file, model, defaults, results, progress)
        interrupted = False
        try:
            found = generate_each(
                model, work.requests(), max_rows=job.max_rows, step_tokens=job.step_tokens, max_bytes=job.max_bytes,
                draft=draft, draft_tokens=job.draft_tokens, storage=job.kv_storage,
            )  # fmt: skip
            for result in found:
                work.take(result)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.close()
            results.close()
        print(progress.summary() + (" (interrupted)" if interrupted else ""), file=sys.stderr)
        return INTERRUPTED if interrupted else SOME_FAILED if progress.errors else 0


class Work:
    """Lines that become requests, one when there is room for it, and results that become lines."""

    def __init__(self, file: BinaryIO, model: Model, defaults: Defaults, results: Results, progress: Progress):
        self.file, self.model, self.defaults, self.results, self.progress = file, model, defaults, results, progress
        self._seen: dict[Id, int] = {}
        self._under_way: dict[int, tuple[Id, int]] = {}

    def requests(self) -> Iterator[dict[str, Any]]:
        """What lines ask for, as `generate_each` takes it. Errors go to the results."""
        place = 0
        for number, raw in enumerate(self.file, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                self.progress.blank()
                continue
            identity: Id = number
            try:
                content = parse(raw)
                identity = id_of(content, number)
                first = self._seen.setdefault(identity, number)
                if first != number:
                    raise InputError(f"id {identity!r} is that of line {first}; expected another one a line")
                if identity in self.results.finished:
                    self.progress.skip()
                    continue
                request = self.defaults.request(content, self.model)
            except InputError as error:
                self._fail(identity, number, error)
                continue
            self._under_way[place] = identity, number
            place += 1
            yield request

    def take(self, result: Completion) -> None:
        """Write what came of a request."""
        identity, number = self._under_way.pop(result.index)
        if result.error is not None:
            self._fail(identity, number, result.error)
            return
        self.results.add(result_line(identity, self.model, result))
        self.progress.finish(len(result.tokens))

    def _fail(self, identity: Id, number: int, error: InputError) -> None:
        self.results.add(error_line(identity, number, error))
        self.progress.fail()


class Progress:
    """How far it is: a bar in a terminal, else a line now and then, on standard error. ``total``: lines, if known."""

    def __init__(self, total: int | None):
        self.total = total
        self.done = self.errors = self.skipped = self.blanks = self.tokens = 0
        self._started = self._told = time.monotonic()
        self._bar = self._open_bar() if sys.stderr.isatty() else None

    def finish(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        self._tell()

    def fail(self) -> None:
        self.errors += 1
        self._tell()

    def skip(self) -> None:
        self.skipped += 1
        self._tell()

    def blank(self) -> None:
        self.blanks += 1

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def summary(self) -> str:
        """What was done, in one line."""
        seconds = time.monotonic() - self._started
        skipped = [f"{self.skipped} skipped, as they were there"] if self.skipped else []
        counts = [_counted(self.done, "result"), _counted(self.errors, "error"), *skipped]
        return f"{', '.join(counts)} · {_counted(self.tokens, 'token')}, {self._rate():.1f} tokens/s · {seconds:.1f} s"

    def _rate(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self._started)

    def _tell(self) -> None:
        past = self.done + self.errors + self.skipped + self.blanks
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=past, errors=_counted(self.errors, "error"), rate=self._rate())
        elif (now := time.monotonic()) - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            of = "" if self.total is None else f" of {self.total}"
            errors = f", {_counted(self.errors, 'error')}" if self.errors else ""
            print(f"{past}{of} lines{errors}, {self._rate():.1f} tokens/s", file=sys.stderr, flush=True)

    def _open_bar(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[errors]}"),
            TextColumn("{task.fields[rate]:.1f} tokens/s"), TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        bar.add_task("lines", total=self.total, errors=_counted(0, "error"), rate=0.0)
        bar.start()
        return bar


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A file of prompts, or standard input for '-'."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror}; --file takes a file of JSON lines, or '-'"
        ) from None
    with file:
        yield file


def _count_lines(file: BinaryIO) -> int | None:
    """Lines of a file that can be read twice; None for a pipe."""
    if not file.seekable() or file is sys.stdin.buffer:
        return None
    count, last = 0, b"\n"
    while block := file.read(1 << 20):
        count += block.count(b"\n")
        last = block[-1:]
    file.seek(0)
    return count + (last != b"\n")
