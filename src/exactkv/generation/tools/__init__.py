"""Tool calls and reasoning: what of a reply is which, as it comes, in the format of the model."""

from exactkv.generation.tools.events import (
    Event,
    ReasoningEvent,
    TextEvent,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from exactkv.generation.tools.formats import FORMATS, ToolFormat

__all__ = [
    "FORMATS",
    "Event",
    "ReasoningEvent",
    "TextEvent",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFormat",
    "joined",
]
