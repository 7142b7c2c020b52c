"""Replies of a form, and calls of tools, end to end: the formats' own tests are in tests/generation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from exactkv.generation import Sampling, Structure, generate
from exactkv.models.model import Model
from tests.generation.tiny_text import END, TEMPLATE, byte_tokenizer, scripted, text_model
from tests.serve.conftest import NAME, Running, until

Start = Callable[..., Running]
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "array", "items": {"type": "boolean"},
                                                                "maxItems": 2}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
HERMES = TEMPLATE + "{# tools are called in <tool_call> and </tool_call>, thoughts are in <think> #}"


def is_of_schema(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"city", "days"} and value["city"] in ("Köln", "Bonn")
    assert len(value["days"]) <= 2 and all(isinstance(day, bool) for day in value["days"])


@pytest.fixture(scope="module")
def hermes() -> Model:
    """A random model whose template says how tools are called."""
    return text_model(tokenizer=byte_tokenizer(HERMES))


def test_replies_are_of_the_schema(running: Running, model: Model) -> None:
    """What `generate` gives with the same structure and seed, in each API."""
    client = running.openai()
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        sampling = Sampling(temperature=1, seed=seed)
        prompt = {"prompt": ASK, "structure": Structure.json_schema(SCHEMA)}
        (expected,) = generate(model, [prompt], max_tokens=80, sampling=sampling)
        is_of_schema(expected.text)
        chat = client.chat.completions.create(
            model=NAME, messages=ASK, max_tokens=80, seed=seed, response_format=wanted
        )
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (expected.text, "stop")
        flat: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        told = client.responses.create(
            model=NAME, input=ASK, max_output_tokens=80, text=flat, extra_body={"seed": seed}
        )
        assert told.output_text == expected.text and told.status == "completed"
        assert told.text.format.type == "json_schema"
        body = {"model": NAME, "messages": ASK, "max_tokens": 80, "seed": seed,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}  # fmt: skip
        got = running.post("/v1/messages", body).json()
        assert got["content"] == [{"type": "text", "text": expected.text}]


def test_other_forms(running: Running) -> None:
    def said(form: dict[str, Any]) -> str:
        body = {"model": NAME, "messages": ASK, "max_tokens": 300, "seed": 2, "response_format": form}
        return str(running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

    assert re.fullmatch("(ab|cd){3}x", said({"type": "regex", "regex": "(ab|cd){3}x"}))
    assert re.fullmatch("(yes|no)!", said({"type": "grammar", "grammar": 'start: ("yes" | "no") "!"'}))
    assert said({"type": "json_object"}).startswith("{")


@pytest.mark.parametrize(
    "form",
    [{"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, {"type": "regex", "regex": "("},
     {"type": "grammar", "grammar": "start: what"}, {"type": "regex", "regex": "(?=a)b"},
     {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.org/x"}}}],
)  # fmt: skip
def test_forms_that_are_none(running: Running, form: dict[str, Any]) -> None:
    response = running.post("/v1/chat/completions", {"model": NAME, "messages": ASK, "response_format": form})
    assert response.status_code == 400 and "refused" in response.json()["error"]["message"], response.text


def test_a_model_without_a_format_takes_no_tools(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="shows no format of calls"):
        running.openai().chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
    running.openai().chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=2)


def test_calls_that_must_be_made(start: Start, hermes: Model) -> None:
    server = start(model_=hermes)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    spaces = hermes.tokenizer.encode(" \n\r\t", add_special_tokens=False)  # of which JSON may have any number
    bias = {str(END): 100, **{str(token): -100 for token in spaces}}  # it ends as soon as it may
    create = server.openai().chat.completions.create
    for choice in ("required", named):
        got = create(
            model=NAME, messages=ASK, tools=TOOLS, tool_choice=choice, max_tokens=900, seed=3,
            logit_bias=bias,
        )  # fmt: skip
        calls = got.choices[0].message.tool_calls
        assert got.choices[0].finish_reason == "tool_calls" and calls[0].function.name == "weather"
        is_of_schema(calls[0].function.arguments)
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    message = server.anthropic().messages.create(
        model=NAME,
        max_tokens=900,
        messages=ASK,
        tools=tools,
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"temperature": 50, "seed": 1},  # else it writes spaces without end
    )
    assert message.stop_reason == "tool_use" and message.content[-1].name == "weather"
    both = {"model": NAME, "messages": ASK, "tools": TOOLS, "tool_choice": "required",
            "response_format": {"type": "json_object"}}  # fmt: skip
    assert server.post("/v1/chat/completions", both).status_code == 400
    until(server.idle)


def test_calls_that_the_model_makes(start: Start) -> None:
    said = '<think>Far?</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    model = scripted(said, END)
    model.tokenizer.chat_template = HERMES
    model.script = list(model.script) * 3
    create = start(model_=model).openai().chat.completions.create
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "tools": TOOLS, "temperature": 0}
    message = create(**asked).choices[0].message
    assert message.content == "I look." and message.model_extra["reasoning_content"] == "Far?"
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [("weather", '{"city": "Köln"}')]
    chunks = [c.choices[0] for c in create(**asked, stream=True)]
    assert "".join(c.delta.content or "" for c in chunks) == "I look." and chunks[-1].finish_reason == "tool_calls"
    plain = create(model=NAME, messages=ASK, temperature=0).choices[0]
    assert plain.finish_reason == "stop" and plain.message.tool_calls is None
    assert plain.message.content == said.removeprefix("<think>Far?</think>")
