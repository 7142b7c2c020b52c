"""The form of replies, and what is read from their text: the one place that calls `exactkv.generation` for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from exactkv.generation.structure import Structure
from exactkv.generation.tools import Event, TextEvent, ToolFormat
from exactkv.models.model import Model
from exactkv.serve.errors import Refusal

LAST = 32
"""Tokens of a prompt's end that are looked at."""


class Reader(Protocol):
    """Reads events from a reply's text as it comes."""

    def feed(self, text: str) -> list[Event]:
        """Take more text."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        ...


class PlainReader:
    """All text is said."""

    def feed(self, text: str) -> list[Event]:
        return [TextEvent(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True)
class Form:
    """What a request says of its reply's form.

    ``kind``: "text", "json_object", "json_schema" (``content``: the schema), "grammar" (Lark) or "regex".
    ``tools``: as OpenAI's API has them, each {"type": "function", "function": {...}}. ``choice``: "auto", "none",
    "required", or the ``name`` of the one to call, then "named". ``parallel``: whether it may call several.
    """

    kind: str = "text"
    content: Mapping[str, Any] | str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template, None where there are none to call."""
        return list(self.tools) if self.tools and self.choice != "none" else None


PLAIN = Form()


def check(model: Model, form: Form) -> None:
    """Raise Refusal where ``model`` cannot be held to this form, as far as that is soon said."""
    names = [tool["function"]["name"] for tool in form.tools]
    if form.choice in ("required", "named") and not names:
        raise Refusal(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if form.name is not None and form.name not in names:
        raise Refusal(400, f"tool_choice names {form.name!r}; the tools are {', '.join(names)}", "tool_choice")
    if len(set(names)) < len(names):
        raise Refusal(400, "two tools have the same name; give each its own", "tools")
    if not form.offered:
        return
    known = ToolFormat.of(model.tokenizer)
    if known is None or known.forced is None:
        raise Refusal(
            400, f"the chat template of {model.name or 'this model'} shows no format of calls that is known; leave "
            "tools out, or set tool_choice to 'none'", "tools",
        )  # fmt: skip
    if form.kind != "text" and form.choice != "auto":
        raise Refusal(400, "tool_choice asks for a call, and response_format for something else; leave one out",
                      "tool_choice")  # fmt: skip


def shaped(model: Model, form: Form, prompt: Sequence[int]) -> dict[str, Any]:
    """What `make_text` is told for a reply of this form. Raises InputError for what is no schema or grammar."""
    known = _format(model, form)
    return {"structure": _structure(model, form, prompt, known), "show_special_tokens": known is not None}


def reader(model: Model, form: Form, prompt: Sequence[int]) -> Reader:
    """A new reader of one reply of ``model`` to ``prompt``."""
    known = _format(model, form)
    return PlainReader() if known is None else known.parser(form.offered or [], _end(model, prompt))


def _format(model: Model, form: Form) -> ToolFormat | None:
    """How calls and reasoning are written; None where nothing but text, as it comes, is wanted."""
    return ToolFormat.of(model.tokenizer) if form.kind == "text" else None


def _structure(model: Model, form: Form, prompt: Sequence[int], known: ToolFormat | None) -> Structure | None:
    if form.kind == "json_object":
        return Structure.json_object()
    if form.kind == "json_schema":
        return Structure.json_schema(form.content or {})
    if form.kind in ("grammar", "regex"):
        made = Structure.grammar if form.kind == "grammar" else Structure.regex
        return made(str(form.content))
    if known is not None and form.choice in ("required", "named"):
        return known.structure(form.offered, form.name or "required", _end(model, prompt))
    return None


def _end(model: Model, prompt: Sequence[int]) -> str:
    """How a prompt ends, which may have begun the reply's reasoning."""
    return "" if model.tokenizer is None else model.tokenizer.decode(prompt[-LAST:], skip_special_tokens=False)
