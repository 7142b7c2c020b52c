"""What is wrong with a request is told to whoever sent it, with a 4xx, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.conftest import NAME, Running, until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": HELLO, "max_tokens": 2},
    COMPLETIONS: {"model": NAME, "prompt": "x", "max_tokens": 2},
    RESPONSES: {"model": NAME, "input": "x", "max_output_tokens": 2},
    MESSAGES: {"model": NAME, "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": NAME, "messages": HELLO},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [1]},
}
BODIES = [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model": "\xff"}', b"[" * 100_000,
    b'{"a":' * 100_000, b'{"model": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 10_000 + b"}", b'{"model": "\\ud800"}', b"{'model': 1}", b'{"model": "x",}', b"\x00",
    b'{"model": "tiny", "model": 5}', b'{"temperature": -1e999, "model": "tiny"}',
]  # fmt: skip
HUGE = 10**4000
FIELDS: list[tuple[str, str, Any]] = [
    *((path, "model", value) for path in list(GOOD)[:4] for value in (None, 5, "", "gpt", [])),
    *((path, "unknown", 1) for path in GOOD),
    *((path, name, value) for path in (CHAT, COMPLETIONS, RESPONSES) for name, value in (
        ("temperature", -1), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.5),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("seed", 1 << 63), ("seed", HUGE), ("seed", 1.5),
        ("presence_penalty", 1e300), ("frequency_penalty", "x"), ("repetition_penalty", 0), ("penalty_window", 0),
        ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": 1e300}), ("logit_bias", {"264": 1}),
        ("logit_bias", {"9" * 50: 1}), ("logit_bias", [1]), ("logit_bias", {"²": 1}), ("typical_p", 0),
        ("xtc_threshold", 3),
        ("dry_base", 1e9), ("dry_allowed_length", 0), ("cache_salt", "x" * 2000), ("cache_salt", 5), ("stream", "yes"),
        ("stream_options", {"x": 1}),
    )),
    *((path, name, value) for path in (CHAT, COMPLETIONS) for name, value in (
        ("n", 0), ("n", 129), ("n", HUGE), ("n", True), ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 65),
        ("stop", "x" * 2000), ("stop", 5), ("stop", [5]), ("max_tokens", -1), ("max_tokens", 1.5), ("user", 5),
    )),
    *((CHAT, name, value) for name, value in (
        ("messages", []), ("messages", "x"), ("messages", [5]), ("messages", [{}]), ("messages", [{"role": "user"}, 5]),
        ("messages", [{"role": "king", "content": "x"}]), ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "x", "extra": 1}]), ("max_tokens", 0), ("logprobs", 5),
        ("max_completion_tokens", 0), ("top_logprobs", 21), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}), ("response_format", {"type": "grammar", "grammar": ""}),
        ("tools", [{"type": "function"}]), ("tools", [{"type": "web_search"}]), ("tool_choice", "must"),
        ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "nobody"}}),
        ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", 5), ("modalities", ["audio"]),
        ("continue_final_message", True), ("functions", []), ("reasoning_effort", 5),
    )),
    *((COMPLETIONS, "prompt", value) for value in (
        None, 5, [], [[]], [""][:0], ["x", 5], ["x", [1]], [1, "x"], [-1], [264], [HUGE], [1.5], [True], [[1], [264]],
        {"text": "x"}, "x" * 3000, ["x"] * 200, [[1] * 3000],
    )),
    *((COMPLETIONS, name, value) for name, value in (
        ("logprobs", 21), ("logprobs", True), ("best_of", 2), ("suffix", "x"), ("echo", "x"), ("max_tokens", None),
    ) if value is not None),
    *((RESPONSES, name, value) for name, value in (
        ("input", []), ("input", 5), ("input", [{"type": "item_reference", "id": "x"}]), ("max_output_tokens", 0),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("previous_response_id", "resp_1"), ("background", True), ("truncation", "auto"), ("conversation", "x"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}), ("tools", [{"type": "web_search"}]),
        ("tool_choice", {"type": "function", "name": "nobody"}), ("include", "x"), ("top_logprobs", 99),
    )),
    *((MESSAGES, name, value) for name, value in (
        ("max_tokens", None), ("max_tokens", 0), ("max_tokens", "5"), ("messages", []), ("system", 5),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}]), ("stop_sequences", "x"),
        ("messages", [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]),
        ("stop_sequences", [""]), ("temperature", -1), ("top_k", 1.5), ("tool_choice", {"type": "tool"}),
        ("tool_choice", {"type": "any"}), ("tool_choice", {"type": "auto", "name": "x"}), ("tools", [{"name": "x"}]),
        ("messages", [*HELLO, {"role": "assistant", "content": ""}]), ("thinking", 5),
    )),
    (COUNT, "messages", None), (COUNT, "max_tokens", 5), (TOKENIZE, "prompt", None), (TOKENIZE, "messages", HELLO),
    (TOKENIZE, "prompt", 5), (DETOKENIZE, "tokens", [264]), (DETOKENIZE, "tokens", [-1]), (DETOKENIZE, "tokens", "x"),
    (DETOKENIZE, "tokens", [HUGE]),
]  # fmt: skip
JSON = {"content-type": "application/json"}


def is_told(response: httpx.Response, path: str) -> None:
    """A clear error in the API's own form."""
    assert 400 <= response.status_code < 500, response.text
    body = response.json()
    assert len(body["error"]["message"]) > 10 and body["error"]["type"], body
    assert (body.get("type") == "error") == path.startswith("/v1/messages")


def test_bodies_that_are_no_requests(running: Running) -> None:
    with running.http() as client:
        for path in GOOD:
            for body in BODIES:
                is_told(client.post(path, content=body, headers=JSON), path)


def test_fields_that_do_not_fit(running: Running) -> None:
    with running.http() as client:
        for path, name, value in FIELDS:
            body = json.dumps({**GOOD[path], name: value}, default=str)
            response = client.post(path, content=body, headers=JSON)
            assert 400 <= response.status_code < 500, (path, name, str(value)[:80], response.text[:200])
            is_told(response, path)
    until(running.idle)


def test_what_is_good_is_good(running: Running) -> None:
    """Otherwise the tables above would show nothing."""
    with running.http() as client:
        for path, body in GOOD.items():
            assert client.post(path, json=body).status_code == 200, path
        large = {"temperature": 1e308, "top_k": HUGE, "max_tokens": HUGE, "stop": "x", "seed": -(1 << 63)}
        assert client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], **large}).status_code == 200
        small = {"temperature": 5e-324, "logit_bias": {"5": -100, "6": 1e4}, "penalty_window": HUGE, "min_p": 1}
        assert client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], **small}).status_code == 200


def test_paths_and_methods(running: Running) -> None:
    with running.http() as client:
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1", 404),
            ("GET", "/%ff", 404),
            ("DELETE", "/v1/models/tiny", 405), ("GET", "/v1/models/gpt", 404), ("POST", "/v1/messages/batches", 404),
            ("GET", "/v1/models/%ff%00", 404), ("GET", "/..%2f..%2fetc/passwd", 404),
        ):  # fmt: skip
            response = client.request(method, path)
            assert response.status_code == status, (method, path, response.text)
            assert response.json()["error"]["message"]
        assert client.head("/health").status_code == 200


def test_messages_say_what_was_given(running: Running) -> None:
    told = running.post(CHAT, {**GOOD[CHAT], "messages": [{"role": "user", "content": "x"}, {"role": "king"}]}).json()
    assert told["error"]["param"] == "messages.1.role" and "'king'" in told["error"]["message"]
    told = running.post(COMPLETIONS, {**GOOD[COMPLETIONS], "temprature": 1}).json()
    assert told["error"]["param"] == "temprature" and told["error"]["code"] == "unknown_field"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_anything_else(running: Running, data: st.DataObject) -> None:
    """A good request with some of its fields, and others that are known, made into anything."""
    path = data.draw(st.sampled_from(list(GOOD)))
    known = sorted({name for p, name, _ in FIELDS if p == path} | GOOD[path].keys())
    changes = data.draw(st.dictionaries(st.sampled_from(known), values, max_size=3))
    body = {**GOOD[path], **changes}
    with running.http() as client:
        response = client.post(path, content=json.dumps(body), headers=JSON)
    if response.status_code != 200:
        is_told(response, path)
