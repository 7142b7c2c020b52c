"""Structures and tools in `exactkv generate` and `exactkv chat`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exactkv.cli.main import app
from tests.cli.conftest import Start, write_model

TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "now", "arguments": {"zone": 1}}</tool_call>'


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **options)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("calling"), TEMPLATE)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return tmp_path / "tools.json"


def test_text_follows_a_schema_a_grammar_or_an_expression(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2}')
    (tmp_path / "text.lark").write_text('start: "é" /[xy]{3}/')
    assert json.loads(run(model_dir, "Hi", "--json-schema", tmp_path / "schema.json").stdout) in (
        [[], *([a] for a in (1, 22)), *([a, b] for a in (1, 22) for b in (1, 22))]
    )
    assert re.fullmatch("é[xy]{3}\n", run(model_dir, "Hi", "--grammar", tmp_path / "text.lark").stdout)
    found = json.loads(run(model_dir, "Hi", "--regex", "[ab]{5}", "--json").stdout)
    assert re.fullmatch("[ab]{5}", found["text"]) and found["finish_reason"] == "stop"


def test_lines_of_a_file_follow_it_too(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    result = run(model_dir, "--file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--regex", "[ab]{4}")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(re.fullmatch("[ab]{4}", line["text"]) for line in lines)


def test_calls_are_shown(calling: Path, tools: Path) -> None:
    forced = ("--tools", tools, "--regex", re.escape(f"Well {CALL}"))
    assert run(calling, "Hi", *forced).stdout == 'Well \n→ now {"zone": 1}\n'
    found = json.loads(run(calling, "Hi", *forced, "--json").stdout)
    (call,) = found["tool_calls"]
    assert (call["name"], call["arguments"], found["text"]) == ("now", '{"zone": 1}', "Well ")
    plain = json.loads(run(calling, "Hi", "--regex", re.escape(CALL), "--json").stdout)
    assert plain["text"] == CALL and found["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 50


def test_a_conversation_shows_calls(start: Start, calling: Path, tools: Path) -> None:
    process = start("chat", str(calling), "--tools", str(tools), "--regex", re.escape(CALL), "--max-tokens", "90")
    out, errors = process.communicate("Hi\nagain\n", timeout=60)
    assert out == '\n→ now {"zone": 1}\n' * 2, errors
    assert int(re.findall(r"(\d+) cached", errors)[1]) > 100  # the turn before is found in the cache, call and all


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--json-schema", "absent"), "cannot be read"),
        (("--regex", "(a"), "--regex: .*unclosed group"),
        (("--regex", "a", "--grammar", "g"), "--grammar and --regex were given"),
        (("--tools", "absent"), "cannot be read"),
        (("--tools", "TOOLS"), "shows no format of calls"),
        (("--tools", "TOOLS", "--raw"), "leave out --raw"),
        (("--tools", "EMPTY"), "at least one"),
    ],
)
def test_what_does_not_fit(arguments: tuple[str, ...], says: str, model_dir: Path, tools: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("[]")
    places = {"TOOLS": tools, "EMPTY": tmp_path / "empty.json"}
    result = run(model_dir, "Hi", *[places.get(a, a) for a in arguments])
    told = " ".join((result.output + str(result.exception)).split()).replace("│ ", "")
    assert result.exit_code != 0 and re.search(says, told), told
