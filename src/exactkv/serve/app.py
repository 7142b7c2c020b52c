"""The application: paths, and what lies around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from exactkv import __version__
from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.models.model import Model
from exactkv.serve.anthropic.messages import count_tokens, messages
from exactkv.serve.errors import Refusal
from exactkv.serve.gate import Gate, on_http_error, on_refusal
from exactkv.serve.openai.chat import chat_completions
from exactkv.serve.openai.completions import completions
from exactkv.serve.openai.models import detokenize, list_models, one_model, tokenize
from exactkv.serve.openai.responses import responses
from exactkv.serve.openapi import document
from exactkv.serve.options import ServeOptions
from exactkv.serve.service import Service
from exactkv.serve.static import page_routes


def make_app(model: Model, options: ServeOptions | None = None, store: PromptStore | None = None) -> Starlette:
    """An ASGI application that serves ``model``; its ``state.service`` is the `Service`. ``store``: the prompt cache,
    which it closes at its end. Raises InputError where the options do not suit the model."""
    service = Service(model, options or ServeOptions(), store)
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    paths = frozenset(route.path for route in routes)
    routes += page_routes()
    middleware = [Middleware(Gate, options=service.options, metrics=service.metrics, paths=paths)]
    if service.options.cors:
        allowed = Middleware(
            CORSMiddleware, allow_origins=list(service.options.cors), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
        middleware.insert(0, allowed)  # a browser's question before has no key

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    handlers = {Refusal: on_refusal, InputError: on_refusal, HTTPException: on_http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=running)
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    """Whether the server takes requests: 200, or 503 while it ends."""
    service: Service = request.app.state.service
    if service.ending:
        raise Refusal(503, "the server is ending", retry_after=10)
    assert service.worker.alive
    return JSONResponse({"status": "ok", "model": service.names[0], "version": __version__, "texts": service.open})


async def metrics(request: Request) -> Response:
    """Counts and times, in Prometheus' format."""
    service: Service = request.app.state.service
    try:
        text = await service.read_metrics()
    except TimeoutError:
        raise Refusal(503, "the engine has been in one step for long; ask again", retry_after=5) from None
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def openapi(request: Request) -> Response:
    """What there is to ask, as an OpenAPI document."""
    service: Service = request.app.state.service
    return JSONResponse(document(bool(service.options.api_keys)))
