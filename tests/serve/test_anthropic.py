"""The `anthropic` package against a real server."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from exactkv.generation import Sampling, generate
from exactkv.models.model import Model
from tests.serve.conftest import NAME, Running

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}  # which newer versions of the package have no argument for
TEMPLATED = [{"role": "system", "content": "Be kind."}, *HELLO]


def test_messages(running: Running, model: Model) -> None:
    sampling = Sampling(temperature=0.8, top_k=50, seed=3)
    (expected,) = generate(model, [{"prompt": TEMPLATED}], max_tokens=30, sampling=sampling)
    client = running.anthropic()
    asked: dict[str, Any] = {
        "model": NAME, "max_tokens": 30, "extra_body": {"seed": 3, "temperature": 0.8, "top_k": 50},
    }  # fmt: skip
    reason = {"length": "max_tokens", "stop": "end_turn"}[expected.finish_reason]
    got = client.messages.create(system="Be kind.", messages=HELLO, **asked)
    assert "".join(block.text for block in got.content) == expected.text
    assert got.stop_reason == reason and got.role == "assistant" and got.stop_sequence is None
    assert got.usage.output_tokens == len(expected.tokens)
    blocks = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(
        system=[{"type": "text", "text": "Be kind."}], messages=[{"role": "user", "content": blocks}], **asked
    ) as stream:
        assert "".join(stream.text_stream) == expected.text
        final = stream.get_final_message()
    assert final.stop_reason == reason and final.usage.output_tokens == len(expected.tokens)
    prompt = len(model.tokenizer.apply_chat_template(TEMPLATED))
    assert final.usage.cache_read_input_tokens == prompt - 1 and final.usage.input_tokens == 1
    counted = client.messages.count_tokens(model=NAME, system="Be kind.", messages=HELLO)
    assert counted.input_tokens == prompt


def test_stop_sequences(running: Running, model: Model) -> None:
    (whole,) = generate(model, [{"prompt": HELLO}], max_tokens=40)
    end = next(whole.text[i] for i in range(2, len(whole.text)) if whole.text.index(whole.text[i]) == i)
    got = running.anthropic().messages.create(
        model=NAME, max_tokens=40, extra_body=GREEDY, messages=HELLO, stop_sequences=["never said", end]
    )
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", end)
    assert "".join(block.text for block in got.content) == whole.text[: whole.text.index(end)]


def test_an_assistants_message_is_gone_on_with(running: Running, model: Model) -> None:
    prompt = model.tokenizer.encode("user:Hello\nassistant:It is", add_special_tokens=False)
    (expected,) = generate(model, [prompt], max_tokens=10)
    got = running.anthropic().messages.create(
        model=NAME, max_tokens=10, extra_body=GREEDY, messages=[*HELLO, {"role": "assistant", "content": "It is "}]
    )
    assert "".join(block.text for block in got.content) == expected.text


def test_errors_are_the_packages_own(running: Running) -> None:
    client = running.anthropic()
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'") as missing:
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.body["type"] == "error"
    assert missing.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as wrong:
        client.messages.create(model=NAME, max_tokens=0, messages=HELLO)
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model=NAME, max_tokens=5, messages=[{"role": "user", "content": [image]}])
