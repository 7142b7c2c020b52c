"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from exactkv.errors import InputError
from exactkv.serve.errors import Refusal
from exactkv.serve.http import read
from exactkv.serve.openai.common import message_for_template, told_tools
from exactkv.serve.schema import openai as schema
from exactkv.serve.service import Service
from exactkv.serve.texts import TextMaker
from exactkv.serve.tokens import token_text


def _card(service: Service, name: str) -> schema.ModelCard:
    return schema.ModelCard(id=name, created=service.created, max_model_len=service.maker.limit)


async def list_models(request: Request) -> Response:
    """The model, by each of its names."""
    service: Service = request.app.state.service
    cards = [_card(service, name) for name in service.names if name != "*"]
    return Response(schema.ModelList(data=cards).model_dump_json(), media_type="application/json")


async def one_model(request: Request) -> Response:
    """The model, by a name."""
    service: Service = request.app.state.service
    card = _card(service, service.check_name(request.path_params["name"]))
    return Response(card.model_dump_json(), media_type="application/json")


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of messages."""
    service: Service = request.app.state.service
    asked = await read(request, schema.TokenizeRequest, service.options.body_bytes)
    service.check_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise Refusal(400, "expected either a prompt or messages", "prompt")
    ids = await anyio.to_thread.run_sync(lambda: _tokens_of(service.maker, asked))
    written = [token_text(service.model, i) for i in ids] if asked.return_token_strs else None
    told = schema.TokenizeResponse(tokens=ids, count=len(ids), max_model_len=service.maker.limit, token_strs=written)
    return Response(told.model_dump_json(), media_type="application/json")


def _tokens_of(maker: TextMaker, asked: schema.TokenizeRequest) -> list[int]:
    if asked.messages is not None:
        messages = [message_for_template(maker, message) for message in asked.messages]
        return maker.rendered(
            messages, told_tools(asked.tools) or None, asked.add_generation_prompt, variables=asked.chat_template_kwargs
        )
    if maker.model.tokenizer is None:
        raise InputError("this model has no tokenizer")
    return maker.model.tokenizer.encode(asked.prompt or "", asked.add_special_tokens)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service: Service = request.app.state.service
    asked = await read(request, schema.DetokenizeRequest, service.options.body_bytes)
    service.check_name(asked.model)
    tokenizer, vocab_size = service.model.tokenizer, service.model.spec.vocab_size
    if tokenizer is None:
        raise InputError("this model has no tokenizer")
    if wrong := [token for token in asked.tokens if token >= vocab_size]:
        raise Refusal(400, f"token id {wrong[0]} is outside the vocabulary: 0 to {vocab_size - 1}", "tokens")
    text = await anyio.to_thread.run_sync(lambda: tokenizer.decode(asked.tokens, asked.skip_special_tokens))
    return Response(schema.DetokenizeResponse(prompt=text).model_dump_json(), media_type="application/json")
