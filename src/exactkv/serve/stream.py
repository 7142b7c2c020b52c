"""Replies that take a while: as events, or as a whole; either ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from exactkv.serve.errors import Refusal

T = TypeVar("T")
ALIVE_SECONDS = 15
"""After so long without an event, a comment keeps proxies and clients from giving up."""


def event(data: BaseModel | Mapping[str, Any] | str, name: str | None = None, exclude_none: bool = False) -> bytes:
    """A server-sent event."""
    content = data.encode() if isinstance(data, str) else to_json(data, exclude_none=exclude_none)
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + content + b"\n\n"


class EventStream:
    """A response of server-sent events. ``events`` is closed, and ``close`` called, however it ends: after its last
    event, when the client leaves, or when the client has taken nothing for ``stall`` seconds."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], stall: float):
        self._events, self._close, self._stall = events, close, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                       (b"x-accel-buffering", b"no")]  # fmt: skip
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with suppress(ClientGone):
                await while_there(receive, self._pump(send))
        finally:
            self._close()
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        async def say(body: bytes, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": body, "more_body": more})
            except TimeoutError:
                raise ClientGone from None

        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait([coming], timeout=ALIVE_SECONDS)
                if not done:
                    await say(b": still at work\n\n")
                    continue
                try:
                    body, coming = coming.result(), None
                except StopAsyncIteration:
                    coming = None
                    break
                await say(body)
            await say(b"", more=False)
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                    await coming


class ClientGone(Exception):
    """There is nobody left to answer."""


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """What ``work`` gives, as long as the client stays; raises ClientGone where it leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def whole(request: Request, work: Awaitable[T]) -> T:
    """As `while_there`, for a response in one piece."""
    try:
        return await while_there(request.receive, work)
    except ClientGone:
        raise Refusal(499, "the client has left") from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
