"""Options that several subcommands have."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.generation import Sampling
    from exactkv.models.model import Model

MODEL_FORMS = "A directory, a .gguf file, a hub id (org/name) or the name of an embedded model."

Temp = Annotated[float, typer.Option(min=0, help="Temperature; 0 takes the most probable token.")]
TopK = Annotated[int, typer.Option(help="Among the k most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Among the most probable tokens that together reach this.")]
MinP = Annotated[float, typer.Option(help="Among tokens at least so many times as probable as the first.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide logits of tokens that have come by this.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract this from logits of tokens that have come.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtract this for each time that a token has come.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another sample.")]
MoreSampling = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        metavar="JSON",
        show_default=False,
        help='Any settings of exactkv.Sampling by name, such as \'{"dry_multiplier": 0.8, "banned_tokens": [5]}\'.',
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", show_default=False, help="End before this text; may be given several times."),
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="End after the stop text instead.")]
Deadline = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", show_default=False, help="End after this time with what there is."),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto: the model's own.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: cuda where there is one.")]
AcceptField = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-field",
        metavar="NAME",
        show_default=False,
        help="A field of the model's config that is unknown here and, in your judgement, does not change the "
        "arithmetic; may be given several times.",
    ),
]
ChatOrRaw = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        show_default=False,
        help="Put the prompt into the model's chat template, or take it as it is. Default: chat if the "
        "model has a template.",
    ),
]
DraftName = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="lookup|MODEL|none",
        help="Guess what follows, to be checked many tokens at once: from the text itself, or by a smaller model of "
        "the same vocabulary. It changes the speed, not the text.",
    ),
]
DraftTokens = Annotated[int, typer.Option(min=1, help="With --draft: check at most this many guesses in a pass.")]
MaxRows = Annotated[
    int | None, typer.Option(min=1, show_default="32", help="With --file: at most this many prompts at once.")
]
StepTokens = Annotated[
    int | None, typer.Option(min=1, show_default="512", help="With --file: at most this many tokens a forward pass.")
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", show_default=False, help="With --file: the most that caches may take, such as 2GB or 512MiB."
    ),
]
KVStorage = Annotated[
    str,
    typer.Option(
        metavar="dense|int8|int4",
        help="How caches keep keys and values: in the model's dtype, or quantized in groups of 32 numbers (of N: "
        "int8:N, int4:N), in less memory and with some loss.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def sampling_from(given: Mapping[str, Any], more: str | None) -> Sampling:
    """The settings that options name, and those of ``--sampling``. Raises InputError where both name one."""
    from exactkv.generation import Sampling

    settings = {name: value for name, value in given.items() if value != getattr(Sampling, name)}
    if more is None:
        return Sampling(**settings)
    try:
        content = json.loads(more)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--sampling is {more[:100]!r}, which is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f'--sampling is {more!r}; expected a JSON object such as {{"typical_p": 0.9}}')
    if both := settings.keys() & content.keys():
        raise InputError(f"{min(both)} is given by an option and in --sampling; leave it out of one")
    return Sampling.from_dict({**content, **settings})


def load_draft(name: str, device: str, dtype: str, accept_fields: Collection[str] = ()) -> Model | str | None:
    """What ``--draft`` names, as `stream` takes it."""
    if name in ("lookup", "none"):
        return None if name == "none" else name
    from exactkv.models.load import load

    return load(name, device=device, dtype=dtype, accept_fields=accept_fields)


SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


def size_of(text: str, option: str) -> int:
    """Bytes, from a size such as 500MB, 2GiB or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in SIZES:
        raise typer.BadParameter(f"{option} is {text!r}; expected a size such as 500MB or 2GB")
    return int(float(match[1]) * SIZES[match[2]])
