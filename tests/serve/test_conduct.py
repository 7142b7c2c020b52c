"""What others do to a request: leaving, not reading, wanting memory, failing. Nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exactkv.cache.store import PromptStore
from exactkv.generation import generate
from exactkv.models.model import Model
from exactkv.serve.stream import ALIVE_SECONDS
from tests.generation.tiny_text import byte_tokenizer, text_model
from tests.serve.conftest import NAME, Running, until

Start = Callable[..., Running]
LONG = {"model": NAME, "prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "seed": 1}
SHORT = {"model": NAME, "prompt": "abcd", "max_tokens": 8, "temperature": 0}


def sent(server: Running, content: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server._socket.getsockname())
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def cancelled(server: Running) -> float:
    return server.service.metrics.registry.get_sample_value("exactkv_texts_total", {"reason": "cancelled"}) or 0


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_the_row_at_once(start: Start, stream: bool) -> None:
    endless = text_model(1 << 15, byte_tokenizer())
    endless.generation_config["eos_token_id"] = []  # /v1/messages cannot ask to go on past an end
    assert endless.tokenizer is not None
    endless.tokenizer.eos_token_ids = []
    server = start(max_batch=1, model_=endless)
    chat = {k: v for k, v in LONG.items() if k != "prompt"} | {"messages": [{"role": "user", "content": "x"}]}
    message = {"model": NAME, "messages": chat["messages"]}
    asked = [("/v1/completions", LONG), ("/v1/chat/completions", chat), ("/v1/messages", message)]
    for i, (path, content) in enumerate(asked):
        running = sent(server, {**content, "stream": stream, "max_tokens": 30_000}, path)
        until(lambda: server.engine(lambda e: e.rows) == 1)
        waiting = sent(server, {**content, "stream": stream, "max_tokens": 30_000}, path)
        until(lambda: server.engine(lambda e: e.waiting) == 1)
        waiting.close()
        until(lambda: server.engine(lambda e: e.waiting) == 0)
        assert server.engine(lambda e: e.rows) == 1  # the one that stayed
        running.close()
        until(server.idle)
        assert cancelled(server) == 2 * (i + 1)


def test_who_does_not_read_holds_nobody_up(start: Start, model: Model) -> None:
    server = start(max_batch=4)
    slow = [sent(server, {**LONG, "logprobs": 20, "stream": True, "max_tokens": 600}) for _ in range(2)]
    until(lambda: server.engine(lambda e: e.rows) == 2)
    (expected,) = generate(model, ["abcd"], max_tokens=8)
    for _ in range(3):
        assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == expected.text
    until(lambda: server.engine(lambda e: e.rows) == 0)  # their rows are done, though nothing was read
    assert cancelled(server) == 0
    for connection in slow:  # and all is still there to be read
        text = b""
        while b"[DONE]" not in text:
            got = connection.recv(1 << 16)
            assert got
            text += got
        connection.close()


def test_who_never_reads_is_dropped(start: Start) -> None:
    server = start(timeout=1.0)
    slow = sent(server, {**LONG, "logprobs": 20, "stream": True})
    until(lambda: server.engine(lambda e: e.rows) == 0)
    until(lambda: len(server.server.server_state.tasks) == 0, 10)
    slow.close()


class Starving(Model):
    """Has no memory for more than 100 tokens at once, and fails at prompts that hold token 7."""

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> torch.Tensor | None:
        if any(len(row) > 100 for row in tokens):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory")
        if any(len(row) > 1 and 7 in row for row in tokens):
            raise ZeroDivisionError("a fault of ours")
        return super().__call__(tokens, *args, **options)


@pytest.fixture(scope="module")
def starving() -> Model:
    return text_model(tokenizer=byte_tokenizer(), make=Starving)


@pytest.mark.parametrize("stream", [False, True])
def test_want_of_memory_refuses_one_and_spares_the_others(
    start: Start, starving: Model, model: Model, stream: bool
) -> None:
    server = start(PromptStore(), model_=starving)
    (expected,) = generate(model, ["abc"], max_tokens=400, stop_token_ids=())
    got: list[Any] = []
    asked = {**LONG, "max_tokens": 400, "temperature": 0}
    other = threading.Thread(target=lambda: got.append(server.post("/v1/completions", asked).json()))
    other.start()
    until(lambda: server.engine(lambda e: e.rows) == 1)
    refused = server.post("/v1/completions", {**LONG, "prompt": "x" * 200, "stream": stream})
    if stream:
        assert refused.status_code == 200 and '"code":"out_of_memory"' in refused.text
    else:
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "out_of_memory"
        assert refused.headers["retry-after"]
    other.join(30)
    assert got[0]["choices"][0]["text"] == expected.text
    until(server.idle)


def test_a_fault_of_ours_is_told_and_the_server_lives(start: Start, starving: Model, model: Model) -> None:
    server = start(PromptStore(), model_=starving)
    failed = server.post("/v1/completions", {**SHORT, "prompt": [5, 7, 9]})
    assert failed.status_code == 500 and "ZeroDivision" not in failed.text
    assert failed.json()["error"]["type"] == "server_error"
    (expected,) = generate(model, ["abcd"], max_tokens=8)
    assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == expected.text
    until(server.idle)


class HoldingOut(PromptStore):
    """Has no memory for what is to be kept."""

    def insert(self, *args: Any, **options: Any) -> Any:
        raise MemoryError


def test_no_memory_for_the_prompt_cache_loses_nobody(start: Start, model: Model) -> None:
    server = start(HoldingOut())
    (expected,) = generate(model, ["abcd"], max_tokens=8)
    for _ in range(2):
        assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == expected.text
    connection = sent(server, {**LONG, "stream": True})
    until(lambda: server.engine(lambda e: e.rows) == 1)
    connection.close()
    until(server.idle, 5)


class Blind(Model):
    """Says NaN after token 7."""

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> torch.Tensor | None:
        out = super().__call__(tokens, *args, **options)
        if out is not None and any(7 in row for row in tokens):
            out = out * float("nan")
        return out


def test_logits_that_are_no_numbers_end_their_row(start: Start) -> None:
    server = start(model_=text_model(tokenizer=byte_tokenizer(), make=Blind))
    failed = server.post("/v1/completions", {**SHORT, "prompt": [5, 9, 7]})
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "not_finite"
    assert server.post("/v1/completions", SHORT).status_code == 200
    until(server.idle)


class Slow(Model):
    """Takes its time over prompts."""

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor | None:
        if options.get("logits") == "none":
            time.sleep(0.5)
        return super().__call__(*args, **options)


def test_a_stream_without_words_shows_that_it_lives(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALIVE_SECONDS <= 30  # proxies give up after a minute
    monkeypatch.setattr("exactkv.serve.stream.ALIVE_SECONDS", 0.1)
    server = start(model_=text_model(tokenizer=byte_tokenizer(), make=Slow))
    text = server.post("/v1/completions", {**SHORT, "stream": True}).text
    assert text.startswith(": still at work\n\n") and text.endswith("data: [DONE]\n\n")
    chunks = server.openai().completions.create(**SHORT, stream=True)
    assert sum(len(chunk.choices) for chunk in chunks) >= 1
