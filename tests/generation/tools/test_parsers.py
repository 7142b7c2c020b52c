"""Replies told apart: text, reasoning, calls; and that it does not matter how they come in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation.tools import (
    FORMATS,
    ReasoningEvent,
    TextEvent,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
    joined,
)

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g_2", "a.b")
]


def told(name, reply, tools=TOOLS, after=""):
    """What a parser tells of a whole reply, short: ("text", …), ("think", …), ("call", name, arguments)."""
    parser = FORMATS[name].parser(tools, after=after, seed="s")
    events = joined([*parser.feed(reply), *parser.finish()])
    assert parser.raw == reply
    return short(events)


def short(events):
    out = []
    for event in events:
        if isinstance(event, TextEvent):
            out.append(("text", event.text))
        elif isinstance(event, ReasoningEvent):
            out.append(("think", event.text))
        elif isinstance(event, ToolCallStart):
            out.append(("call", event.name, ""))
            assert event.index == sum(e[0] == "call" for e in out) - 1 and event.id
        elif isinstance(event, ToolCallArguments):
            out[-1] = (*out[-1][:2], out[-1][2] + event.text)
    return out


H = "<|channel|>"
CASES = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1.50}}\n</tool_call>', [("call", "f", '{"x": 1.50}')]),
    ("hermes", 'Hi <tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g_2"}</tool_call>\nBye',
     [("text", "Hi "), ("call", "f", "{}"), ("call", "g_2", "{}"), ("text", "Bye")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"s":"a</tool_call>\\"b"}}</tool_call>',
     [("call", "f", '{"s":"a</tool_call>\\"b"}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [("call", "f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"unknown","arguments":{}}</tool_call>',
     [("text", '<tool_call>{"name":"unknown","arguments":{}}</tool_call>')]),
    ("hermes", '<tool_call>oops <tool_call>{"name":"f"}</tool_call>',
     [("text", "<tool_call>oops "), ("call", "f", "{}")]),
    ("hermes", 'a<tool_call>{"name":"f","argum', [("text", 'a<tool_call>{"name":"f","argum')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}} extra</tool_call>',
     [("text", '<tool_call>{"name":"f","arguments":{}} extra</tool_call>')]),
    ("hermes", '<think>\nhm <tool_call>\n</think>\n\n<tool_call>{"name":"f"}</tool_call>',
     [("think", "hm <tool_call>\n"), ("call", "f", "{}")]),
    ("hermes", "<think>never done", [("think", "never done")]),
    ("hermes", "A <think> in the middle </think>", [("text", "A <think> in the middle </think>")]),
    ("hermes", "a < b <tool", [("text", "a < b <tool")]),
    ("hermes", '{"name": "f", "arguments": {}}', [("text", '{"name": "f", "arguments": {}}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}, {"name": "g_2", "arguments": {}}]',
     [("call", "f", '{"x": [1]}'), ("call", "g_2", "{}")]),
    ("mistral", 'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, {"name": "g_2"',
     [("text", 'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, {"name": "g_2"')]),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g_2[CALL_ID]abc[ARGS]{}',
     [("call", "f", '{"a": "[TOOL_CALLS]"}'), ("call", "g_2", "{}")]),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g_2[ARGS]{"b', [
        ("call", "f", '{"a": 1}'), ("text", '[TOOL_CALLS]g_2[ARGS]{"b')]),
    ("mistral_args", "[THINK]so[/THINK]then", [("think", "so"), ("text", "then")]),
    ("llama3_json", '{"name": "f", "parameters": {"x": "é"}}', [("call", "f", '{"x": "é"}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g_2", "parameters": {"y": null}}',
     [("call", "f", "{}"), ("call", "g_2", '{"y": null}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("call", "f", "{}")]),
    ("llama3_json", '{"name": "h", "parameters": {}}', [("text", '{"name": "h", "parameters": {}}')]),
    ("llama3_json", '{"answer": 42}', [("text", '{"answer": 42}')]),
    ("llama3_json", '{"name": "f", "parameters": {"x"', [("text", '{"name": "f", "parameters": {"x"')]),
    ("llama3_json", 'Call {"name": "f"}', [("text", 'Call {"name": "f"}')]),
    ("pythonic", "[f(x=1, y='z\\n', w=[True, null]), a.b()]",
     [("call", "f", '{"x": 1, "y": "z\\n", "w": [true, null]}'), ("call", "a.b", "{}")]),
    ("pythonic", '<|python_start|>[g_2(a={"b": true})]<|python_end|>', [("call", "g_2", '{"a": {"b": true}}')]),
    ("pythonic", "[f(1)]", [("text", "[f(1)]")]),
    ("pythonic", "[f(x=__import__('os'))]", [("text", "[f(x=__import__('os'))]")]),
    ("pythonic", "[f(x=1e999)]", [("text", "[f(x=1e999)]")]),
    ("pythonic", "[1, 2, 3]", [("text", "[1, 2, 3]")]),
    ("pythonic", "[f(x=1), ", [("text", "[f(x=1), ")]),
    ("pythonic", '{"name": "f", "parameters": {}}', [("call", "f", "{}")]),
    ("harmony", f"{H}analysis<|message|>hm<|end|><|start|>assistant{H}final<|message|>yes<|return|>",
     [("think", "hm"), ("text", "yes")]),
    ("harmony", f'{H}analysis<|message|>hm<|end|><|start|>assistant{H}commentary to=functions.f <|constrain|>json'
                '<|message|>{"x": 1}<|call|>', [("think", "hm"), ("call", "f", '{"x": 1}')]),
    ("harmony", f'{H}commentary<|message|>First.<|end|><|start|>assistant to=functions.g_2{H}commentary json'
                '<|message|>{}', [("text", "First."), ("call", "g_2", "{}")]),
    ("harmony", f'{H}commentary to=functions.f<|message|>{{"x": ',
     [("text", f'{H}commentary to=functions.f<|message|>{{"x": ')]),
    ("harmony", f"{H}commentary to=functions.f<|message|>", [("text", f"{H}commentary to=functions.f<|message|>")]),
    ("harmony", f"{H}commentary to=fun", [("text", f"{H}commentary to=fun")]),
    ("harmony", f"{H}analysis<|message|>a{H}final<|message|>b", [("think", "a"), ("text", "b")]),
    ("harmony", "plain text", [("text", "plain text")]),
    ("think", "<think>\nso</think>\n\nyes <tool_call>", [("think", "so"), ("text", "yes <tool_call>")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reply", "expected"), CASES)
def test_what_a_reply_says(name, reply, expected):
    assert told(name, reply) == expected


ALPHABET = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "[",
    '{"name": "f", "arguments": {"a": "x"}}', '{"name": "g_2", "parameters": {}}', "f(x=1)", ", ", "; ", '"', "\\",
    "]", "\n", " ", "text", "é<", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>",
    "<|call|>", "<|start|>", "assistant", "<|", "[THINK]", "[/THINK]", "<|python_start|>", "<|python_end|>", "<|end|>",
]  # fmt: skip
replies = st.one_of(
    st.sampled_from([reply for _, reply, _ in CASES]), st.lists(st.sampled_from(ALPHABET), max_size=14).map("".join)
)


@settings(max_examples=400)
@given(st.sampled_from(sorted(FORMATS)), replies, st.data())
def test_pieces_do_not_matter(name, reply, data):
    format = FORMATS[name]
    whole = format.parser(TOOLS, seed="s")
    expected = joined([*whole.feed(reply), *whole.finish()])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(reply)), max_size=12)))
    if data.draw(st.booleans()):
        cuts = list(range(len(reply)))
    parser = format.parser(TOOLS, seed="s")
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
        events += parser.feed(reply[start:end])
    events += parser.finish()
    assert joined(events) == expected
    assert parser.raw == reply and parser.finish() == []
    nothing_lost(reply, expected)


def nothing_lost(reply, events):
    """What was told stands in the reply, in this order; where nothing can be a call or reasoning, it is the reply."""
    rest = iter(reply)
    for event in events:
        if isinstance(event, TextEvent | ReasoningEvent):
            assert all(character in rest for character in event.text)
        elif isinstance(event, ToolCallArguments):
            assert isinstance(json.loads(event.text), dict)
    markers = [m for m in ALPHABET if m[:1] in "<[" and m in reply and len(m) > 1]
    if not markers and all(isinstance(e, TextEvent) for e in events):
        assert "".join(e.text for e in events) == reply


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_call_cut_anywhere_is_told_as_text(cut):
    reply = '<tool_call>\n{"name": "f", "arguments": {"x": "<"}}\n</tool_call>'[:-1][:cut]
    assert told("hermes", reply) == [("text", reply)]


def test_text_comes_at_once_and_calls_when_they_are_whole():
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.feed("Hello") == [TextEvent("Hello")]
    assert parser.feed(" <tool") == [TextEvent(" ")]
    assert parser.feed("box>") == [TextEvent("<toolbox>")]
    assert parser.feed('<tool_call>{"name": "f"}</tool_call') == []
    start, arguments = parser.feed(">")
    assert isinstance(start, ToolCallStart) and arguments == ToolCallArguments(0, "{}")
    think = FORMATS["hermes"].parser(TOOLS, after="<|im_start|>assistant\n<think>\n")
    assert think.feed("so") == [ReasoningEvent("so")]
    assert think.feed("</think>\n") == [] and think.feed("x") == [TextEvent("x")]


def test_ids_differ_and_suit_the_format():
    reply = '[TOOL_CALLS][{"name": "f"}, {"name": "f"}]'
    ids = []
    for _ in range(2):
        events = FORMATS["mistral"].parser(None).feed(reply)
        parser = FORMATS["mistral"].parser(None)
        events = [*parser.feed(reply), *parser.finish()]
        ids += [e.id for e in events if isinstance(e, ToolCallStart)]
    assert len(set(ids)) == 4 and all(len(i) == 9 and i.isalnum() for i in ids)


def test_without_tools_any_name_may_be_called_and_bare_replies_are_text():
    assert told("hermes", '<tool_call>{"name": "any"}</tool_call>', None) == [("call", "any", "{}")]
    assert told("llama3_json", '{"name": "any", "parameters": {}}', None)[0][0] == "text"
    assert told("hermes", '<tool_call>{"name": "any"}</tool_call>', [])[0][0] == "text"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral_args"),
        ("{% for t in tools %} <|start_header_id|> \"parameters\": <|python_tag|>", "llama3_json"),
        ("<|header_start|> [func_name1(params_name1=params_value1)] tools", "pythonic"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("{{ '<think>' }}", "think"),
        ("{{ message.content }}", None),
        ("hermes", "hermes"),
        (None, None),
    ],
)  # fmt: skip
def test_the_format_shows_in_the_template(template, name):
    found = ToolFormat.of(template)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("tools", ["f", {"name": "f"}, [1], [{"function": {}}], [{"name": "f", "parameters": 3}],
                                   [{"name": "f"}, {"name": "f"}]])  # fmt: skip
def test_what_are_no_tools_is_refused(tools):
    with pytest.raises(InputError):
        FORMATS["hermes"].parser(tools)
    with pytest.raises(InputError, match="there are: hermes"):
        ToolFormat.of("hermess")
