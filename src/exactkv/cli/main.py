"""The `exactkv` command: its subcommands, and how errors, Ctrl-C and closed pipes end it."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from exactkv import __version__
from exactkv.cli.bench import bench
from exactkv.cli.cache import cache
from exactkv.cli.chat import chat
from exactkv.cli.generate import GenerateCommand, generate
from exactkv.cli.models import models
from exactkv.cli.perplexity import perplexity
from exactkv.cli.quantize import quantize
from exactkv.cli.serve import serve
from exactkv.cli.verify import verify
from exactkv.errors import ExactKVError

USAGE_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are what a shell reports for SIGINT and SIGPIPE."""


class Commands(TyperGroup):
    """The subcommands, none of which ends in a traceback for what is not a bug."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where a closed pipe is seen to, rather than at exit
            return result
        except ExactKVError as error:
            print(f"exactkv: {error}", file=sys.stderr)
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            print("exactkv: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read the output has left; what is still buffered goes nowhere, without a complaint.
            _discard_output()
            raise typer.Exit(CLOSED_PIPE) from None
        except OSError as error:
            print(f"exactkv: {error.strerror or error}", file=sys.stderr)
            _discard_output()
            raise typer.Exit(USAGE_ERROR) from None


def _discard_output() -> None:
    """What is still buffered for standard output goes nowhere, also when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=Commands,
    name="exactkv",
    help="A local LLM inference engine whose KV caches are exact.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's help would double the time to the first line
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GenerateCommand)(generate)
app.command()(chat)
app.command()(models)
app.command()(perplexity)
app.command()(quantize)
app.command()(serve)
app.command()(verify)
app.command()(bench)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"exactkv {__version__}")
        raise typer.Exit


@app.callback()
def _exactkv(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `exactkv` command."""
    if sys.stderr is None:  # so it is where the shell closed them
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        print("exactkv: standard output is closed; send it somewhere, such as > file", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    app()
