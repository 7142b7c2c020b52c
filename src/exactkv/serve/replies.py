"""What comes of a call, as all APIs tell it: events of each text, why it ended, what it cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from exactkv.generation.loop import Stats
from exactkv.generation.sampling import Logprobs
from exactkv.generation.tools import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from exactkv.models.model import Model
from exactkv.serve.call import Call
from exactkv.serve.errors import Refusal
from exactkv.serve.structure import Form, reader

TOO_LATE = Refusal(
    503, "the request's time was over before there was a token; send it again later", code="timeout", retry_after=5
)


@dataclass(frozen=True)
class Part:
    """More of the text at place ``index``. ``finish``: "stop", "length" or "tool_calls" in the last, ``matched`` the
    stop string or token."""

    index: int
    events: list[Event]
    logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None
    matched: str | int | None = None


@dataclass
class Said:
    """All that a text has said."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallStart] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: str | None = None
    matched: str | int | None = None

    def take(self, part: Part) -> None:
        """Add what has come."""
        for event in part.events:
            if isinstance(event, TextEvent):
                self.text += event.text
            elif isinstance(event, ReasoningEvent):
                self.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                self.calls.append(event)
                self.arguments.append("")
            elif isinstance(event, ToolCallArguments):
                self.arguments[event.index] += event.text
        self.logprobs += part.logprobs
        self.finish, self.matched = part.finish or self.finish, part.matched if part.finish else self.matched


class Replies:
    """The texts of a call as they are read. ``cached``, ``generated``: tokens of each so far."""

    def __init__(self, model: Model, call: Call, form: Form):
        self.call = call
        self.cached, self.generated = [0] * len(call.texts), [0] * len(call.texts)
        self._readers = [reader(model, form, text.prompt) for text in call.texts]
        self._called = [False] * len(call.texts)

    async def parts(self) -> AsyncIterator[Part]:
        """What comes, in the order in which it comes. Raises Refusal where a text fails."""
        async for news in self.call.news():
            self.cached[news.index] = news.cached
            if news.piece is None:
                continue
            index, piece = news.index, news.piece
            self.generated[index] += len(piece.tokens)
            if piece.finish_reason == "deadline" and not self.generated[index]:
                raise TOO_LATE
            events = self._readers[index].feed(piece.text)
            if piece.finish_reason is not None:
                events = [*events, *self._readers[index].finish()]
            self._called[index] |= any(isinstance(event, ToolCallStart) for event in events)
            if events or piece.tokens or piece.finish_reason:
                finish = self._finish(index, piece.finish_reason)
                yield Part(index, events, piece.logprobs, finish, piece.matched)

    async def all(self) -> list[Said]:
        """What each text has said in the end."""
        said = [Said() for _ in self.call.texts]
        async for part in self.parts():
            said[part.index].take(part)
        return said

    def _finish(self, index: int, reason: str | None) -> str | None:
        if reason is None:
            return None
        return "length" if reason != "stop" else "tool_calls" if self._called[index] else "stop"

    @property
    def stats(self) -> list[Stats | None]:
        """Of the texts that have ended."""
        return self.call.stats
