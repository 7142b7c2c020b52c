"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from exactkv.generation.sampling import Logprobs
from exactkv.generation.text import Text
from exactkv.generation.tools import TextEvent
from exactkv.serve.errors import Refusal
from exactkv.serve.http import read, salt_of
from exactkv.serve.openai.common import check_parts, usage
from exactkv.serve.replies import Replies
from exactkv.serve.schema import openai as schema
from exactkv.serve.service import Service
from exactkv.serve.stream import EventStream, event, whole
from exactkv.serve.structure import PLAIN
from exactkv.serve.texts import TextMaker
from exactkv.serve.tokens import finite, token_text

DEFAULT_TOKENS = 16


async def completions(request: Request) -> ASGIApp:
    """Texts that go on after prompts."""
    service: Service = request.app.state.service
    asked = await read(request, schema.CompletionRequest, service.options.body_bytes)
    name = service.check_name(asked.model)
    if asked.best_of not in (None, asked.n or 1):
        raise Refusal(400, f"best_of is {asked.best_of}; expected {asked.n or 1}, which is n, or none", "best_of")
    prompts = prompts_of(asked.prompt)
    check_parts(len(prompts), asked.n or 1, service.options.max_batch + service.options.queue)
    texts = await anyio.to_thread.run_sync(lambda: texts_of(service.maker, asked, prompts))
    call = await service.begin(texts, salt_of(request.scope, asked.cache_salt))
    completion = Completions(service, asked, prompts, name, Replies(service.model, call, PLAIN))
    if asked.stream:
        return EventStream(completion.events(), lambda: service.close(call), service.options.timeout)
    try:
        response = await whole(request, completion.response())
    finally:
        service.close(call)
    return Response(response.model_dump_json(), media_type="application/json")


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request, which may be one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refusal(400, "prompt is an empty list; expected a text, token ids, or several of either", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if not isinstance(each, int)]


def texts_of(maker: TextMaker, asked: schema.CompletionRequest, prompts: Sequence[str | list[int]]) -> list[Text]:
    """What a request asks the engine for. A reply of no tokens is one whose first is not told."""
    most = DEFAULT_TOKENS if asked.max_tokens is None else max(1, asked.max_tokens)
    return maker.texts(
        [maker.encoded(prompt) for prompt in prompts], asked.n or 1, maker.sampling(asked), max_tokens=most,
        stop=asked.stop, ignore_eos=asked.ignore_eos, logprobs=asked.logprobs,
        scores=asked.logprobs if asked.echo else None,
    )  # fmt: skip


class Completions:
    """The reply to one request."""

    def __init__(
        self, service: Service, asked: schema.CompletionRequest, prompts: Sequence[str | list[int]], name: str,
        replies: Replies,
    ):  # fmt: skip
        self._model, self._asked, self._name, self._replies = service.model, asked, name, replies
        self._prompts, self._count = prompts, asked.n or 1
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._silent = asked.max_tokens == 0

    async def response(self) -> schema.CompletionResponse:
        """All of it."""
        choices = []
        for index, said in enumerate(await self._replies.all()):
            told = Told(self, index)
            text, logprobs = told.begin()
            more, rest = told.add("" if self._silent else said.text, () if self._silent else said.logprobs)
            finish = "length" if self._silent else said.finish
            choices.append(
                schema.TextChoice(index=index, text=text + more, logprobs=merged(logprobs, rest), finish_reason=finish)
            )
        return schema.CompletionResponse(
            id=self._id, created=self._created, model=self._name, choices=choices, usage=self._usage()
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """It as it comes."""
        options, told = self._asked.stream_options, [Told(self, i) for i in range(len(self._replies.call.texts))]
        begun: set[int] = set()
        try:
            async for part in self._replies.parts():
                text, logprobs = ("", None) if part.index in begun else told[part.index].begin()
                begun.add(part.index)
                said = "".join(each.text for each in part.events if isinstance(each, TextEvent))
                more, rest = told[part.index].add(*(("", ()) if self._silent else (said, part.logprobs)))
                finish = "length" if self._silent and part.finish else part.finish
                if text or more or rest or finish:
                    yield self._chunk(schema.TextChoice(index=part.index, text=text + more,
                                      logprobs=merged(logprobs, rest), finish_reason=finish))  # fmt: skip
        except Refusal as refusal:
            yield event(refusal.body(anthropic=False))
            return
        if options is not None and options.include_usage:
            yield self._chunk(None, self._usage())
        yield event("[DONE]")

    def _usage(self) -> schema.Usage:
        cost = usage(self._replies, self._count)
        if self._silent:
            cost.completion_tokens, cost.total_tokens = 0, cost.prompt_tokens
        return cost

    def _chunk(self, choice: schema.TextChoice | None, cost: schema.Usage | None = None) -> bytes:
        chunk = schema.CompletionResponse(
            id=self._id, created=self._created, model=self._name, choices=[] if choice is None else [choice], usage=cost
        )
        return event(chunk.model_dump(exclude={"usage"} if cost is None else None))

    def prompt_text(self, index: int) -> str:
        """The prompt of the text at a place, as it is echoed."""
        prompt = self._prompts[index // self._count]
        if isinstance(prompt, str) or self._model.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self._model.tokenizer.decode(prompt, skip_special_tokens=False)


class Told:
    """What is told of one text: where in it each token begins."""

    def __init__(self, of: Completions, index: int):
        self._of, self._index, self._offset = of, index, 0
        self._top = of._asked.logprobs

    def begin(self) -> tuple[str, schema.TextLogprobs | None]:
        """The prompt, where it is echoed."""
        if not self._of._asked.echo:
            return "", None
        text = self._of._replies.call.texts[self._index]
        if text.scores is None:
            return self._of.prompt_text(self._index), None
        told = empty()
        self._place(told, text.prompt[0], None, None)
        for token, (logprob, top) in zip(text.prompt[1:], text.scores.told, strict=True):
            self._place(told, token, logprob, dict(top))
        return self._of.prompt_text(self._index), told

    def add(self, text: str, logprobs: Sequence[Logprobs]) -> tuple[str, schema.TextLogprobs | None]:
        """More of the reply."""
        if self._top is None:
            return text, None
        told = empty()
        for at in logprobs:
            self._place(told, at.token, at.logprob, dict(at.top_logprobs))
        return text, told

    def _place(
        self, told: schema.TextLogprobs, token: int, logprob: float | None, top: dict[int, float] | None
    ) -> None:
        model = self._of._model
        written = token_text(model, token)
        told.tokens.append(written)
        told.token_logprobs.append(None if logprob is None else finite(logprob))
        told.text_offset.append(self._offset)
        self._offset += len(written)
        if top is None or logprob is None:
            told.top_logprobs.append(None)
            return
        ranked: dict[str, float] = {}
        for each, value in sorted({**top, token: logprob}.items(), key=lambda pair: -pair[1]):
            ranked.setdefault(token_text(model, each), finite(value))
        told.top_logprobs.append(ranked)


def empty() -> schema.TextLogprobs:
    """Of no tokens."""
    return schema.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def merged(first: schema.TextLogprobs | None, second: schema.TextLogprobs | None) -> schema.TextLogprobs | None:
    """Of the tokens of both."""
    if first is None or second is None:
        return first or second
    return schema.TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )
