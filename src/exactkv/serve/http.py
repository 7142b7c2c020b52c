"""Requests as they come in: who may ask, and what a body says."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import anyio.to_thread
import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from exactkv.serve.errors import Refusal

A = TypeVar("A", bound=BaseModel)
BODY_SECONDS = 60
"""In which a request's body must have come."""


async def read(request: Request, schema: type[A], most: int) -> A:
    """The body of a request, checked. Raises Refusal where it is too large, no JSON or not what is expected."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"the content-type is {kind or 'not given'}; expected application/json")
    body = await read_bytes(request, most)
    return await anyio.to_thread.run_sync(lambda: parse(body, schema))


async def read_bytes(request: Request, most: int) -> bytes:
    """A body of at most ``most`` bytes."""
    too_large = Refusal(413, f"the request's body has more than {most} bytes, which is this server's limit")
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the request's body had not come after {BODY_SECONDS} seconds") from None
    except ClientDisconnect:
        raise Refusal(499, "the client has left") from None
    return b"".join(parts)


def parse(body: bytes, schema: type[A]) -> A:
    """JSON as its standard has it: UTF-8, no NaN, no infinity, no halves of surrogate pairs."""
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body is a JSON {type(content).__name__}; expected an object", code="invalid_json")
    if holds_infinity(content):
        raise Refusal(400, "the body holds a number too large for a float", code="invalid_json")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise refused(error) from None


def holds_infinity(value: Any) -> bool:
    """Whether a number such as 1e999 is somewhere within."""
    if isinstance(value, dict):
        return any(map(holds_infinity, value.values()))
    if isinstance(value, list):
        return any(map(holds_infinity, value))
    return isinstance(value, float) and math.isinf(value)


def refused(error: ValidationError) -> Refusal:
    """The first thing that is wrong, with what was given; of a union's members, the one that got furthest."""
    found = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
    place = ".".join(str(part) for part in found["loc"]) or "the body"
    if found["type"] == "extra_forbidden":
        return Refusal(400, f"{place} is a field that this server does not know; leave it out", place, "unknown_field")
    given = "" if found["type"] in ("missing", "model_type") else f"; given {shown(found.get('input'))}"
    return Refusal(400, f"{place}: {found['msg']}{given}", place, "invalid_value")


def shown(value: Any) -> str:
    """A short form of a value, for messages."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of very many digits"
    return text if len(text) <= 80 else f"{text[:80]}…"


def given_key(headers: Mapping[str, str]) -> str:
    """The API key that a request brings: as a bearer, or in Anthropic's header."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def is_key(given: str, keys: tuple[str, ...]) -> bool:
    """Whether it is one of ``keys``, in a time that tells nothing of them."""
    hashed = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in (given, *keys)]
    return sum(hmac.compare_digest(hashed[0], key) for key in hashed[1:]) > 0


def salt_of(scope: Scope, cache_salt: str | None) -> str:
    """What separates a request's prompt cache from those of other keys and salts. The key itself is not in it."""
    key = scope.get("state", {}).get("api_key", "")
    if not key and not cache_salt:
        return ""
    hashed = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest() if key else ""
    return f"{hashed}:{cache_salt or ''}"


def host_of(headers: Mapping[str, str]) -> str:
    """The name by which a request calls the server, without a port."""
    host = headers.get("host", "")
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
