"""`exactkv serve`: a server for clients of the OpenAI and Anthropic APIs."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exactkv.cli.options import MODEL_FORMS, Device, Dtype, size_of
from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")
Texts = list[str] | None


def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", show_default=False, help=f"{MODEL_FORMS} Default: the embedded model."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 or :: for all, which wants --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        Texts,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="What requests may call the model; may be given several times, '*' for anything. Default: its own.",
        ),
    ] = None,
    api_key: Annotated[
        Texts,
        typer.Option(
            metavar="KEY",
            show_default=False,
            help="Require this key; may be given several times, and each has a prompt cache of its own. Default: the "
            "words of the variable EXACTKV_API_KEYS, if it is set.",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Generate at most this many texts at once.")] = 32,
    max_context: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="At most this many tokens of prompt and reply. Default: all."),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", show_default=False, help="The most that caches of texts under way may take."),
    ] = None,
    prompt_cache_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of the prompt cache, shared by all requests; 0: none.")
    ] = "1GB",
    prompt_cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Keep the prompt cache there too, for later runs."),
    ] = None,
    prompt_cache_dir_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that it may take there.")
    ] = "16GB",
    queue: Annotated[int, typer.Option(min=0, help="Texts that may wait; more are told to come back later.")] = 128,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The most for one request, waiting too.")] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time of running replies when it is told to end.")
    ] = 30.0,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The most of a request's body.")] = "16MB",
    cors: Annotated[
        Texts,
        typer.Option(metavar="ORIGIN", show_default=False, help="Let pages of this origin call it; '*' for all."),
    ] = None,
    allow_host: Annotated[
        Texts,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="On loopback it answers to names of loopback alone; this is another one. '*' for any.",
        ),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts and replies to the log.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Serve a model to clients of the OpenAI and Anthropic APIs.

    The base URL is http://HOST:PORT/v1 for OpenAI's clients and http://HOST:PORT for Anthropic's. SIGTERM or Ctrl-C
    end it when running replies have; twice: at once. What it takes is at /openapi.json, and in docs/serving.md.
    """
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"serving needs {', '.join(missing)}: pip install 'exactkv[serve]'")
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"--log-level is {log_level!r}; expected debug, info, warning or error")
    from exactkv.models import embedded
    from exactkv.models.load import load
    from exactkv.serve import ServeOptions
    from exactkv.serve import serve as run

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("exactkv").setLevel(level)
    options = ServeOptions(
        names=tuple(name or ()),
        api_keys=tuple(api_key or os.environ.get("EXACTKV_API_KEYS", "").split()),
        max_batch=max_batch,
        queue=queue,
        max_context=max_context,
        max_bytes=None if max_bytes is None else size_of(max_bytes, "--max-bytes"),
        timeout=timeout,
        grace=grace,
        body_bytes=size_of(max_body, "--max-body"),
        cors=tuple(cors or ()),
        hosts=tuple(allow_host or ()),
        log_prompts=log_prompts,
    )
    store = _store(prompt_cache_bytes, prompt_cache_dir, prompt_cache_dir_bytes)
    try:
        loaded = load(model if model is not None else embedded.default(), device=device, dtype=dtype)
        run(loaded, options, store, host, port, lambda url: print(f"listening on {url}", file=sys.stderr, flush=True))
    finally:
        if store is not None:
            store.close()


def _store(size: str, directory: Path | None, directory_size: str) -> PromptStore | None:
    from exactkv.cache.store import PromptStore

    memory = size_of(size, "--prompt-cache-bytes")
    if directory is None:
        return PromptStore(memory) if memory else None
    return PromptStore(memory, directory, size_of(directory_size, "--prompt-cache-dir-bytes"))
