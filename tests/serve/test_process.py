"""The command as people run it: it listens, it ends when it is told to, and says what is wrong."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from exactkv.cli.main import app
from exactkv.generation import Sampling, generate
from exactkv.models.load import load
from tests.cli.conftest import Start, model_dir, start

__all__ = ["model_dir", "start"]
PROMPT = "It goes on for long enough to be kept. "
LONG = {"prompt": PROMPT, "ignore_eos": True, "stream": True, "seed": 4, "temperature": 0.9}
Serve = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def serve(start: Start, model_dir: Path) -> Iterator[Serve]:
    """Start the command; returns the process and its address."""
    made: list[subprocess.Popen[str]] = []

    def begin(*options: str) -> tuple[subprocess.Popen[str], str]:
        process = start("serve", str(model_dir), "--port", "0", *options)
        made.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"listening on (http://\S+)", line):
                return process, found[1]
        raise AssertionError("it ended")

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def name_of(model_dir: Path) -> str:
    return model_dir.name


def test_sigterm_lets_replies_end_and_keeps_the_cache(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    process, url = serve("--grace", "30", "--prompt-cache-dir", str(tmp_path / "prompts"))
    body = {**LONG, "model": name_of(model_dir), "max_tokens": 250}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        said = events(reply.iter_lines())
        text = next(said)["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert process.poll() is None
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json=body)
        chunks = list(said)
        text += "".join(c["choices"][0]["text"] for c in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(20) == 0
    model = load(model_dir)
    sampling = Sampling(temperature=0.9, seed=4)
    (expected,) = generate(model, [PROMPT], max_tokens=250, sampling=sampling, stop_token_ids=())
    assert text == expected.text
    files = list((tmp_path / "prompts").glob("*.safetensors"))
    assert files
    for file in files:
        with safe_open(file, "pt") as opened:
            assert list(opened.keys())
    assert not list((tmp_path / "prompts").glob("*-wal"))  # the index was closed
    process, url = serve("--prompt-cache-dir", str(tmp_path / "prompts"))
    again = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 1, "stream": False}, timeout=60).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_what_is_longer_than_the_grace_is_told(serve: Serve, model_dir: Path) -> None:
    process, url = serve("--grace", "0.3")
    body = {**LONG, "model": name_of(model_dir), "max_tokens": 2000}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        said = events(reply.iter_lines())
        next(said)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        last = list(said)[-1]
    assert last["error"]["message"] == "the server has ended" and time.monotonic() - started < 5
    assert process.wait(10) == 0


def test_keys_of_the_environment_and_a_second_signal(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXACTKV_API_KEYS", "one two")
    process, url = serve("--name", "mine", "--name", "*", "--grace", "60")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    for key in ("one", "two"):
        models = httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).json()
        assert [m["id"] for m in models["data"]] == ["mine"]
    assert httpx.get(url + "/health", headers={"host": "evil.example"}).status_code == 403
    body, key_header = {**LONG, "model": "anything", "max_tokens": 2000}, {"x-api-key": "one"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key_header, timeout=60) as reply:
        said = events(reply.iter_lines())
        assert next(said)["model"] == "anything"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_what_is_wrong_is_said(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, said in (
            (["--port", port], f"127.0.0.1:{port} cannot be listened on"),
            (["--host", "no.such.host.invalid"], "which is no address"),
            (["--max-bytes", "5"], "max_bytes leaves no room"),
            (["--max-bytes", "five"], "expected a size"),
            (["--api-key", "a b"], "expected printable ASCII"),
            (["--log-level", "loud"], "expected debug, info"),
            (["--timeout", "0"], "timeout is 0"),
            (["--dtype", "float5"], "float5"),
        ):
            done = CliRunner().invoke(app, ["serve", str(model_dir), *options], env={"COLUMNS": "200"})
            assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output
