"""`exactkv generate`: text from a prompt, streamed, with what it cost."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from exactkv.cli.options import (
    AcceptField,
    ChatOrRaw,
    Deadline,
    Device,
    DraftName,
    DraftTokens,
    Dtype,
    FrequencyPenalty,
    IncludeStop,
    KVStorage,
    MaxBytes,
    MaxRows,
    MaxTokens,
    MinP,
    MoreSampling,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    StepTokens,
    Stop,
    Temp,
    TopK,
    TopP,
    load_draft,
    sampling_from,
    size_of,
)
from exactkv.cli.output import print_json, told_logprobs, usage
from exactkv.cli.structured import Grammar, JsonSchema, Regex, Shown, ToolsFile, read_tools, structure_from, with_tools
from exactkv.errors import InputError, LoadError

if TYPE_CHECKING:
    from exactkv.cache import Cache
    from exactkv.generation import Generation, Prompt, Stats
    from exactkv.models.model import Model

INTERRUPTED = 130


class GenerateCommand(TyperCommand):
    """MODEL comes first and may be left out, which a usage line cannot say by itself."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS] [MODEL] PROMPT | [MODEL] --file FILE --out OUT"]


def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A directory, a .gguf file, a hub id (org/name) or the name of an embedded model. May be "
            "left out: a single argument is the PROMPT, and the embedded default model is taken.",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", show_default=False, help="The text to start from; '-' reads standard input."),
    ] = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    include_stop: IncludeStop = False,
    deadline: Deadline = None,
    temp: Temp = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    sampling: MoreSampling = None,
    chat: ChatOrRaw = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", show_default=False, help="System message, for chat."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    accept_field: AcceptField = None,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Take from this file what it holds of the prompt, and save there what was computed. Made if absent.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default=False,
            help="With --json or --file: the log-probability of each token, and of the N most probable ones in its "
            "place.",
        ),
    ] = None,
    json_schema: JsonSchema = None,
    grammar: Grammar = None,
    regex: Regex = None,
    tools: ToolsFile = None,
    draft: DraftName = "none",
    draft_tokens: DraftTokens = 12,
    kv_storage: KVStorage = "dense",
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help='Many prompts: a JSON object a line, {"prompt": ...} or {"messages": [...]}, with "id" and settings '
            "of its own where wanted; '-' reads standard input. A single argument is then the MODEL.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            show_default=False,
            help="With --file: where results go, a JSON object a line, as they come. What it holds is not done again.",
        ),
    ] = None,
    max_rows: MaxRows = None,
    step_tokens: StepTokens = None,
    max_bytes: MaxBytes = None,
) -> None:
    """Generate text from a prompt, or from each of many in a file.

    The text goes to standard output as it is made, a line about speed and memory to standard error. Ctrl-C
    ends it with what was generated so far.
    """
    settings = {
        "temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty, "seed": seed,
    }  # fmt: skip
    if system is not None and chat is False:
        raise typer.BadParameter("--system belongs to the chat template; leave out --raw")
    only_one = {"PROMPT": prompt, "--json": as_json or None, "--prompt-cache": prompt_cache, "--tools": tools}
    only_many = {"--out": out, "--max-rows": max_rows, "--step-tokens": step_tokens, "--max-bytes": max_bytes}
    _refuse(only_many if file is None else only_one, file)
    structure = structure_from(json_schema, grammar, regex)
    if file is not None:
        if out is None:
            raise typer.BadParameter("--file needs --out: where the results go, such as --out results.jsonl")
        from exactkv.cli.offline import Job, run

        job = Job(
            file=file,
            out=out,
            model=model,
            device=device,
            dtype=dtype,
            accept_fields=accept_field or (),
            defaults={
                "max_tokens": max_tokens, "stop": stop or (), "include_stop": include_stop, "deadline": deadline,
                "logprobs": logprobs, "structure": structure,
            },
            sampling=sampling_from(settings, sampling),
            chat=chat,
            system=system,
            max_rows=max_rows or 32,
            step_tokens=step_tokens or max(512, max_rows or 0),
            max_bytes=None if max_bytes is None else size_of(max_bytes, "--max-bytes"),
            draft=draft,
            draft_tokens=draft_tokens,
            kv_storage=kv_storage,
        )  # fmt: skip
        raise typer.Exit(run(job))
    name, text = _model_and_prompt(model, prompt)
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are told in the JSON object; add --json")
    text = _read_stdin() if text == "-" else _decoded(os.fsencode(text), "the prompt")
    if not text:
        raise InputError("the prompt is empty; give some text, or '-' and the text on standard input")

    from exactkv.generation import stream
    from exactkv.models.load import load

    chosen, given_tools = sampling_from(settings, sampling), read_tools(tools)
    if given_tools is not None and chat is False:
        raise typer.BadParameter("--tools belongs to the chat template; leave out --raw")
    _check_place(prompt_cache)
    accepted, started = accept_field or (), time.perf_counter()
    loaded = load(name if name is not None else default_model(), device=device, dtype=dtype, accept_fields=accepted)
    load_seconds = time.perf_counter() - started
    given = as_prompt(loaded, text, chat, system)
    shown = None
    if given_tools is not None:
        given, shown = with_tools(loaded, given, given_tools, None if as_json else sys.stdout.write)
    cache = _saved_cache(prompt_cache, loaded, kv_storage)
    result = Result(
        stream(
            loaded, given, max_tokens, chosen, cache=cache, stop=stop or (), include_stop=include_stop,
            deadline=deadline, logprobs=logprobs, draft=load_draft(draft, device, dtype, accepted),
            draft_tokens=draft_tokens,
            structure=structure, show_special_tokens=shown is not None,
            storage=kv_storage,
        ),
        shown,
    )  # fmt: skip
    result.run(None if as_json else sys.stdout.write)
    stats = result.generation.stats
    if as_json:
        print_json(_as_json(loaded, result, stats, load_seconds))
    else:
        print(flush=True)
        print(stats_line(stats) + (" (interrupted)" if result.interrupted else ""), file=sys.stderr)
    if prompt_cache is not None:
        _save(result.generation.cache, prompt_cache)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@dataclass
class Result:
    """What has come out of a generation, also where it was interrupted."""

    generation: Generation
    shown: Shown | None = None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    interrupted: bool = False

    def run(self, write: Any) -> None:
        """Take all pieces; hand each text to ``write``, if given, at once, or to ``shown``."""
        try:
            for piece in self.generation:
                self.text.append(piece.text)
                self.tokens.extend(piece.tokens)
                if self.shown is not None:
                    self.shown.feed(piece.text)
                elif write is not None:
                    write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            self.interrupted = True
        if self.shown is not None:
            self.shown.finish()


def stats_line(stats: Stats) -> str:
    """Speed and memory in one line, such as "prompt 12 tokens, 150.0 tokens/s · …"."""
    from exactkv.cache.report import human_bytes

    def rate(tokens: int, per_second: float | None) -> str:
        count = f"{tokens} token{'' if tokens == 1 else 's'}"
        return count if per_second is None else f"{count}, {per_second:.1f} tokens/s"

    cached = [f"{stats.cached_tokens} of them cached"] if stats.cached_tokens else []
    parts = [
        f"prompt {rate(stats.prompt_tokens, stats.prompt_rate)}",
        *cached,
        f"generated {rate(stats.generated_tokens, stats.decode_rate)}",
    ]
    if stats.drafted_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.drafted_tokens} guesses came true")
    if stats.first_token_seconds is not None:
        parts.append(f"first token after {stats.first_token_seconds:.2f} s")
    return " · ".join([*parts, f"cache {human_bytes(stats.cache_bytes)}"])


def _refuse(options: dict[str, Any], file: str | None) -> None:
    """Complain of what was given of ``options``: it goes with many prompts, or with one."""
    for option, value in options.items():
        if value is not None and file is None:
            raise typer.BadParameter(f"{option} is for many prompts; add --file, or leave it out")
        if value is not None:
            raise typer.BadParameter(f"{option} is for one prompt, and --file has many; leave out one of them")


def _model_and_prompt(first: str | None, second: str | None) -> tuple[str | None, str]:
    """The model, None for the embedded default, and the prompt."""
    if first is None:
        raise typer.BadParameter("there is no prompt; expected [MODEL] PROMPT, such as: exactkv generate 'Hello'")
    if second is not None:
        return first, second
    if first.endswith(".gguf") or _holds_config(Path(first)) or re.fullmatch(r"[\w.-]+/[\w.-]+", first):
        raise typer.BadParameter(f"{first} is a model, and there is no prompt: exactkv generate {first} 'Hello'")
    return None, first


def _holds_config(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except (OSError, ValueError):  # a long prompt is no path
        return False


def _read_stdin() -> str:
    """Standard input without the newline that ends it."""
    return _decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _decoded(given: bytes, what: str) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def default_model() -> Path:
    """The embedded model that is taken where none is named."""
    from exactkv.models import embedded

    return embedded.default()


def _saved_cache(file: Path | None, model: Model, storage: str) -> Cache | None:
    """The cache in ``file``, an empty one where there is no such file. Raises LoadError where it does not fit."""
    if file is None:
        return None
    from exactkv.cache import load_cache
    from exactkv.generation.reuse import CHECKPOINTS

    if not file.exists():
        return model.new_cache(storage=storage, checkpoints=CHECKPOINTS)
    advice = f"delete {file}, or name another file with --prompt-cache"
    try:
        cache = load_cache(file, model)
    except LoadError as error:
        raise LoadError(f"{error}. Or {advice}") from None
    if cache.batch_size != 1 or cache.max_length != model.spec.max_length:
        what = f"{cache.batch_size} rows of at most {cache.max_length} tokens"
        raise LoadError(f"{file} holds {what}; expected one row of at most {model.spec.max_length}: {advice}")
    if cache.storage != model.new_cache(0, storage).storage:
        raise LoadError(
            f"{file} holds {cache.storage.name} rows, --kv-storage is {storage}: name the same, or {advice}"
        )
    return cache


def _check_place(file: Path | None) -> None:
    """Before anything is computed: whether a cache can be saved there."""
    if file is None:
        return
    if file.is_dir():
        raise InputError(f"--prompt-cache is {file}, a directory; give a file's name")
    if not file.parent.is_dir():
        raise InputError(f"--prompt-cache is {file}, and there is no directory {file.parent}; make it first")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"--prompt-cache is {file}, and nothing can be written in {file.parent}")


def _save(cache: Cache, file: Path) -> None:
    try:
        cache.save(file)
    except OSError as error:
        raise InputError(f"the prompt cache could not be saved to {file}: {error.strerror or error}") from None


def as_prompt(model: Model, prompt: str, chat: bool | None, system: str | None) -> Prompt:
    """A text as the command's options want it: within the chat template, or as it is."""
    if chat is None:
        chat = model.tokenizer is not None and model.tokenizer.chat_template is not None
        if not chat and system is not None:
            raise InputError("--system was given, but this model has no chat template; put it in the prompt instead")
    if not chat:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _as_json(model: Model, result: Result, stats: Stats, load_seconds: float) -> dict[str, Any]:
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        **({"text": "".join(result.text)} if result.shown is None else result.shown.told_apart()),
        "tokens": result.tokens,
        "finish_reason": "interrupted" if result.interrupted else result.generation.finish_reason,
        "matched": result.generation.matched,
        **(
            {}
            if result.generation.num_logprobs is None
            else {"logprobs": told_logprobs(model, result.generation.logprobs)}
        ),
        "usage": usage(stats, len(result.tokens)),
        "timings": {
            "load_seconds": load_seconds,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "first_token_seconds": stats.first_token_seconds,
            "prompt_tokens_per_second": stats.prompt_rate,
            "generated_tokens_per_second": stats.decode_rate,
        },
        "cache_bytes": stats.cache_bytes,
        "kv_storage": result.generation.cache.storage.name,
    }
