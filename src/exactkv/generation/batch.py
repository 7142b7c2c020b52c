"""`generate`: texts for many prompts, as many at once as fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from exactkv.cache.checks import is_int, require
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, make_draft
from exactkv.generation.engine import Engine
from exactkv.generation.loop import Stats
from exactkv.generation.prompts import Prompt
from exactkv.generation.request import Request
from exactkv.generation.reuse import PREFILL_WIDTH
from exactkv.generation.sampling import Logprobs
from exactkv.generation.structure import Structure
from exactkv.generation.text import Text, make_text
from exactkv.models.model import Model

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore


ENGINE = ("max_rows", "step_tokens", "max_bytes", "draft", "draft_tokens", "store", "storage")
"""Options of all texts together."""


@dataclass(frozen=True)
class Completion:
    """What came of the prompt at place ``index``.

    ``text``, ``tokens``, ``finish_reason``, ``matched``, ``logprobs``: see `Generation`. ``usage``: what it cost, None
    for a prompt that was refused. ``error``: why there is no more, for a prompt that was refused or a row that failed.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    matched: str | int | None
    logprobs: tuple[Logprobs, ...]
    usage: Stats | None
    error: InputError | None = None


def generate(model: Model, prompts: Iterable[Prompt | Mapping[str, Any]], **options: Any) -> list[Completion]:
    """Texts for ``prompts``, in their order: what `stream` gives for each alone, many at once. Options: see
    `generate_each`. Raises InputError where a prompt or an option does not fit, before anything is generated."""
    given = list(_listed(prompts))
    structure = options.get("structure")
    if isinstance(structure, list | tuple) and len(structure) != len(given):
        raise InputError(f"{len(structure)} structures were given for {len(given)} prompts; expected one, or one each")
    settings = {name: value for name, value in options.items() if name not in (*ENGINE, "structure")}
    engine = _engine(model, **{name: value for name, value in options.items() if name in ENGINE})
    for index, prompt in enumerate(given):
        try:
            text = _text(model, prompt, {**settings, "structure": _structure(structure, index)})
            engine.check_fits(text, make_draft(options.get("draft"), model, text.sampling))
        except InputError as error:
            raise InputError(f"prompt {index}: {error}") from None
    return sorted(generate_each(model, given, **options), key=lambda result: result.index)


def generate_each(
    model: Model,
    prompts: Iterable[Prompt | Mapping[str, Any]],
    *,
    max_rows: int = 32,
    step_tokens: int = PREFILL_WIDTH,
    max_bytes: int | None = None,
    draft: Draft | Model | str | None = None,
    draft_tokens: int = 12,
    store: PromptStore | None = None,
    structure: Structure | Sequence[Structure | None] | None = None,
    storage: str = "dense",
    **settings: Any,
) -> Iterator[Completion]:
    """The results of ``prompts`` as they come, in the order in which they end. Prompts are taken when there is room for
    them, so they may be any number.

    A prompt may be a mapping with "prompt" and settings of its own. Settings are those of `stream`: max_tokens,
    sampling, stop_token_ids, stop, include_stop, deadline, logprobs, show_special_tokens. ``structure``: one for all,
    or a list of one each. ``draft``: "lookup" or a model. The others: see
    `Engine`. What is wrong with one prompt is in its result's ``error``, and the others go on.
    """
    engine = _engine(model, max_rows, step_tokens, max_bytes, draft, draft_tokens, store, storage)
    coming = enumerate(_listed(prompts))
    places: dict[int, int] = {}
    more = True
    while more or engine.busy:
        while more and engine.waiting + engine.rows < engine.max_rows:
            place, prompt = next(coming, (-1, ""))
            if place < 0:
                more = False
                break
            try:
                text = _text(model, prompt, {**settings, "structure": _structure(structure, place)})
                request = engine.add(text, make_draft(draft, model, text.sampling))
            except InputError as error:
                yield Completion(place, "", (), None, None, (), None, error)
                continue
            places[request.number] = place
        for update in engine.step():
            if update.request.finished:
                yield _result(places.pop(update.request.number), update.request)


def _engine(
    model: Model, max_rows: int = 32, step_tokens: int = PREFILL_WIDTH, max_bytes: int | None = None,
    draft: Draft | Model | str | None = None, draft_tokens: int = 12, store: PromptStore | None = None,
    storage: str = "dense",
) -> Engine:  # fmt: skip
    if draft is not None and not isinstance(draft, Model | str):
        raise InputError(f"draft is {draft!r}; expected 'lookup' or a model: each text gets a draft of its own")
    require(is_int(draft_tokens) and draft_tokens >= 1, "draft_tokens", draft_tokens, "an integer >= 1")
    checked = 0 if draft in (None, "none") else draft_tokens
    return Engine(model, max_rows, step_tokens, max_bytes, checked, store, storage)


def _structure(given: Any, place: int) -> Any:
    """That of the prompt at ``place``."""
    if not isinstance(given, list | tuple):
        return given
    if place >= len(given):
        raise InputError(f"there are structures for {len(given)} prompts, and none for prompt {place}")
    return given[place]


def _listed(prompts: Any) -> Iterable[Any]:
    """``prompts``; a single text or mapping is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts are {prompts!r}; expected a list of texts, of lists of token ids, or of mappings")
    return prompts


def _text(model: Model, prompt: Prompt | Mapping[str, Any], settings: Mapping[str, Any]) -> Text:
    """A prompt with its own settings. Raises InputError for what does not fit, unknown names too."""
    own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    given = {**settings, **own}
    known = [name for name in signature(make_text).parameters if name not in ("model", "limit")]
    unknown = [name for name in given if name not in known]
    if unknown or "prompt" not in own:
        wrong = f"has {', '.join(unknown)}" if unknown else "has no prompt"
        raise InputError(f"a prompt {wrong}; expected {', '.join(known)}")
    return make_text(model, **given)


def _result(index: int, request: Request) -> Completion:
    text, ending = request.text, request.text.ending
    return Completion(
        index, text.shown, tuple(text.generated), ending.reason, ending.matched, tuple(text.logprobs), request.stats,
        request.error,
    )  # fmt: skip
