"""A server process: a socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn

from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.models.model import Model
from exactkv.serve.app import make_app
from exactkv.serve.options import ServeOptions
from exactkv.serve.service import Service

log = logging.getLogger("exactkv.serve")
LOCAL = ("localhost", "127.0.0.1", "[::1]")
AFTER_GRACE = 3.0
"""Seconds in which replies that were ended reach their clients."""


class Server(uvicorn.Server):
    """A server that a signal ends in order: no new requests, running replies to their end within the grace period, and
    a normal exit. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.ending = True
        log.info("ending: %d texts under way", self._service.open)
        ending = asyncio.get_running_loop().call_later(self._service.options.grace, self._service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def serve(
    model: Model,
    options: ServeOptions | None = None,
    store: PromptStore | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    started: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve ``model`` until SIGTERM or SIGINT. ``port`` 0: any that is free. ``started``: told the address when it
    listens. Raises InputError where the options do not suit, or the address cannot be listened on."""
    options = options or ServeOptions()
    listening = listen(host, port)
    try:
        if is_loopback(host) and "*" not in options.hosts:
            options = replace(options, hosts=(*LOCAL, host, *options.hosts))
        elif not is_loopback(host):
            options = replace(options, hosts=("*",))
            if not options.api_keys:
                log.warning("whoever reaches %s may use this server: it has no --api-key", host)
        server = make_server(model, options, store)
        address = listening.getsockname()
        shown = f"[{address[0]}]" if listening.family == socket.AF_INET6 else address[0]
        started(f"http://{shown}:{address[1]}")
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        listening.close()


def make_server(model: Model, options: ServeOptions, store: PromptStore | None = None) -> Server:
    """A server that has no socket yet."""
    app = make_app(model, options, store)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=False,
        timeout_graceful_shutdown=int(options.grace + AFTER_GRACE) + 1, timeout_keep_alive=30, http="h11",
        loop="asyncio", ws="none",
    )  # fmt: skip
    return Server(config, app.state.service)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address. Raises InputError where that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"host is {host!r}, which is no address: {error}") from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        raise InputError(f"{host}:{port} cannot be listened on: {error.strerror}; give another port or host") from None
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
