"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from exactkv.generation.text import Text
from exactkv.generation.tools import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from exactkv.serve.errors import Refusal
from exactkv.serve.http import read, salt_of
from exactkv.serve.openai.common import form_of, message_for_template, told_logprobs, told_tools, usage
from exactkv.serve.replies import Part, Replies, Said
from exactkv.serve.schema import openai as schema
from exactkv.serve.service import Service
from exactkv.serve.stream import EventStream, event, whole
from exactkv.serve.structure import Form, check
from exactkv.serve.texts import TextMaker
from exactkv.serve.timings import timings


async def chat_completions(request: Request) -> ASGIApp:
    """Replies to messages."""
    service: Service = request.app.state.service
    asked = await read(request, schema.ChatRequest, service.options.body_bytes)
    name = service.check_name(asked.model)
    form = form_of(asked.response_format, told_tools(asked.tools), asked.tool_choice, asked.parallel_tool_calls)
    check(service.model, form)
    texts = await anyio.to_thread.run_sync(lambda: texts_of(service.maker, asked, form))
    call = await service.begin(texts, salt_of(request.scope, asked.cache_salt))
    chat = Chat(service, asked, name, Replies(service.model, call, form))
    if asked.stream:
        return EventStream(chat.events(), lambda: service.close(call), service.options.timeout)
    try:
        response = await whole(request, chat.response())
    finally:
        service.close(call)
    return Response(response.model_dump_json(exclude_unset=False), media_type="application/json")


def texts_of(maker: TextMaker, asked: schema.ChatRequest, form: Form) -> list[Text]:
    """What a request asks the engine for."""
    messages = [message_for_template(maker, message) for message in asked.messages]
    if asked.continue_final_message and messages[-1]["role"] != "assistant":
        raise Refusal(400, "continue_final_message goes on with an assistant's message; the last one is "
                      f"the {messages[-1]['role']}'s", "continue_final_message")  # fmt: skip
    effort = {"reasoning_effort": asked.reasoning_effort, "verbosity": asked.verbosity}
    variables = {name: value for name, value in effort.items() if value is not None}
    prompt = maker.rendered(
        messages, form.offered, asked.add_generation_prompt, asked.continue_final_message,
        {**variables, **(asked.chat_template_kwargs or {})},
    )  # fmt: skip
    return maker.texts(
        [prompt], asked.n or 1, maker.sampling(asked),
        max_tokens=asked.max_completion_tokens or asked.max_tokens, stop=asked.stop, ignore_eos=asked.ignore_eos,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None, form=form,
    )  # fmt: skip


class Chat:
    """The reply to one request."""

    def __init__(self, service: Service, asked: schema.ChatRequest, name: str, replies: Replies):
        self._model, self._asked, self._name, self._replies = service.model, asked, name, replies
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    async def response(self) -> schema.ChatResponse:
        """All of it."""
        said = await self._replies.all()
        return schema.ChatResponse(
            id=self._id, created=self._created, model=self._name, usage=usage(self._replies, len(said)),
            choices=[self._choice(index, each) for index, each in enumerate(said)], timings=self._timings(),
        )  # fmt: skip

    def _timings(self) -> list[schema.Timings] | None:
        if not self._asked.timings:
            return None
        return [timings(self._model, stats) for stats in self._replies.stats if stats is not None]

    def _choice(self, index: int, said: Said) -> schema.ChatChoice:
        calls = [
            schema.ToldToolCall(id=call.id, function=schema.ToldFunction(name=call.name, arguments=arguments))
            for call, arguments in zip(said.calls, said.arguments, strict=True)
        ]
        message = schema.ToldMessage(
            role="assistant", content=said.text if said.text or not calls else None,
            reasoning_content=said.reasoning or None, tool_calls=calls or None,
        )  # fmt: skip
        logprobs = None
        if self._asked.logprobs:
            told = told_logprobs(self._model, said.logprobs, self._asked.top_logprobs or 0)
            logprobs = schema.ChatLogprobs(content=told)
        return schema.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=said.finish)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """It as it comes."""
        options = self._asked.stream_options
        count = len(self._replies.call.texts)
        for index in range(count):
            yield self._chunk(schema.ChatDelta(index=index, delta=schema.ToldMessage(role="assistant", content="")))
        try:
            async for part in self._replies.parts():
                for delta in self._deltas(part):
                    yield self._chunk(delta)
        except Refusal as refusal:
            yield event(refusal.body(anthropic=False))
            return
        cost = usage(self._replies, count) if options is not None and options.include_usage else None
        if cost is not None or self._asked.timings:
            yield self._chunk(None, cost, self._timings())
        yield event("[DONE]")

    def _deltas(self, part: Part) -> list[schema.ChatDelta]:
        """A part as deltas: one an event, the log-probabilities with the first, the reason for its end in the last."""
        messages = [delta_of(each) for each in part.events] or [schema.ToldMessage()]
        deltas = [schema.ChatDelta(index=part.index, delta=message) for message in messages]
        if self._asked.logprobs and part.logprobs:
            told = told_logprobs(self._model, part.logprobs, self._asked.top_logprobs or 0)
            deltas[0].logprobs = schema.ChatLogprobs(content=told)
        if part.finish is not None:
            deltas.append(schema.ChatDelta(index=part.index, delta=schema.ToldMessage(), finish_reason=part.finish))
        return deltas

    def _chunk(
        self, delta: schema.ChatDelta | None, cost: schema.Usage | None = None,
        spent: list[schema.Timings] | None = None,
    ) -> bytes:  # fmt: skip
        chunk = schema.ChatChunk(
            id=self._id, created=self._created, model=self._name, choices=[] if delta is None else [delta], usage=cost,
            timings=spent,
        )  # fmt: skip
        made = chunk.model_dump(exclude_none=True)
        for choice in made["choices"]:
            choice.setdefault("finish_reason", None)
        return event(made)


def delta_of(said: Event) -> schema.ToldMessage:
    """An event as what it adds to a message."""
    if isinstance(said, TextEvent):
        return schema.ToldMessage(content=said.text)
    if isinstance(said, ReasoningEvent):
        return schema.ToldMessage(reasoning_content=said.text)
    if isinstance(said, ToolCallStart):
        function = schema.ToldFunction(name=said.name)
        return schema.ToldMessage(tool_calls=[schema.ToldToolCall(index=said.index, id=said.id, function=function)])
    assert isinstance(said, ToolCallArguments)
    function = schema.ToldFunction(arguments=said.text)
    return schema.ToldMessage(tool_calls=[schema.ToldToolCall(index=said.index, type=None, function=function)])
