"""What stands before every endpoint: who may ask, a number for each request, and what becomes of errors."""

from __future__ import annotations

import logging
import uuid

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exactkv.errors import InputError
from exactkv.serve.errors import Refusal, as_refusal, is_anthropic
from exactkv.serve.http import given_key, host_of, is_key
from exactkv.serve.metrics import Metrics
from exactkv.serve.options import ServeOptions

log = logging.getLogger("exactkv.serve")
OPEN = {"/", "/health", "/openapi.json"}
"""What needs no key, beside the page."""


class Gate:
    """Lets those requests through that may ask. ``paths``: the endpoints, as they are counted."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, paths: frozenset[str]):
        self._app, self._options, self._metrics, self._paths = app, options, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, status, started = f"req_{uuid.uuid4().hex}", 0, False

        async def tell(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = number
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, tell)
        except Refusal as refusal:
            await error_response(scope["path"], refusal)(scope, receive, tell)
        except Exception as error:
            log.error("%s %s failed (%s)", scope["method"], scope["path"], number, exc_info=error)
            if started:
                raise
            await error_response(scope["path"], as_refusal(error))(scope, receive, tell)
        finally:
            path = scope["path"]
            self._metrics.requests.labels(path if path in self._paths else "other", str(status)).inc()

    def _check(self, scope: Scope) -> None:
        headers, options, path = Headers(scope=scope), self._options, scope["path"]
        if "*" not in options.hosts and host_of(headers) not in options.hosts:
            raise Refusal(
                403, "the server listens on loopback and is called by another name, as pages of other origins do it; "
                "start it with --allow-host NAME if that is meant"
            )  # fmt: skip
        if not options.api_keys or path in OPEN or (path not in self._paths and not path.startswith("/v1/")):
            return
        key = given_key(headers)
        if not is_key(key, options.api_keys):
            raise Refusal(
                401, "the API key is wrong or missing; give it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )  # fmt: skip
        scope.setdefault("state", {})["api_key"] = key


def error_response(path: str, refusal: Refusal) -> Response:
    """An error in the words of the API that the path is of."""
    body = to_json(refusal.body(is_anthropic(path)))
    return Response(body, refusal.status, refusal.headers, media_type="application/json")


async def on_refusal(request: Request, error: Exception) -> Response:
    """An endpoint did not answer, and says why."""
    assert isinstance(error, Refusal | InputError)
    return error_response(request.url.path, as_refusal(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """There is no such path, or it has no such method."""
    assert isinstance(error, HTTPException)
    said = {404: f"there is nothing at {request.url.path}; /openapi.json has what there is",
            405: f"{request.url.path} has no {request.method}"}  # fmt: skip
    response = error_response(request.url.path, Refusal(error.status_code, said.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response
