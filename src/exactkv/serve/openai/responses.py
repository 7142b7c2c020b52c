"""`/v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from exactkv.generation.text import Text
from exactkv.generation.tools import TextEvent
from exactkv.serve.errors import Refusal
from exactkv.serve.http import read, salt_of
from exactkv.serve.openai.common import form_of, told_logprobs
from exactkv.serve.openai.items import Items
from exactkv.serve.replies import Part, Replies
from exactkv.serve.schema import responses as schema
from exactkv.serve.service import Service
from exactkv.serve.stream import EventStream, event, whole
from exactkv.serve.structure import Form, check
from exactkv.serve.texts import TextMaker, parsed_arguments

LOGPROBS = "message.output_text.logprobs"


async def responses(request: Request) -> ASGIApp:
    """A reply to an input."""
    service: Service = request.app.state.service
    asked = await read(request, schema.ResponsesRequest, service.options.body_bytes)
    name, form = service.check_name(asked.model), form_asked(asked)
    check(service.model, form)
    text = await anyio.to_thread.run_sync(lambda: text_of(service.maker, asked, form))
    call = await service.begin([text], salt_of(request.scope, asked.cache_salt))
    reply = Reply(service, asked, name, Replies(service.model, call, form))
    if asked.stream:
        return EventStream(reply.events(), lambda: service.close(call), service.options.timeout)
    try:
        response = await whole(request, reply.response())
    finally:
        service.close(call)
    return Response(response.model_dump_json(), media_type="application/json")


def form_asked(asked: schema.ResponsesRequest) -> Form:
    """What a request says of its reply's form."""
    tools = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in asked.tools or ()
    ]
    return form_of(asked.text.format if asked.text else None, tools, asked.tool_choice, asked.parallel_tool_calls)


def text_of(maker: TextMaker, asked: schema.ResponsesRequest, form: Form) -> Text:
    """What a request asks the engine for."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions is not None else []
    messages += messages_of(maker, asked.input)
    settings = {
        "reasoning_effort": asked.reasoning.effort if asked.reasoning is not None else None,
        "verbosity": asked.text.verbosity if asked.text is not None else None,
    }
    variables = {name: value for name, value in settings.items() if value is not None}
    prompt = maker.rendered(messages, form.offered, variables={**variables, **(asked.chat_template_kwargs or {})})
    logprobs = (asked.top_logprobs or 0) if LOGPROBS in (asked.include or ()) or asked.top_logprobs else None
    return maker.text(
        prompt, maker.sampling(asked), max_tokens=asked.max_output_tokens, ignore_eos=asked.ignore_eos,
        logprobs=logprobs, form=form,
    )  # fmt: skip


def messages_of(maker: TextMaker, given: str | Sequence[schema.InputItem]) -> list[dict[str, Any]]:
    """An input as messages: reasoning and calls belong to the assistant's message beside them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in given:
        if isinstance(item, schema.InputMessage):
            role, content = item.role, joined(item.content)
            if role == "assistant" and messages and messages[-1] == {**messages[-1], "role": role, "content": ""}:
                messages[-1]["content"] = content
                continue
            if role == "developer" and not maker.knows_role(role):
                role = "system"
            messages.append({"role": role, "content": content})
        elif isinstance(item, schema.InputCall):
            function = {"name": item.name, "arguments": parsed_arguments(item.arguments)}
            made = {"id": item.call_id, "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(made)
        elif isinstance(item, schema.InputCallOutput):
            messages.append({"role": "tool", "content": joined(item.output), "tool_call_id": item.call_id})
        else:
            messages.append({"role": "assistant", "content": ""})
            messages[-1]["reasoning_content"] = "".join(part.text for part in item.content or item.summary)
    return messages


def joined(content: str | Sequence[schema.InputText]) -> str:
    """Parts of a text, a line each."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Reply:
    """The reply to one request."""

    def __init__(self, service: Service, asked: schema.ResponsesRequest, name: str, replies: Replies):
        self._model, self._asked, self._name, self._replies = service.model, asked, name, replies
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items, self._finish, self._error = Items(), "", None

    async def response(self) -> schema.ResponsesResponse:
        """All of it."""
        async for part in self._replies.parts():
            self._take(part)
        return self._told(self._status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """It as it comes."""
        numbers = count()

        def named(content: dict[str, Any]) -> bytes:
            return event({**content, "sequence_number": next(numbers)}, content["type"])

        for kind in ("response.created", "response.in_progress"):
            yield named({"type": kind, "response": self._told("in_progress").model_dump()})
        try:
            async for part in self._replies.parts():
                for each in self._take(part):
                    yield named(each)
        except Refusal as refusal:
            failed = self._told("failed").model_dump()
            failed["error"] = {"code": refusal.code or "server_error", "message": refusal.message}
            yield named({"type": "response.failed", "response": failed})
            return
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        yield named({"type": kind, "response": self._told(self._status).model_dump()})

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _take(self, part: Part) -> list[dict[str, Any]]:
        told = [each.model_dump() for each in told_logprobs(self._model, part.logprobs, self._asked.top_logprobs or 0)]
        events: list[dict[str, Any]] = []
        for said in part.events:
            events += self._items.take(said, told)
            told = [] if isinstance(said, TextEvent) else told
        if part.finish is not None:
            self._finish = part.finish
            events += self._items.end(self._status)
        return events

    def _told(self, status: Any) -> schema.ResponsesResponse:
        asked, sampling = self._asked, self._replies.call.texts[0].sampling
        wanted = asked.text.format.model_dump(by_alias=True) if asked.text and asked.text.format else {"type": "text"}
        choice = asked.tool_choice or "auto"
        return schema.ResponsesResponse(
            id=self._id, created_at=self._created, status=status, model=self._name, output=self._items.items,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=asked.instructions, max_output_tokens=asked.max_output_tokens, metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            reasoning=None if asked.reasoning is None else {"effort": asked.reasoning.effort, "summary": None},
            temperature=sampling.temperature, top_p=sampling.top_p, text={"format": wanted},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in asked.tools or ()], top_logprobs=asked.top_logprobs or 0,
            usage=None if status == "in_progress" else self._usage(),
        )  # fmt: skip

    def _usage(self) -> schema.ResponsesUsage:
        prompt, made = len(self._replies.call.texts[0].prompt), self._replies.generated[0]
        return schema.ResponsesUsage(
            input_tokens=prompt, input_tokens_details=schema.CachedDetails(cached_tokens=self._replies.cached[0]),
            output_tokens=made, output_tokens_details=schema.ReasoningDetails(), total_tokens=prompt + made,
        )  # fmt: skip
