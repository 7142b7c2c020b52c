"""A reply as it comes, told apart: text, reasoning, calls between markers."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from exactkv.generation.tools.calls import Call, Names, in_string
from exactkv.generation.tools.events import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from exactkv.generation.tools.formats import Block, ToolFormat


class Parser:
    """What parsers share. ``raw``: all that was fed. However the reply is cut into pieces, the events, joined, are the
    same. A call is told when it is whole; what turns out to be none is text."""

    def __init__(self, format: ToolFormat, names: Names, after: str = "", seed: str | None = None):
        self.format, self.raw = format, ""
        self._names, self._buffer, self._events = names, "", list[Event]()
        self._seed = secrets.token_hex(12) if seed is None else seed
        self._calls = 0

    def feed(self, piece: str) -> list[Event]:
        """Take the next piece of the reply; returns what is known now."""
        self.raw += piece
        self._buffer += piece
        self._advance(final=False)
        return self._taken()

    def finish(self) -> list[Event]:
        """The reply has ended; returns what was held back. A call that was cut off is text."""
        self._advance(final=True)
        return self._taken()

    def _advance(self, final: bool) -> None:
        raise NotImplementedError

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str, reasoning: bool = False) -> None:
        if text:
            self._events.append(ReasoningEvent(text) if reasoning else TextEvent(text))

    def _call(self, call: Call) -> None:
        length = self.format.id_length
        digest = hashlib.sha256(f"{self._seed} {self._calls}".encode()).hexdigest()
        identity = digest[:length] if length else f"call_{digest[:24]}"
        self._events.append(ToolCallStart(self._calls, identity, call.name))
        self._events.append(ToolCallArguments(self._calls, call.arguments))
        self._calls += 1

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


class MarkedParser(Parser):
    """For formats with markers, or whose replies are nothing but calls."""

    def __init__(self, format: ToolFormat, names: Names, after: str = "", seed: str | None = None):
        super().__init__(format, names, after, seed)
        self._reasoning = format.begins_reasoning(after)
        self._block: Block | None = None
        self._at_start = True
        """Nothing but reasoning has come: reasoning, or calls without a marker, may begin."""
        self._skips = self._reasoning
        """Spaces that come next belong to a marker."""

    def _advance(self, final: bool) -> None:
        while self._step(final):
            pass

    def _step(self, final: bool) -> bool:
        """Take something from the buffer, as far as it is clear; False where nothing more is."""
        if self._block is not None:
            return self._in_block(self._block, final)
        if self._skips:
            self._buffer = self._buffer.lstrip()
            self._skips = not self._buffer
        if not self._buffer:
            return False
        return self._in_reasoning(final) if self._reasoning else self._in_text(final)

    def _in_reasoning(self, final: bool) -> bool:
        assert self.format.reasoning is not None
        close = self.format.reasoning[1]
        place = self._buffer.find(close)
        if place < 0:
            self._say(self._take(len(self._buffer) - (0 if final else held(self._buffer, [close]))), reasoning=True)
            return False
        self._say(self._take(place), reasoning=True)
        self._take(len(close))
        self._reasoning, self._skips = False, True
        return True

    def _in_text(self, final: bool) -> bool:
        openers = [block.open for block in self.format.blocks]
        if self._at_start:
            begun = self._buffer.lstrip()
            if not begun and not final:
                return False
            if begun.startswith(self.format.bare_starts) and self._names and self.format.bare is not None:
                return self._bare() if final else False
            if self.format.reasoning is not None and begun:
                opener = self.format.reasoning[0]
                if begun.startswith(opener):
                    self._buffer = begun[len(opener) :]
                    self._reasoning = self._skips = True
                    return True
                if opener.startswith(begun) and not final:
                    return False
        places = [(place, -len(o), o) for o in openers if (place := self._buffer.find(o)) >= 0]
        if not places:
            count = len(self._buffer) - (0 if final else held(self._buffer, openers))
            self._tell(self._take(count))
            return False
        place, _, opener = min(places)
        self._tell(self._take(place))
        self._block = next(block for block in self.format.blocks if block.open == opener)
        self._at_start = False
        return True

    def _tell(self, text: str) -> None:
        self._at_start = self._at_start and not text
        self._say(text)

    def _bare(self) -> bool:
        """The whole reply has come, and may be calls."""
        assert self.format.bare is not None
        self._at_start = False
        calls, rest = self.format.bare(self._buffer, self._names)
        if calls:
            self._made(calls, rest)
        return bool(self._buffer)

    def _in_block(self, block: Block, final: bool) -> bool:
        """The buffer begins with the block's opening marker."""
        start = len(block.open)
        end = start
        while block.close is not None and (end := self._buffer.find(block.close, end)) >= 0:
            if not in_string(self._buffer[start:end]):
                break
            end += len(block.close)
        whole = final if block.close is None else end >= 0
        if not whole and not final:
            return False
        self._block = None
        if whole:
            end = len(self._buffer) if block.close is None else end
            calls, rest = block.read(self._buffer[start:end], self._names)
            if calls and (block.close is None or not rest.strip()):
                after = rest if block.close is None else self._buffer[end + len(block.close) :]
                self._made(calls, after)
                return bool(self._buffer)
        self._say(self._take(start))
        return True

    def _made(self, calls: Sequence[Call], rest: str) -> None:
        for call in calls:
            self._call(call)
        self._buffer, self._skips = rest, True


def held(text: str, markers: Sequence[str]) -> int:
    """How many characters at a text's end may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)
