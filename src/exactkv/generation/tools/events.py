"""What a parser tells of a reply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextEvent:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningEvent:
    """Text of the reasoning before it."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. ``index``: 0 for the reply's first one. ``id``: names it, in this reply and others."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Arguments of call ``index``: joined, the text of a JSON object, as the model wrote it where it wrote JSON."""

    index: int
    text: str


Event = TextEvent | ReasoningEvent | ToolCallStart | ToolCallArguments


def joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind made one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextEvent | ReasoningEvent) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            out[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out
