"""How models write calls: readers from the text of some calls to names and arguments.

A reader returns the calls that a text begins with, and the rest, which is none; without a call, the rest is all of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from exactkv.errors import InputError

DECODER = json.JSONDecoder()
SPACES = re.compile(r"[ \t\r\n]*")
MISTRAL_NAME = re.compile(r"(?:\[TOOL_CALLS\])?\s*([\w.:/-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*")


class Call(NamedTuple):
    """``arguments``: the text of a JSON object."""

    name: str
    arguments: str


Names = Collection[str] | None
"""Of the tools that there are; None: any name may be called."""
Read = tuple[list[Call], str]
Reader = Callable[[str, Names], Read]


def functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON schema of the arguments, from tools as OpenAI's or Anthropic's API writes them. Raises InputError
    where they are not."""
    found: dict[str, Mapping[str, Any]] = {}
    if isinstance(tools, str | Mapping):
        raise InputError(f"tools is a {type(tools).__name__}; expected a list of tools")
    for tool in tools or ():
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(name, str) or not name:
            raise InputError(
                f"a tool is {tool!r:.120}; expected "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}'
            )
        schema = inner.get("parameters", inner.get("input_schema")) or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise InputError(f"the parameters of the tool {name!r} are {schema!r:.80}; expected a JSON schema")
        if name in found:
            raise InputError(f"two tools are called {name!r}; expected names that differ")
        found[name] = schema
    return found


def read_json(text: str, names: Names) -> Read:
    """{"name": ..., "arguments" or "parameters": {...}}, one or several, as a list or with ";" between."""
    calls: list[Call] = []
    at = _spaces(text, 0)
    listed = text[at : at + 1] == "["
    place = at + 1 if listed else at
    done = at = 0
    while True:
        found = _json_call(text, _spaces(text, place), names)
        if found is None:
            break
        call, at = found
        calls.append(call)
        after = _spaces(text, at)
        if listed and text[after : after + 1] == "]":
            return calls, text[after + 1 :].strip()
        done, place = at, after + 1
        if text[after : after + 1] not in ((",",) if listed else (";", ",")):
            break
    if not calls or listed:  # a list that is not closed was cut
        return [], text
    return calls, text[done:].strip().removeprefix(";").strip()


def read_mistral(text: str, names: Names) -> Read:
    """A list as in ``read_json``, or name[ARGS]{...}, one after the other."""
    calls: list[Call] = []
    at = 0
    while match := MISTRAL_NAME.match(text, at):
        value, end = _decoded(text, match.end())
        if not isinstance(value, dict) or (names is not None and match[1] not in names):
            break
        calls.append(Call(match[1], text[match.end() : end]))
        at = _spaces(text, end)
    return (calls, text[at:]) if calls else read_json(text, names)


def read_pythonic(text: str, names: Names) -> Read:
    """[f(a=1, b="x"), g()], or a single f(a=1)."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], text
    given = node.elts if isinstance(node, ast.List) else [node]
    calls = [_python_call(part, names) for part in given]
    found = [call for call in calls if call is not None]
    return (found, "") if found and len(found) == len(given) else ([], text)


def read_bare(text: str, names: Names) -> Read:
    """JSON or, in brackets, calls as Python writes them."""
    calls, rest = read_json(text, names)
    return (calls, rest) if calls else read_pythonic(text, names)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object and nothing else."""
    value, end = _decoded(text, _spaces(text, 0))
    return isinstance(value, dict) and _spaces(text, end) == len(text)


def in_string(text: str) -> bool:
    """Whether a JSON text ends within a string."""
    return len(re.findall(r'"', re.sub(r"\\.", "", text, flags=re.DOTALL))) % 2 == 1


def _json_call(text: str, at: int, names: Names) -> tuple[Call, int] | None:
    value, end = _decoded(text, at)
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or (names is not None and name not in names):
        return None
    spans = dict(_members(text, at))
    arguments = next((spans[key] for key in ("arguments", "parameters") if key in spans), "{}")
    if arguments.startswith('"'):  # some write JSON in JSON
        arguments = json.loads(arguments)
    return (Call(name, arguments), end) if is_object(arguments) else None


def _members(text: str, at: int) -> Iterator[tuple[str, str]]:
    """The keys of the valid object at ``at``, each with the text of its value."""
    at = _spaces(text, at + 1)
    while text[at] != "}":
        key, at = DECODER.raw_decode(text, at)
        start = _spaces(text, _spaces(text, at) + 1)
        _, end = DECODER.raw_decode(text, start)
        yield key, text[start:end]
        at = _spaces(text, end)
        at = _spaces(text, at + 1) if text[at] == "," else at


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at`` and its end; None where there is none."""
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _spaces(text: str, at: int) -> int:
    match = SPACES.match(text, at)
    return match.end() if match is not None else at


def _python_call(node: ast.expr, names: Names) -> Call | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name) or (names is not None and name not in names):
        return None
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal's value; JSON's true, false and null are meant where they are written."""
    words = {"true": True, "false": False, "null": None}
    for part in ast.walk(node):
        for field, value in ast.iter_fields(part):
            values = value if isinstance(value, list) else [value]
            changed = [ast.Constant(words[v.id]) if isinstance(v, ast.Name) and v.id in words else v for v in values]
            setattr(part, field, changed if isinstance(value, list) else changed[0])
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    return ast.literal_eval(node)
