"""Who may ask, how much, and what is told to those who may not."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.generation.engine import Engine
from exactkv.models.model import Model
from exactkv.serve import ServeOptions, make_app, serve
from exactkv.serve.http import is_key
from exactkv.serve.run import is_loopback
from tests.serve.conftest import NAME, Running, until

Start = Callable[..., Running]
LONG = {"model": NAME, "prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def test_two_keys_share_nothing(start: Start, model: Model) -> None:
    server = start(PromptStore(), api_keys=("first-key", "second-key"))

    def cached(key: str, **more: Any) -> int:
        got = server.openai(key).completions.create(
            model=NAME, prompt="what one tenant has asked", max_tokens=2, extra_body=more
        )
        return int(got.usage.prompt_tokens_details.cached_tokens)

    assert cached("first-key") == 0 and cached("first-key") > 20
    assert cached("second-key") == 0 and cached("second-key") > 20
    assert cached("first-key", cache_salt="a") == 0 and cached("first-key", cache_salt="a") > 20
    assert cached("second-key", cache_salt="a") == 0
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong or missing"):
        server.openai("third-key").models.list()
    with pytest.raises(anthropic.AuthenticationError):
        server.anthropic("third-key").messages.create(model=NAME, max_tokens=1, messages=[])
    got = server.anthropic("first-key").messages.create(
        model=NAME, max_tokens=1, messages=[{"role": "user", "content": "x"}]
    )
    assert got.usage.output_tokens == 1
    with server.http() as client:
        for path, status in (("/health", 200), ("/openapi.json", 200), ("/metrics", 401), ("/v1/nothing", 401)):
            assert client.get(path).status_code == status, path
        assert client.get("/metrics", headers={"authorization": "Bearer first-key"}).status_code == 200
        odd = [(b"authorization", b"Bearer \xff\xfe"), (b"host", b"127.0.0.1")]
        assert client.get("/v1/models", headers=odd).status_code == 401


def test_keys_are_compared_in_whole() -> None:
    keys = ("abc", "abcdef")
    assert is_key("abc", keys) and is_key("abcdef", keys)
    assert not any(is_key(wrong, keys) for wrong in ("", "ab", "abcd", "abcdefg", "ABC", "\udcff"))


def test_a_full_queue_says_when_to_come_again(start: Start) -> None:
    server = start(max_batch=1, queue=1)
    with server.http() as client:
        with client.stream("POST", "/v1/completions", json=LONG) as first:
            lines = first.iter_lines()
            next(lines)
            waiting = threading.Thread(target=server.post, args=("/v1/completions", {**LONG, "max_tokens": 1}))
            waiting.start()
            until(lambda: server.service.open == 2)
            assert server.engine(lambda engine: (engine.rows, engine.waiting)) == (1, 1)
            refused = server.post("/v1/completions", LONG)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            with pytest.raises(anthropic.RateLimitError):
                server.anthropic().messages.create(
                    model=NAME, max_tokens=1, messages=[{"role": "user", "content": "x"}]
                )
            assert server.post("/v1/completions", {**LONG, "n": 3}).status_code == 400  # never would there be room
            assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
        waiting.join(20)
    until(server.idle)


def test_bodies_and_prompts_have_a_limit(start: Start) -> None:
    server = start(body_bytes=2000, max_context=100)
    body = {"model": NAME, "prompt": "x" * 2000}
    assert server.post("/v1/completions", body).status_code == 413
    with server.http() as client:  # without a length
        pieces = (b"x" * 100 for _ in range(100))
        sent = client.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
        assert sent.status_code == 413 and sent.json()["error"]["type"] == "invalid_request_error"
    too_long = server.post("/v1/completions", {"model": NAME, "prompt": "x" * 100})
    assert too_long.status_code == 400 and "101 tokens; at most 100 fit" in too_long.text
    just = server.post("/v1/completions", {"model": NAME, "prompt": "x" * 99, "max_tokens": 50, "ignore_eos": True})
    assert just.json()["usage"] == {**just.json()["usage"], "prompt_tokens": 100, "completion_tokens": 1}
    assert just.json()["choices"][0]["finish_reason"] == "length"
    assert server.openai().models.retrieve(NAME).max_model_len == 100


def test_memory_bounds_the_context(start: Start, model: Model) -> None:
    least = Engine(model, max_bytes=10**9)._most(50)
    server = start(max_bytes=least, max_batch=4)
    limit = server.service.maker.limit
    assert 40 < limit < 60
    create = server.openai().completions.create
    got = create(model=NAME, prompt=[[1] * limit, [2] * 5], max_tokens=10**9, extra_body={"ignore_eos": True})
    assert [c.finish_reason for c in got.choices] == ["length", "length"]
    with pytest.raises(openai.BadRequestError, match=f"at most {limit} fit"):
        create(model=NAME, prompt=[1] * (limit + 1))
    with pytest.raises(InputError, match="max_bytes leaves no room"):
        make_app(model, ServeOptions(max_bytes=1))


def test_a_request_has_its_time(start: Start) -> None:
    server = start(timeout=0.4, max_batch=1)
    started = time.monotonic()
    got = server.post("/v1/completions", {**LONG, "stream": False, "max_tokens": 2000})
    assert time.monotonic() - started < 5 and got.json()["choices"][0]["finish_reason"] == "length"
    assert 0 < got.json()["usage"]["completion_tokens"] < 2000
    refused = server.post("/v1/completions", {**LONG, "stream": False, "prompt": [[1], [2]], "max_tokens": 2000})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "timeout"
    assert refused.headers["retry-after"]
    until(server.idle)


def test_a_body_that_does_not_come_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactkv.serve.http.BODY_SECONDS", 0.2)
    server = start()
    with socket.create_connection(server._socket.getsockname()) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_pages_of_other_origins(start: Start) -> None:
    shut, opened = start(hosts=("localhost", "127.0.0.1")), start(cors=("http://page.example",))
    with shut.http() as client:
        wanted = {"origin": "http://page.example", "access-control-request-method": "POST"}
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=wanted).headers
        assert "access-control-allow-origin" not in client.get("/health", headers=wanted).headers
        plain = client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415  # what a page may send without asking
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/health", headers={"host": "localhost:1234"}).status_code == 200
    with opened.http() as client:
        asked = client.options("/v1/completions", headers=wanted)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == wanted["origin"]
        refused = client.post("/v1/completions", json={}, headers={"origin": wanted["origin"]})
        assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == wanted["origin"]
        other = client.get("/health", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


@pytest.mark.parametrize("logs", [False, True])
def test_prompts_are_logged_only_if_asked(start: Start, caplog: pytest.LogCaptureFixture, logs: bool) -> None:
    caplog.set_level(logging.DEBUG)
    server = start(log_prompts=logs)
    server.post("/v1/completions", {"model": NAME, "prompt": "a secret", "max_tokens": 2})
    server.post("/v1/completions", {"model": NAME, "prompt": "a secret", "max_tokens": -2})
    server.post("/v1/completions", {"model": NAME, "prompt": ["a secret", 5]})
    until(server.idle)
    written = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("exactkv"))
    assert ("a secret" in written) == logs and "2 tokens after 9" in written


def test_metrics_tell_what_was_done(start: Start) -> None:
    server = start(PromptStore(), max_batch=3)
    for _ in range(2):
        server.post("/v1/completions", {"model": NAME, "prompt": "x" * 30, "max_tokens": 4, "ignore_eos": True})
    server.post("/v1/completions", {"model": NAME})
    with server.http() as client:
        client.get("/no/such/path/" + "x" * 50)
        text = client.get("/metrics").text
    values = dict(re.findall(r"^(exactkv_[^ ]+) ([\d.e+-]+)$", text, re.MULTILINE))
    expected = {
        'exactkv_http_requests_total{path="/v1/completions",status="200"}': 2,
        'exactkv_http_requests_total{path="/v1/completions",status="400"}': 1,
        'exactkv_http_requests_total{path="other",status="404"}': 1,
        'exactkv_prompt_tokens_total{source="cached"}': 30, 'exactkv_prompt_tokens_total{source="fed"}': 32,
        "exactkv_generated_tokens_total": 8, 'exactkv_texts_total{reason="length"}': 2,
        "exactkv_time_to_first_token_seconds_count": 2, "exactkv_time_per_output_token_seconds_count": 2,
        'exactkv_prompt_cache_lookups_total{found="memory"}': 1,
        'exactkv_prompt_cache_lookups_total{found="nothing"}': 1, "exactkv_queue_texts": 0, "exactkv_batch_rows": 0,
        "exactkv_batch_rows_max": 3, "exactkv_cache_bytes": 0, "exactkv_texts_open": 0,
    }  # fmt: skip
    assert {name: float(values[name]) for name in expected} == expected
    assert float(values['exactkv_prompt_cache_bytes{tier="memory"}']) > 0


@pytest.mark.parametrize(
    "wrong",
    [{"max_batch": 0}, {"queue": -1}, {"timeout": 0}, {"grace": -0.5}, {"grace": float("nan")}, {"max_context": 0},
     {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"body_bytes": 1.5}],
)  # fmt: skip
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ServeOptions(**wrong)


def test_ending_takes_no_more(start: Start) -> None:
    server = start()
    server.service.ending = True
    refused = server.post("/v1/completions", {"model": NAME, "prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    with server.http() as client:
        assert client.get("/health").status_code == 503
    with pytest.raises(anthropic.InternalServerError) as caught:
        server.anthropic().messages.create(model=NAME, max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_an_app_without_a_server(model: Model) -> None:
    """As other ASGI servers run it; before it has begun it says so."""

    async def ask() -> list[int]:
        app = make_app(model)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local") as client:
            before = await client.post("/v1/completions", json={"model": NAME, "prompt": "x"})
            async with app.router.lifespan_context(app):
                during = await client.post("/v1/completions", json={"model": NAME, "prompt": "x"})
            after = await client.post("/v1/completions", json={"model": NAME, "prompt": "x"})
        return [r.status_code for r in (before, during, after)]

    assert asyncio.run(ask()) == [503, 200, 503]


def test_serving_others_without_a_key_is_warned_of(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there any name is answered to; on loopback its own names alone."""
    made: list[ServeOptions] = []

    def making(model: Model, options: ServeOptions, store: PromptStore | None = None) -> Any:
        made.append(options)
        raise InputError("no further")

    monkeypatch.setattr("exactkv.serve.run.make_server", making)
    for host, keys, warned in (("0.0.0.0", (), True), ("0.0.0.0", ("key",), False), ("127.0.0.1", (), False)):
        caplog.clear()
        with pytest.raises(InputError, match="no further"):
            serve(model, ServeOptions(api_keys=keys, hosts=("other",)), host=host, port=0)
        assert ("no --api-key" in caplog.text) == warned
    assert [options.hosts for options in made[1:]] == [
        ("*",),
        ("localhost", "127.0.0.1", "[::1]", "127.0.0.1", "other"),
    ]
