"""Grammars in which a reply is a call: for tool_choice "required" or a function's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from exactkv.errors import InputError
from exactkv.generation.structure import Structure
from exactkv.generation.structure.structure import WHITESPACE
from exactkv.generation.tools.formats import ToolFormat

Functions = Mapping[str, Mapping[str, Any]]
"""Name -> JSON schema of the arguments."""

PYTHON_VALUES = r"""
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
STRING: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
"""
SIMPLE = {"string": "STRING", "integer": "INTEGER", "number": "NUMBER", "null": '"None"', "object": "dict",
          "boolean": '("True" | "False")'}  # fmt: skip


def forced_call(format: ToolFormat, tools: Functions, choice: str | Mapping[str, Any], after: str) -> Structure:
    """See `ToolFormat.structure`."""
    if format.forced is None:
        raise InputError(f"the format {format.name!r} knows no calls, so that none can be asked for")
    chosen = _chosen(tools, choice)
    several = choice in ("required", "any")
    start, rules, tokens = MAKERS[format.forced](chosen, several)
    if format.begins_reasoning(after) and format.reasoning is not None:
        start = f"reasoning {start}"
        tokens = (*tokens, ("until_answer", format.reasoning[1]))
        rules = [*rules, r"reasoning: until_answer /\s{0,4}/"]
    return Structure("grammar", "\n".join([f"start: {start}", *rules]), tokens)


def _chosen(tools: Functions, choice: str | Mapping[str, Any]) -> Functions:
    if not tools:
        raise InputError("there are no tools, so that none can be called; give tools, or ask for no call")
    if choice in ("required", "any"):
        return tools
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if name not in tools:
        raise InputError(f'the tool choice is {choice!r}; expected "required" or one of: {", ".join(tools)}')
    return {str(name): tools[str(name)]}


Made = tuple[str, list[str], tuple[tuple[str, str], ...]]
"""What ``start`` is, other rules, and the tokens that they name."""


def _json(tools: Functions, key: str) -> dict[str, Any]:
    """A schema of {"name": ..., key: {...}}."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: _object(schema)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}


def _llama(tools: Functions, several: bool) -> Made:
    return "call", [f"call: %json {_dumped(_json(tools, 'parameters'))}"], ()


def _hermes(tools: Functions, several: bool) -> Made:
    rules = [r'call: opens "\n" value "\n" closes', f"value: %json {_dumped(_json(tools, 'arguments'))}"]
    return r'call ("\n" call)*' if several else "call", rules, (("opens", "<tool_call>"), ("closes", "</tool_call>"))


def _mistral(tools: Functions, several: bool) -> Made:
    calls = {"type": "array", "items": _json(tools, "arguments"), "minItems": 1}
    calls |= {} if several else {"maxItems": 1}
    return "opens value", [f"value: %json {_dumped(calls)}"], (("opens", "[TOOL_CALLS]"),)


def _mistral_args(tools: Functions, several: bool) -> Made:
    names = [f"opens {json.dumps(name)} follows value_{i}" for i, name in enumerate(tools)]
    values = [f"value_{i}: %json {_dumped(_object(schema))}" for i, schema in enumerate(tools.values())]
    rules = [f"call: {' | '.join(names)}", *values]
    return "call+" if several else "call", rules, (("opens", "[TOOL_CALLS]"), ("follows", "[ARGS]"))


def _harmony(tools: Functions, several: bool) -> Made:
    heads = [f"{json.dumps(f'commentary to=functions.{name} ')} json value_{i}" for i, name in enumerate(tools)]
    values = [f"value_{i}: %json {_dumped(_object(schema))}" for i, schema in enumerate(tools.values())]
    rules = [
        r'analysis: channel "analysis" message until_end starts "assistant"',
        'json: constrain "json" message',
        f"call: channel ({' | '.join(heads)})",
        *values,
    ]
    names = ("channel", "message", "constrain")
    tokens = (*((name, f"<|{name}|>") for name in names), ("until_end", "<|end|>"), ("starts", "<|start|>"))
    return "analysis? call", rules, tokens


def _pythonic(tools: Functions, several: bool) -> Made:
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (name, schema) in enumerate(tools.items()):
        rules += _python_call(f"call_{i}", name, schema)
    return '"[" call (", " call)* "]"' if several else '"[" call "]"', [*rules, PYTHON_VALUES], ()


def _python_call(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """The arguments that are required come first, then any of the others, in the schema's order."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [key for key in schema.get("required", ()) if key in properties]
    others = [key for key in properties if key not in required]
    for key in properties:
        if not key.isidentifier():
            raise InputError(f"the tool {name!r} has the argument {key!r}, which no call in Python can name")
    argument = {key: f"{json.dumps(key + '=')} {_python_value(properties[key])}" for key in properties}
    always = ' ", " '.join(f"{argument[key]}" for key in required)
    rules, rest = [], f"{rule}_rest"
    if required:
        inner = " ".join([always, *(f'(", " {argument[key]})?' for key in others)])
    else:  # the first of those given has no comma before it
        chains = [
            " ".join([argument[key], *(f'(", " {argument[later]})?' for later in others[at + 1 :])])
            for at, key in enumerate(others)
        ]
        rules = [f"{rest}: {' | '.join(chains)}"] if chains else []
        inner = f"{rest}?" if chains else ""
    return [f'{rule}: {json.dumps(name + "(")} {inner} ")"', *rules]


def _python_value(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "value"
    if isinstance(schema.get("enum"), Sequence) and schema["enum"]:
        return "(" + " | ".join(json.dumps(_as_python(option)) for option in schema["enum"]) + ")"
    kind = schema.get("type")
    if kind == "array":
        item = _python_value(schema.get("items"))
        return f'("[" ({item} (", " {item})*)? "]")'
    return SIMPLE.get(kind, "value") if isinstance(kind, str) else "value"


def _as_python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _dumped(schema: Mapping[str, Any]) -> str:
    """A schema for ``%json``, with the white space of `Structure.json_schema`."""
    try:
        content = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the parameters of a tool are no JSON schema: {error}") from None


MAKERS = {"json": _llama, "hermes": _hermes, "mistral": _mistral, "mistral_args": _mistral_args,
          "harmony": _harmony, "pythonic": _pythonic}  # fmt: skip
