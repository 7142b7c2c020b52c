"""Servers on loopback ports, and the clients that people use."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from exactkv.cache.store import PromptStore
from exactkv.generation.engine import Engine
from exactkv.models.model import Model
from exactkv.serve import ServeOptions
from exactkv.serve.run import listen, make_server
from tests.generation.tiny_text import byte_tokenizer, text_model

NAME = "tiny"


class Running:
    """A real server in a thread of this process."""

    def __init__(self, model: Model, options: ServeOptions | None = None, store: PromptStore | None = None):
        self.model, self.options = model, options or ServeOptions(grace=1)
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = make_server(model, self.options, store)
        self.service = self.server._service
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self._socket])))
        self._thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._socket.close()

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, content: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=content)

    def engine(self, question: Callable[[Engine], Any]) -> Any:
        """What the engine says of itself between two steps."""
        loop = self.service.worker._loop
        return asyncio.run_coroutine_threadsafe(self.service.worker.ask(question), loop).result(30)

    def idle(self) -> bool:
        """Whether no row and no text is left behind."""
        return not self.service.open and self.engine(lambda e: (e.rows, e.waiting, e.nbytes)) == (0, 0, 0)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def model() -> Model:
    """A window of 16 and a full layer; tokens are bytes."""
    return text_model(tokenizer=byte_tokenizer())


@pytest.fixture(scope="session")
def running(model: Model) -> Iterator[Running]:
    """A server that the tests share, with a prompt cache."""
    server = Running(model, ServeOptions(grace=1, max_batch=16), PromptStore(64_000_000))
    yield server
    server.stop()


@pytest.fixture
def start(model: Model) -> Iterator[Callable[..., Running]]:
    """Start servers with options of their own."""
    made: list[Running] = []

    def begin(store: PromptStore | None = None, model_: Model | None = None, **options: Any) -> Running:
        made.append(Running(model_ or model, replace(ServeOptions(grace=1), **options), store))
        return made[-1]

    yield begin
    for server in made:
        server.stop()
