"""The form of replies, and what is read from their text: the one place that calls `exactkv.generation` for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from exactkv.models.model import Model
from exactkv.serve.errors import Refusal


@dataclass(frozen=True)
class TextEvent:
    """More of what is said."""

    text: str


@dataclass(frozen=True)
class ReasoningEvent:
    """More of what is thought before."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool is called; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments of a call, JSON as the model wrote it."""

    index: int
    text: str


Event = TextEvent | ReasoningEvent | ToolCallStart | ToolCallArguments


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
    """Raise Refusal where ``model`` cannot be held to this form."""
    names = [tool["function"]["name"] for tool in form.tools]
    if form.choice in ("required", "named") and not names:
        raise Refusal(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if form.name is not None and form.name not in names:
        raise Refusal(400, f"tool_choice names {form.name!r}; the tools are {', '.join(names)}", "tool_choice")
    if len(set(names)) < len(names):
        raise Refusal(400, "two tools have the same name; give each its own", "tools")
    if form.kind != "text":
        raise Refusal(400, f"a response_format of {form.kind!r} is not supported yet; leave it out", "response_format")
    if form.offered:
        raise Refusal(400, "tools are not supported yet; leave them out, or set tool_choice to 'none'", "tools")


def reader(model: Model, form: Form) -> Reader:
    """A new reader of one reply of ``model``."""
    return PlainReader()
