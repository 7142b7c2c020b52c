"""What is read from a reply's text, as each API tells it: reasoning, tool calls, text; parsed by the real packages.

The reader here takes a notation of its own: <think>...</think>, and <call name>{...}</call>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exactkv.errors import InputError
from exactkv.generation.tools import Event, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from exactkv.models.model import Model
from exactkv.serve.errors import Refusal
from exactkv.serve.structure import Form, check
from tests.generation.tiny_text import END, scripted
from tests.serve.conftest import NAME, Running

SAID = '<think>Is it far?</think>I look.<call weather>{"city": "Köln"}</call><call time>{}</call>'
PARTS = re.compile(r"<think>(.*?)</think>|<call (\w+)>(.*?)</call>|([^<]+)", re.DOTALL)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]


class Marked:
    """Reads the notation; what it says comes a character at a time."""

    def __init__(self) -> None:
        self._text, self._done, self._calls = "", 0, 0

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while found := PARTS.match(self._text, self._done):
            self._done = found.end()
            thought, name, arguments, said = found.groups()
            if thought is not None:
                events += [ReasoningEvent(c) for c in thought]
            elif name is not None:
                events.append(ToolCallStart(self._calls, f"call_{self._calls}", name))
                events += [ToolCallArguments(self._calls, c) for c in arguments]
                self._calls += 1
            else:
                events += [TextEvent(c) for c in said]
        return events

    def finish(self) -> list[Event]:
        assert self._done == len(self._text)
        return []


@pytest.fixture
def calling(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose model says SAID once, with the seam as it is when all is supported."""
    monkeypatch.setattr("exactkv.serve.replies.reader", lambda model, form, prompt: Marked())
    for module in ("openai.chat", "openai.responses", "anthropic.messages"):
        monkeypatch.setattr(f"exactkv.serve.{module}.check", lambda model, form: None)
    model = scripted(SAID, END)
    model.script = list(model.script) * 2
    yield start(model_=model)


def test_chat_completions(calling: Running) -> None:
    create = calling.openai().chat.completions.create
    got = create(model=NAME, messages=ASK, tools=TOOLS, temperature=0).choices[0]
    assert got.finish_reason == "tool_calls" and got.message.content == "I look."
    assert got.message.model_extra["reasoning_content"] == "Is it far?"
    calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in got.message.tool_calls]
    assert calls == [("call_0", "weather", {"city": "Köln"}), ("call_1", "time", {})]
    with calling.openai().chat.completions.stream(
        model=NAME, messages=ASK, tools=TOOLS, temperature=0, logprobs=True
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in final.message.tool_calls] == calls
    thoughts = [e.chunk.choices[0].delta.model_extra.get("reasoning_content") for e in events if e.type == "chunk"]
    assert "".join(t for t in thoughts if t) == "Is it far?"
    said = [t.token for t in final.logprobs.content]
    assert len(said) == len(SAID.encode()) + 1 and said[-1] == "<end>"


def test_responses(calling: Running) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": NAME, "input": ASK, "tools": tools, "temperature": 0}
    got = calling.openai().responses.create(**asked)
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert got.output[0].content[0].text == "Is it far?" and got.output_text == "I look."
    assert got.status == "completed" and json.loads(got.output[2].arguments) == {"city": "Köln"}
    assert all(item.status == "completed" for item in got.output)
    with calling.openai().responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in got.output]
    assert (final.output[2].name, final.output[2].arguments) == ("weather", '{"city": "Köln"}')
    assert final.output_text == "I look." and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4


def test_messages(calling: Running) -> None:
    tools: list[Any] = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "tools": tools, "max_tokens": 200}
    asked["extra_body"] = {"temperature": 0}
    got = calling.anthropic().messages.create(**asked)
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert got.stop_reason == "tool_use" and got.content[0].thinking == "Is it far?"
    assert got.content[2].input == {"city": "Köln"} and got.content[3].input == {}
    with calling.anthropic().messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in got.content]
    assert final.stop_reason == "tool_use"


def test_what_was_called_comes_back(running: Running, model: Model) -> None:
    """A round of tools as each API writes it comes to the same prompt."""
    rounds: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": [
                *ASK,
                {"role": "assistant", "content": "I look.", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ],
            "tools": TOOLS, "tool_choice": "none", "max_tokens": 1,
        },
        "/v1/responses": {
            "input": [
                *ASK, {"role": "assistant", "content": "I look."},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "max_output_tokens": 1,
        },
        "/v1/messages": {
            "messages": [
                *ASK,
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
            ],
            "max_tokens": 1,
        },
    }  # fmt: skip
    written = "user:Weather?\nassistant:I look.\ntool:rain\nassistant:"
    expected = len(model.tokenizer.encode(written, add_special_tokens=False))
    for path, body in rounds.items():
        usage = running.post(path, {"model": NAME, **body}).json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        assert usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached) == expected, path


def test_what_a_form_may_be(model: Model) -> None:
    tools = tuple(TOOLS)
    check(model, Form(tools=tools, choice="none"))
    for form, said in (
        (Form(choice="required"), "there are no tools"), (Form(choice="named", name="x", tools=tools), "weather, time"),
        (Form(tools=(*tools, *tools)), "the same name"),
    ):  # fmt: skip
        with pytest.raises((Refusal, InputError), match=said):
            check(model, form)
