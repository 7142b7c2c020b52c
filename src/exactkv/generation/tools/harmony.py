"""GPT-OSS's harmony: messages with a header that names a channel and, for a call, whom it is for."""

from __future__ import annotations

import re

from exactkv.generation.tools.calls import Call, Names, is_object
from exactkv.generation.tools.formats import ToolFormat
from exactkv.generation.tools.parser import Parser, held

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER_STARTS = (CHANNEL, START, MESSAGE, "assistant", "to=")
"""The prompt ends with <|start|>assistant, so a reply begins within a header."""


class HarmonyParser(Parser):
    """``analysis`` is reasoning; ``final``, and ``commentary`` that is for nobody, are text; what is for a function is
    a call when its message ends, by a marker or as the reply ends, and its text is a JSON object."""

    def __init__(self, format: ToolFormat, names: Names, after: str = "", seed: str | None = None):
        super().__init__(format, names, after, seed)
        self._header: str | None = None
        """Of the message under way; None between messages."""

    def _advance(self, final: bool) -> None:
        while self._buffer and (self._in_message(final) if self._header is not None else self._between(final)):
            pass
        if final and self._header is not None and self._recipient() is not None:
            self._tell(self._recipient(), "")  # cut off before its first word
            self._header = None

    def _between(self, final: bool) -> bool:
        begun = self._buffer.lstrip()
        if not any(begun.startswith(s) or s.startswith(begun) for s in HEADER_STARTS):
            self._header = ""  # plain text, as of a model that leaves the header out
            return True
        place = self._buffer.find(MESSAGE)
        if place >= 0:
            self._header = self._take(place + len(MESSAGE))
            return True
        if final and (begun or self._buffer == self.raw):  # a header that was cut off; or white space is all there is
            self._say(self._take(len(self._buffer)))
        return False

    def _in_message(self, final: bool) -> bool:
        assert self._header is not None
        markers = (*ENDS, START, CHANNEL)
        found = [(place, marker) for marker in markers if (place := self._buffer.find(marker)) >= 0]
        name = self._recipient()
        if not found:
            if name is not None and not final:
                return False
            count = len(self._buffer) - (0 if final or name is not None else held(self._buffer, markers))
            self._tell(name, self._take(count))
            self._header = None if final else self._header
            return False
        place, marker = min(found)
        self._tell(name, self._take(place))
        if marker in ENDS:
            self._take(len(marker))
        self._header = None
        return True

    def _recipient(self) -> str | None:
        match = re.search(r"\bto=([\w.:-]+)", self._header or "")
        return None if match is None else match[1].removeprefix("functions.")

    def _tell(self, name: str | None, body: str) -> None:
        """Part of a message for nobody, or all of one for somebody."""
        if name is None:
            self._say(body, reasoning=f"{CHANNEL}analysis" in (self._header or ""))
        elif (self._names is None or name in self._names) and is_object(body):
            self._call(Call(name, body.strip()))
        else:
            self._say((self._header or "") + body)
