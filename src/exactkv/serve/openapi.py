"""What there is to ask, as an OpenAPI document made from the schemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from exactkv import __version__
from exactkv.serve.schema import anthropic, openai, responses

REF = "#/components/schemas/{model}"


@dataclass(frozen=True)
class Endpoint:
    """A path with its method, what it takes and gives. ``streams``: whether its reply may be events."""

    path: str
    summary: str
    asked: type[BaseModel] | None = None
    told: type[BaseModel] | None = None
    streams: bool = False
    error: type[BaseModel] = openai.ErrorResponse


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "Reply to messages.", openai.ChatRequest, openai.ChatResponse, True),
    Endpoint("/v1/completions", "Go on after prompts.", openai.CompletionRequest, openai.CompletionResponse, True),
    Endpoint("/v1/responses", "Reply to an input.", responses.ResponsesRequest, responses.ResponsesResponse, True),
    Endpoint("/v1/messages", "Reply to messages (Anthropic's API).", anthropic.MessagesRequest,
             anthropic.MessagesResponse, True, anthropic.MessagesError),
    Endpoint("/v1/messages/count_tokens", "Count a prompt's tokens (Anthropic's API).", anthropic.CountRequest,
             anthropic.CountResponse, error=anthropic.MessagesError),
    Endpoint("/tokenize", "Token ids of a text or of messages.", openai.TokenizeRequest, openai.TokenizeResponse),
    Endpoint("/detokenize", "The text of token ids.", openai.DetokenizeRequest, openai.DetokenizeResponse),
    Endpoint("/v1/models", "The model that is served.", told=openai.ModelList),
    Endpoint("/v1/models/{name}", "The model, by a name.", told=openai.ModelCard),
    Endpoint("/health", "Whether the server takes requests."),
    Endpoint("/metrics", "Counts and times in Prometheus' format."),
)  # fmt: skip


def document(with_keys: bool) -> dict[str, Any]:
    """The document. ``with_keys``: whether an API key is needed."""
    modes: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = []
    for endpoint in ENDPOINTS:
        modes += [(endpoint.asked, "validation")] if endpoint.asked is not None else []
        modes += [(model, "serialization") for model in (endpoint.told, endpoint.error) if model is not None]
    names, defined = models_json_schema(list(dict.fromkeys(modes)), ref_template=REF)
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        told = names[(endpoint.told, "serialization")] if endpoint.told is not None else None
        operation: dict[str, Any] = {
            "summary": endpoint.summary,
            "responses": {
                "200": {"description": "Done.", "content": _content(endpoint, told)},
                **{status: {"description": what, "content": _json(names[(endpoint.error, "serialization")])}
                   for status, what in (("4XX", "The request is at fault."),
                                        ("503", "The server has no room, or ends."))},
            },
        }  # fmt: skip
        if endpoint.asked is not None:
            body = names[(endpoint.asked, "validation")]
            operation["requestBody"] = {"required": True, "content": _json(body)}
        if "{name}" in endpoint.path:
            named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [named]
        if endpoint.path == "/health":
            operation["security"] = []
        paths[endpoint.path] = {"get" if endpoint.asked is None else "post": operation}
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "exactkv serve", "version": __version__,
                 "description": "A local model behind the APIs of OpenAI and Anthropic."},
        "paths": paths,
        "components": {"schemas": defined.get("$defs", {})},
    }  # fmt: skip
    if with_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _content(endpoint: Endpoint, told: Any) -> dict[str, Any]:
    if endpoint.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    content = _json(told if told is not None else {"type": "object"})
    return {**content, "text/event-stream": {"schema": {"type": "string"}}} if endpoint.streams else content
