"""`exactkv bench`: how fast a model runs, beside what the machine allows."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exactkv.cli.options import MODEL_FORMS, Device, Dtype, Json
from exactkv.cli.output import print_json
from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.models.model import Model
    from exactkv.models.spec import DecoderSpec

SECONDS_BETWEEN_LINES = 10.0
Tell = Callable[[str, int, int], None]


def bench(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", show_default=False, help=MODEL_FORMS)] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Instead of MODEL: the shape of a known model, such as llama-3.1-8b, with random weights.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="With --shape: only its first so many layers.")
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", show_default="512,2048", help="Tokens that a row holds when it begins to decode."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Rows at once.")] = "1",
    tokens: Annotated[int, typer.Option(min=1, help="Decode so many tokens a row, in each run.")] = 64,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="N,...|none",
            show_default="the contexts",
            help="Lengths of prompts whose prefill is measured. With --synthetic-kv: none unless given.",
        ),
    ] = None,
    piece: Annotated[int, typer.Option(min=1, help="Feed prompts in pieces of so many tokens.")] = 512,
    repeat: Annotated[int, typer.Option(min=1, help="Measure each so many times; the median is shown.")] = 3,
    synthetic_kv: Annotated[
        bool,
        typer.Option("--synthetic-kv", help="Fill contexts with random rows instead of a forward pass, for long ones."),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", show_default=False, help="Draw the figures, too.")
    ] = None,
) -> None:
    """Measure prefill and decoding at several contexts and batch sizes, beside what the machine allows.

    Prompts are random tokens. The machine's ceilings (reading memory, multiplying matrices) are measured in the same
    run; docs/bench.md says how.
    """
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either MODEL or --shape NAME, such as: exactkv bench --shape llama-3.1-8b")
    if layers is not None and shape is None:
        raise typer.BadParameter("--layers goes with --shape; a MODEL has the layers that it has")
    if plot is not None:
        _check_plot(plot)
    batches, lengths = numbers(batch, "--batch"), None if contexts is None else numbers(contexts, "--contexts")
    prompts: tuple[int, ...] | None = None
    if prefill not in (None, "none"):
        prompts = numbers(str(prefill), "--prefill")
    elif prefill == "none" or synthetic_kv:
        prompts = ()

    from exactkv.bench.measure import Plan, default_contexts

    def plan_for(spec: DecoderSpec) -> Plan:
        held = default_contexts(spec.max_length, tokens) if lengths is None else lengths
        made = Plan(held, batches, tokens, held if prompts is None else prompts, piece, repeat, synthetic_kv)
        made.check(spec.max_length)
        return made

    name, load, spec = _source(model, shape, layers, device, dtype)
    if spec is not None:
        plan_for(spec)  # an error is told before there are weights
    from exactkv.bench.ceilings import measure_ceilings
    from exactkv.bench.machine import PeakMemory
    from exactkv.bench.measure import load_seconds, measure, measure_startup
    from exactkv.bench.report import Result

    with _progress() as tell:
        tell(f"weights of {name}", 0, 1)
        loaded, waited = load_seconds(load)
        plan = plan_for(loaded.spec)
        tell("the first token", 0, 1)
        startup = measure_startup(loaded, waited)
        tell("what the machine allows", 0, 1)
        ceilings = measure_ceilings(loaded.device, loaded.dtype)
        memory = PeakMemory(loaded.device, loaded.nbytes)
        found = list(measure(loaded, plan, ceilings, memory, tell))
    result = Result(name, shape is not None, loaded, plan, ceilings, startup, found)
    if plot is not None:
        from exactkv.bench.plot import svg

        plot.write_text(svg(result), encoding="utf-8")
    if as_json:
        print_json(result.as_dict())
        return
    from rich.console import Console

    result.print_table(Console())


def _source(
    model: str | None, shape: str | None, layers: int | None, device: str, dtype: str
) -> tuple[str, Callable[[], Model], DecoderSpec | None]:
    """A name, how to make the model, and its spec where that is known before."""
    from exactkv.models.load import as_device, as_dtype, load

    on, wanted = as_device(device), as_dtype(dtype)
    if shape is None:
        assert model is not None
        return model, lambda: load(model, device=on, dtype=dtype), None
    import torch

    from exactkv.models.model import Model
    from exactkv.models.random import random_weights
    from exactkv.models.shapes import shape_spec

    spec = shape_spec(shape, layers)

    def make() -> Model:
        try:
            weights = random_weights(spec, dtype=wanted or torch.bfloat16, device=on)
        except torch.OutOfMemoryError as error:
            raise InputError(f"{on} has no room for the weights of {shape} ({error}); give fewer --layers") from None
        return Model(spec, weights, name=shape)

    return shape, make, spec


def numbers(given: str, option: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more between commas, each once, in order."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise typer.BadParameter(f"{option} is {given!r}; expected whole numbers such as 512,2048")
    return tuple(sorted({int(part) for part in parts}))


def _check_plot(file: Path) -> None:
    if file.suffix.lower() != ".svg":
        raise typer.BadParameter(f"--plot is {str(file)!r}; expected a name that ends in .svg")
    if not file.absolute().parent.is_dir():
        raise InputError(f"--plot: there is no directory {str(file.absolute().parent)!r}")


@contextlib.contextmanager
def _progress() -> Iterator[Tell]:
    """A bar in a terminal, else a line now and then, on standard error."""
    told = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES and done < total:
            told = time.monotonic()
            print(f"{what} ({done} of {total} done)", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
