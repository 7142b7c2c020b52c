"""The output of `/v1/responses`: items, and the events by which they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from exactkv.generation.tools import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart

Json = dict[str, Any]


class Items:
    """Items in the order in which they come; the last may be open. Events are mappings with "type" and their fields."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open = ""

    def take(self, said: Event, logprobs: list[Json]) -> Iterator[Json]:
        """What an event of the text adds. ``logprobs``: of the tokens that came with it."""
        if isinstance(said, TextEvent):
            yield from self._begin("message", lambda: self._item("msg", "message", role="assistant", content=[]))
            part = self.items[-1]["content"][0]
            part["text"] += said.text
            part["logprobs"] += logprobs
            yield self._event("response.output_text.delta", content_index=0, delta=said.text, logprobs=logprobs)
        elif isinstance(said, ReasoningEvent):
            yield from self._begin("reasoning", lambda: self._item("rs", "reasoning", summary=[], content=[]))
            self.items[-1]["content"][0]["text"] += said.text
            yield self._event("response.reasoning_text.delta", content_index=0, delta=said.text)
        elif isinstance(said, ToolCallStart):
            yield from self._begin(
                f"call {said.index}",
                lambda: self._item("fc", "function_call", call_id=said.id, name=said.name, arguments=""),
            )
        elif isinstance(said, ToolCallArguments):
            self.items[-1]["arguments"] += said.text
            yield self._event("response.function_call_arguments.delta", delta=said.text)

    def end(self, status: str = "completed") -> Iterator[Json]:
        """The open item, if there is one, has ended."""
        if not self._open:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **told)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                told = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", content_index=0, **told)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=part)
        self._open = ""
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begin(self, kind: str, make: Any) -> Iterator[Json]:
        if kind == self._open:
            return
        yield from self.end()
        item = make()
        self.items.append(item)
        self._open = kind
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}
        if "content" in item:
            text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            part = text if item["type"] == "message" else {"type": "reasoning_text", "text": ""}
            item["content"] = [part]
            yield self._event("response.content_part.added", content_index=0, part={**part})

    def _item(self, prefix: str, kind: str, **fields: Any) -> Json:
        return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
