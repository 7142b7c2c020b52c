"""Options for structures and tools, and how calls are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.generation import Prompt, Structure
    from exactkv.generation.tools import Event, ToolFormat
    from exactkv.models.model import Model

Tools = Sequence[Mapping[str, Any]]

JsonSchema = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Only JSON that satisfies the JSON schema in this file."),
]
Grammar = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Only text of the Lark grammar in this file."),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="TEXT", show_default=False, help="Only text all of which matches this regular expression."),
]
ToolsFile = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        show_default=False,
        help="Tools that the model may call, a JSON list as in OpenAI's API. Calls are shown, not executed.",
    ),
]


def structure_from(json_schema: Path | None, grammar: Path | None, regex: str | None) -> Structure | None:
    """What the options ask for. Raises InputError where they contradict each other or do not fit."""
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} were given; a text has one structure: leave out all but one")
    if not named:
        return None
    from exactkv.generation import Structure

    try:
        if json_schema is not None:
            return Structure.json_schema(_read(json_schema, "--json-schema"))
        if grammar is not None:
            return Structure.grammar(_read(grammar, "--grammar"))
        return Structure.regex(regex or "")
    except InputError as error:
        raise InputError(f"{named[0]}: {error}") from None


def read_tools(file: Path | None) -> Tools | None:
    """The tools in a file. Raises InputError where it holds none."""
    if file is None:
        return None
    from exactkv.generation.tools.calls import functions

    try:
        content = json.loads(_read(file, "--tools"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"--tools is {file}, which is not JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise InputError(f"--tools is {file}; expected a JSON list of tools, at least one")
    functions(content)
    return content


def tool_format(model: Model) -> ToolFormat:
    """How a model calls tools. Raises InputError where its template does not show it."""
    from exactkv.generation.tools import ToolFormat

    found = ToolFormat.of(model.tokenizer)
    if found is None or found.forced is None:
        raise InputError(
            f"--tools was given, and the chat template of {model.name or 'this model'} shows no format of calls that "
            "is known; take a model that was trained to call tools, or leave out --tools"
        )
    return found


@dataclass
class Shown:
    """A reply with tools, told apart. ``write`` gets what is to be seen as it comes."""

    format: ToolFormat
    tools: Tools
    write: Callable[[str], Any] | None = None
    after: str = ""
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parser = self.format.parser(self.tools, after=self.after)

    def feed(self, piece: str) -> None:
        """Take the next piece."""
        self._take(self._parser.feed(piece))

    def finish(self) -> None:
        """The reply has ended."""
        self._take(self._parser.finish())

    def told_apart(self) -> dict[str, Any]:
        """For JSON."""
        return {"text": self.text, "reasoning": self.reasoning, "tool_calls": self.calls}

    def _take(self, events: Sequence[Event]) -> None:
        from exactkv.generation.tools import ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart

        for event in events:
            if isinstance(event, TextEvent):
                self.text += event.text
                self._write(event.text)
            elif isinstance(event, ReasoningEvent):
                self.reasoning += event.text
                self._write(event.text)
            elif isinstance(event, ToolCallStart):
                self.calls.append({"id": event.id, "name": event.name, "arguments": ""})
                self._write(f"\n→ {event.name} ")
            elif isinstance(event, ToolCallArguments):
                self.calls[event.index]["arguments"] += event.text
                self._write(event.text)

    def _write(self, text: str) -> None:
        if self.write is not None:
            self.write(text)


def with_tools(model: Model, prompt: Prompt, tools: Tools, write: Any) -> tuple[list[int], Shown]:
    """The ids of a prompt that is a text or messages, and what tells the reply apart."""
    form = tool_format(model)
    assert model.tokenizer is not None
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = model.tokenizer.render_chat_template(messages, tools=tools)
    return model.tokenizer.encode(text, add_special_tokens=False), Shown(form, tools, write, after=text)


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} is {file}, which cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option} is {file}, which is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
