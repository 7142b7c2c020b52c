"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anyio.to_thread
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from exactkv.generation.text import Text
from exactkv.generation.tools import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from exactkv.serve.anthropic.prompts import form_of, prompt_of
from exactkv.serve.errors import Refusal
from exactkv.serve.http import read, salt_of
from exactkv.serve.replies import Part, Replies, Said
from exactkv.serve.schema import anthropic as schema
from exactkv.serve.service import Service
from exactkv.serve.stream import EventStream, event, whole
from exactkv.serve.structure import Form, check
from exactkv.serve.texts import TextMaker, parsed_arguments


async def messages(request: Request) -> ASGIApp:
    """A reply to messages."""
    service: Service = request.app.state.service
    asked = await read(request, schema.MessagesRequest, service.options.body_bytes)
    name, form = service.check_name(asked.model), form_of(asked)
    check(service.model, form)
    text = await anyio.to_thread.run_sync(lambda: text_of(service.maker, asked, form))
    call = await service.begin([text], salt_of(request.scope, asked.cache_salt))
    reply = Reply(name, Replies(service.model, call, form))
    if asked.stream:
        return EventStream(reply.events(), lambda: service.close(call), service.options.timeout)
    try:
        response = await whole(request, reply.response())
    finally:
        service.close(call)
    made = response.model_dump()
    made["content"] = [block.model_dump(exclude_none=True) for block in response.content]
    return Response(to_json(made), media_type="application/json")


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a request would have."""
    service: Service = request.app.state.service
    asked = await read(request, schema.CountRequest, service.options.body_bytes)
    service.check_name(asked.model)
    check(service.model, form_of(asked))
    ids = await anyio.to_thread.run_sync(lambda: prompt_of(service.maker, asked))
    return Response(schema.CountResponse(input_tokens=len(ids)).model_dump_json(), media_type="application/json")


def text_of(maker: TextMaker, asked: schema.MessagesRequest, form: Form) -> Text:
    """What a request asks the engine for."""
    return maker.text(
        prompt_of(maker, asked),
        maker.sampling(asked),
        max_tokens=asked.max_tokens,
        stop=asked.stop_sequences,
        form=form,
    )


class Reply:
    """The reply to one request."""

    def __init__(self, name: str, replies: Replies):
        self._name, self._replies, self._id = name, replies, f"msg_{uuid.uuid4().hex}"

    async def response(self) -> schema.MessagesResponse:
        """All of it."""
        (said,) = await self._replies.all()
        reason, sequence = stop_reason(said.finish, said.matched)
        return schema.MessagesResponse(
            id=self._id, model=self._name, content=blocks_of(said), stop_reason=reason, stop_sequence=sequence,
            usage=self._usage(),
        )  # fmt: skip

    async def events(self) -> AsyncGenerator[bytes, None]:
        """It as it comes. It begins with its first part, when it is known what was cached."""
        blocks, begun = Blocks(), False
        part: Part | None = None
        try:
            async for part in self._replies.parts():
                if not begun:
                    begun = True
                    yield self._start()
                for said in part.events:
                    for each in blocks.take(said):
                        yield named(each)
        except Refusal as refusal:
            yield event(refusal.body(anthropic=True), "error")
            return
        for each in blocks.end():
            yield named(each)
        reason, sequence = stop_reason(part.finish, part.matched) if part is not None else (None, None)
        yield named({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
                     "usage": self._usage().model_dump()})  # fmt: skip
        yield named({"type": "message_stop"})

    def _start(self) -> bytes:
        usage = self._usage()
        usage.output_tokens = 0
        message = schema.MessagesResponse(id=self._id, model=self._name, content=[], usage=usage)
        return named({"type": "message_start", "message": message.model_dump()})

    def _usage(self) -> schema.MessagesUsage:
        prompt, cached = len(self._replies.call.texts[0].prompt), self._replies.cached[0]
        return schema.MessagesUsage(
            input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=self._replies.generated[0]
        )


class Blocks:
    """The blocks of a reply as events: one is open at a time."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def take(self, said: Event) -> Iterator[dict[str, Any]]:
        """What an event of the text comes to."""
        if isinstance(said, TextEvent):
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": said.text})
        elif isinstance(said, ReasoningEvent):
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": said.text})
        elif isinstance(said, ToolCallStart):
            block = {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
            yield from self._open(f"tool {said.index}", block)
        elif isinstance(said, ToolCallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": said.text})

    def end(self) -> Iterator[dict[str, Any]]:
        """The reply has ended."""
        if self._index >= 0:
            yield {"type": "content_block_stop", "index": self._index}

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self.end()
            self._index, self._kind = self._index + 1, kind
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def blocks_of(said: Said) -> list[schema.ToldBlock]:
    """A whole reply."""
    blocks = []
    if said.reasoning:
        blocks.append(schema.ToldBlock(type="thinking", thinking=said.reasoning, signature=""))
    if said.text:
        blocks.append(schema.ToldBlock(type="text", text=said.text))
    for call, arguments in zip(said.calls, said.arguments, strict=True):
        parsed = parsed_arguments(arguments or "{}")
        given = parsed if isinstance(parsed, dict) else {"": arguments}  # what a model wrote that is no object
        blocks.append(schema.ToldBlock(type="tool_use", id=call.id, name=call.name, input=given))
    return blocks


def stop_reason(finish: str | None, matched: str | int | None) -> tuple[Any, str | None]:
    """Why a reply has ended, and the stop sequence if that is why."""
    if finish == "stop" and isinstance(matched, str):
        return "stop_sequence", matched
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(finish or ""), None


def named(content: dict[str, Any]) -> bytes:
    """An event of the name that its type is."""
    return event(content, content["type"])
