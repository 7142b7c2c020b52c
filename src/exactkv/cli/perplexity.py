"""`exactkv perplexity`: how well a model foretells a text."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.cli.options import MODEL_FORMS, AcceptField, Device, Dtype, KVStorage
from exactkv.cli.output import print_json
from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.generation import Perplexity
    from exactkv.models.tokenizer import Tokenizer

SECONDS_BETWEEN_LINES = 10.0
Told = Callable[[int, int], None]


def perplexity(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=MODEL_FORMS)],
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", show_default=False, help="A text in UTF-8; '-' reads standard input."),
    ],
    window: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="TOKENS", show_default="2048, or the model's maximum if less", help="Tokens of a window."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            show_default="half a window",
            help="From the start of a window to that of the next, less than a window. The smaller, the more context.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", show_default=False, help="Only this many tokens from the start."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_storage: KVStorage = "dense",
    accept_field: AcceptField = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure how well a model foretells a text, in strided windows.

    Each token but the first is foretold once, from at least window - stride tokens before it (fewer in the first
    window).
    """
    text = _text(file)

    from exactkv.generation import perplexity as measure
    from exactkv.models.load import load

    loaded = load(model, device=device, dtype=dtype, accept_fields=accept_field or ())
    if loaded.tokenizer is None:
        raise InputError("this model has no tokenizer, so it cannot read a text")
    ids, num_bytes = _tokens(loaded.tokenizer, text, max_tokens)
    if len(ids) < 2:
        raise InputError(f"{_named(file)} has one token; expected at least two, one to foretell another")
    with _progress() as tell:
        found = measure(loaded, ids, window, stride, tell, kv_storage)
    if as_json:
        about = {
            "model": loaded.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "kv_storage": kv_storage,
            "tokens": len(ids),
        }
        print_json(about | _as_json(found, num_bytes))
        return
    per_byte = f" · {found.bits_per(num_bytes):.4f} bits a byte" if num_bytes else ""
    print(f"perplexity {found.perplexity:.4f} ± {found.standard_error:.4f}")
    print(f"{found.nats_per_token:.4f} nats, {found.bits_per_token:.4f} bits a token{per_byte}")
    print(
        f"{found.scored:,} tokens foretold, {num_bytes:,} bytes · windows of {found.window}, stride {found.stride} · "
        f"{found.scored / found.seconds:.1f} tokens/s"
    )


def _named(file: str) -> str:
    return "standard input" if file == "-" else file


def _text(file: str) -> str:
    """All of a file's text. Raises InputError where there is none."""
    if file == "-":
        given = sys.stdin.buffer.read()
    else:
        try:
            with open(file, "rb") as opened:
                given = opened.read()
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}; expected a file of text, or '-'") from None
    try:
        text = given.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{_named(file)} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not text:
        raise InputError(f"{_named(file)} is empty; expected a text to measure by")
    return text


def _tokens(tokenizer: Tokenizer, text: str, most: int | None) -> tuple[list[int], int]:
    """The first tokens of a text, and the bytes of what all but the first of them stand for."""
    ids, spans = tokenizer.encode_with_spans(text)
    kept = ids if most is None else ids[:most]
    if not kept:
        return [], 0
    end = len(text) if len(kept) == len(ids) else max(stop for _, stop in spans[: len(kept)])
    return kept, len(text[spans[0][1] : end].encode())


def _as_json(found: Perplexity, num_bytes: int) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "scored_tokens": found.scored,
        "bytes": num_bytes,
        "window": found.window,
        "stride": found.stride,
        "nats": found.nats,
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": found.bits_per(num_bytes) if num_bytes else None,
        "perplexity": finite(found.perplexity),
        "standard_error": finite(found.standard_error),
        "fed_tokens": found.fed,
        "seconds": found.seconds,
        "tokens_per_second": found.scored / found.seconds,
    }


@contextlib.contextmanager
def _progress() -> Iterator[Told]:
    """A bar in a terminal, else a line now and then, on standard error."""
    started = told = time.monotonic()

    def rate(done: int) -> float:
        return done / max(1e-9, time.monotonic() - started)

    def line(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            print(f"{done:,} of {total:,} tokens, {rate(done):.1f} tokens/s", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.1f} tokens/s"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=None, rate=0.0)
        yield lambda done, total: bar.update(task, completed=done, total=total, rate=rate(done))
