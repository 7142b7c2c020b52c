"""A reply that must be a call is one, in every format, with markers as special tokens and as text."""

from __future__ import annotations

import json

import pytest

from exactkv.errors import InputError
from exactkv.generation import Sampling, stream
from exactkv.generation.structure import Matcher
from exactkv.generation.tools import FORMATS, ReasoningEvent, ToolCallArguments, ToolCallStart, joined
from exactkv.models.tokenizer import Tokenizer
from tests.generation.tiny_text import byte_backend, text_model

FORCED = sorted(name for name, made in FORMATS.items() if made.forced)
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>"]  # as many as the model has rows for
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}, "city": {"enum": ["Rome", "O\"slo"]},
                       "units": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"name": "opt", "parameters": {"type": "object", "additionalProperties": False, "properties": {
        "a": {"type": "boolean"}, "b": {"enum": [1, None]}}}},
]  # fmt: skip


def model_with(markers):
    backend = byte_backend()
    if markers:
        backend.add_special_tokens(MARKERS)
    return text_model(tokenizer=Tokenizer(backend, bos_token_id=256, eos_token_ids=[257]))


def calls_of(name, choice, seed, markers, after=""):
    format = FORMATS[name]
    sampling = Sampling(temperature=4.0, seed=seed, logit_bias=dict.fromkeys(range(60, 94), 3.0))
    reply = stream(
        model_with(markers), "x", 200, sampling, structure=format.structure(TOOLS, choice, after),
        show_special_tokens=True,
    )  # fmt: skip
    parser = format.parser(TOOLS, after=after, seed="s")
    events = [event for piece in reply for event in parser.feed(piece.text)]
    events = joined([*events, *parser.finish()])
    if reply.finish_reason == "length":
        return None
    assert all(isinstance(e, ToolCallStart | ToolCallArguments | ReasoningEvent) for e in events), parser.raw
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    arguments = [json.loads(e.text) for e in events if isinstance(e, ToolCallArguments)]
    return [(s.name, a) for s, a in zip(starts, arguments, strict=True)]


def check(name, arguments):
    if name == "weather":
        assert {"city"} <= arguments.keys() <= {"days", "city", "units"}
        assert arguments["city"] in ("Rome", 'O"slo') and isinstance(arguments.get("days", 0), int)
        assert all(isinstance(unit, bool) for unit in arguments.get("units", []))
    elif name == "opt":
        assert arguments.keys() <= {"a", "b"} and arguments.get("b", 1) in (1, None)
    else:
        assert name == "now" and arguments == {}


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("name", FORCED)
def test_a_named_function_is_called_once(name, markers):
    made = [calls_of(name, choice, seed, markers) for seed in range(2) for choice in ("weather", "opt", "now")]
    done = [calls for calls in made if calls is not None]
    assert len(done) >= (1 if name == "harmony" else 4)  # a harmony reply may think first, and long
    for calls in done:
        ((called, arguments),) = calls
        check(called, arguments)
    assert name == "harmony" or {calls[0][0] for calls in done} == {"weather", "opt", "now"}


@pytest.mark.parametrize("name", FORCED)
def test_where_a_call_is_required_any_may_be_made(name):
    made = [calls_of(name, "required", seed, True) for seed in range(6)]
    done = [calls for calls in made if calls is not None]
    assert done
    for calls in done:
        assert calls
        for call in calls:
            check(*call)
    assert len({calls[0][0] for calls in done}) > 1


def test_a_reasoning_that_the_prompt_began_comes_first():
    tokenizer = model_with(False).tokenizer
    structure = FORMATS["hermes"].structure(TOOLS, "now", after="<think>\n")
    matcher = Matcher(structure, tokenizer, 264, [257])

    def may_follow(text, character):
        matcher.follow(tokenizer.encode(text, add_special_tokens=False))
        return bool(matcher.mask()[tokenizer.encode(character, add_special_tokens=False)[0]])

    assert may_follow("", "z") and may_follow("hm <tool_call>", "z")
    assert may_follow("hm</think>", "<") and may_follow("hm</think>\n\n<tool_call>\n", "{")
    assert not may_follow("hm</think>\n\n<tool_call>\n", "z")
    assert may_follow('hm</think>\n<tool_call>\n{"name":"now","arguments":{', "}")


def test_what_cannot_be_asked_for_is_refused():
    hermes = FORMATS["hermes"]
    with pytest.raises(InputError, match="weather, now, opt"):
        hermes.structure(TOOLS, "rain")
    with pytest.raises(InputError, match="no tools"):
        hermes.structure([], "required")
    with pytest.raises(InputError, match="knows no calls"):
        FORMATS["think"].structure(TOOLS)
    with pytest.raises(InputError, match="refused"):
        hermes.structure([{"name": "f", "parameters": {"properties": {"a": {"type": "flower"}}}}])
    with pytest.raises(InputError, match="Python can name"):
        FORMATS["pythonic"].structure([{"name": "f", "parameters": {"properties": {"a-b": {}}}}])
    assert hermes.structure(TOOLS, {"type": "function", "function": {"name": "now"}}) == hermes.structure(TOOLS, "now")
