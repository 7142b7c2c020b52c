"""Many prompts from a file: each result is what it is alone, and a run that ended early is taken up again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exactkv.cli import offline
from exactkv.cli.main import app
from exactkv.generation import Sampling, stream
from exactkv.models import embedded
from exactkv.models.load import load
from tests.cli.conftest import Start


def run(model: object, file: object, out: object, *options: object, **more: Any) -> Result:
    words = ["generate", model, "--file", file, "--out", out, "--max-tokens", 6, *options]
    return CliRunner().invoke(app, [str(w) for w in words], **more)


def write(path: Path, lines: list[Any]) -> Path:
    """A line each: bytes and texts as they are, others as JSON."""
    made = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + b"\n" for line in made))
    return path


def read(out: Path) -> list[dict[str, Any]]:
    content = out.read_text(encoding="utf-8")
    assert content == "" or content.endswith("\n")
    return [json.loads(line) for line in content.split("\n")[:-1]]


def by_id(out: Path) -> dict[Any, dict[str, Any]]:
    found = read(out)
    assert len({r["id"] for r in found}) == len(found)
    return {r["id"]: r for r in found}


def test_each_is_what_it_is_alone(model_dir: Path, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    lines = [
        {"prompt": "Hello"},
        {"id": "ids", "prompt": [256, 5, 6, 7], "max_tokens": 9},
        {"id": 7, "messages": hello, "temperature": 0.9, "seed": 3, "top_k": 50, "logit_bias": {"5": 1.5}},
        "",
        {"id": "ü", "prompt": "Hello", "logprobs": 2, "stop": ["never"], "stop_token_ids": []},
        {"id": "seeded", "prompt": "Hello", "seed": 4, "max_tokens": 30},
    ]
    file, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = run(model_dir, file, out, "--temp", 0.7, "--max-rows", 3, "--step-tokens", 8)
    assert result.exit_code == 0 and result.stdout == ""
    assert result.stderr.startswith("5 results, 0 errors · ") and result.stderr.count("\n") == 1
    model, found = load(model_dir), by_id(out)
    assert list(read(out)[0]) == ["id", "text", "finish_reason", "matched", "tokens", "usage"]
    expected: dict[Any, Any] = {
        1: stream(model, hello, 6, Sampling(0.7)),
        "ids": stream(model, [256, 5, 6, 7], 9, Sampling(0.7)),
        7: stream(model, hello, 6, Sampling(0.9, seed=3, top_k=50, logit_bias={5: 1.5})),
        "ü": stream(model, hello, 6, Sampling(0.7), stop_token_ids=(), logprobs=2),
        "seeded": stream(model, hello, 30, Sampling(0.7, seed=4)),
    }
    assert found.keys() == expected.keys()
    for identity, generation in expected.items():
        list(generation)
        same = found[identity]
        assert (same["text"], same["tokens"]) == (generation.text, generation.tokens)
        assert same["finish_reason"] == generation.finish_reason
        assert same["usage"]["prompt_tokens"] == len(generation.prompt)
        assert same["usage"]["completion_tokens"] == len(generation.tokens)
    assert [told["token"] for told in found["ü"]["logprobs"]] == found["ü"]["tokens"]
    assert len(found["ü"]["logprobs"][0]["top_logprobs"]) == 2 and '"ü"' in out.read_text(encoding="utf-8")


def test_raw_system_stdin_and_the_default_model(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "default", lambda: model_dir)
    given = b'\xef\xbb\xbf{"prompt": "Hello"}\r\n{"prompt": [5]}'

    def prompts(*options: str) -> list[int]:
        result = CliRunner().invoke(
            app, ["generate", "--file", "-", "--out", "-", "--max-tokens", "2", *options], input=given
        )
        assert result.exit_code == 0, result.output
        found = sorted(map(json.loads, result.stdout.splitlines()), key=lambda r: r["id"])
        return [r["usage"]["prompt_tokens"] for r in found]

    assert prompts() == [21, 1] and prompts("--raw") == [6, 1]
    assert prompts("--system", "Hi") == [21 + len("system:Hi\n"), 1]


WRONG = [
    ('{"prompt": "Hello"', "the line is not JSON: "),
    (b'{"prompt": "\xff"}', "the line is not valid UTF-8: invalid start byte at byte 12"),
    ("[1, 2]", "the line is [1, 2]; expected an object"),
    ("[" * 100_000, "the line is not JSON: "),
    ({"prompt": "x", "topk": 3}, "'topk' is no field of a line; did you mean top_k?"),
    ({"prompt": "x", "id": 1.5}, "id is 1.5; expected a text or an integer"),
    ({"prompt": "x", "id": True}, "id is True; expected a text or an integer"),
    ({"id": "a"}, "the line has neither of prompt and messages"),
    ({"prompt": "x", "messages": []}, "the line has both of prompt and messages"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": 5}, "prompt is 5; expected a text or a list of token ids"),
    ({"prompt": [5, "x"]}, "prompt is [5, 'x']; expected a text or a list of token ids"),
    ({"prompt": [264]}, "token id 264 of the prompt is outside the vocabulary"),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ('{"id": "\\ud800"}', "the line has neither of prompt and messages"),
    ({"messages": "Hello"}, "messages is 'Hello'; expected a list of objects"),
    ({"messages": []}, "messages is []; expected a list of objects"),
    ({"prompt": "x" * 3000}, "tokens; at most 2048 fit"),
    ({"prompt": "x", "max_tokens": 1900}, "bytes of cache; max_bytes is 150,000"),
    ({"prompt": "x", "max_tokens": "6"}, "max_tokens is '6'; expected an integer >= 1"),
    ({"prompt": "x", "stop": [""]}, "expected texts that are not empty"),
    ({"prompt": "x", "stop": 3}, "stop is a int; expected a list"),
    ({"prompt": "x", "temperature": -1}, "temperature is -1; expected a number >= 0"),
    ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'; expected a number >= 0"),
    ({"prompt": "x", "seed": 0.5}, "seed is 0.5; expected an integer"),
    ({"prompt": "x", "seed": 10**30}, "the line has the number '1000000000000000000000000000000'"),
    ('{"prompt": "x", "temperature": NaN}', "the line has NaN, which is not JSON"),
    ({"prompt": "x", "logprobs": -1}, "logprobs is -1; expected how many top tokens"),
    ({"prompt": "x", "banned_tokens": [264]}, "token 264; the vocabulary is 0 to 263"),
    ({"prompt": "x", "typical_p": 0.5}, "temperature is 0"),
    ({"id": "good", "prompt": "x"}, "id 'good' is that of line 1; expected another one a line"),
    ({"prompt": "x", "allowed_tokens": [3], "logit_bias": {"4": 1}}, "not in allowed_tokens"),
]


def test_errors_of_a_line_do_not_stop_others(model_dir: Path, tmp_path: Path) -> None:
    good = {"id": "good", "prompt": "Hello"}
    lines = [good, *(line for line, _ in WRONG), {"id": "last", "prompt": "x", "top_k": 2**62, "logprobs": 2**62}]
    file, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = run(model_dir, file, out, "--max-bytes", "150kB")
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert result.stderr.startswith(f"2 results, {len(WRONG)} errors · ")
    found = read(out)
    assert {r["id"] for r in found if "text" in r} == {"good", "last"}
    errors = {r["error"]["line"]: r["error"]["message"] for r in found if "error" in r}
    for number, (_, said) in enumerate(WRONG, 2):
        assert said in errors[number], (number, said, errors[number])
    again = run(model_dir, file, out, "--max-bytes", "150kB")
    assert again.exit_code == 1
    assert again.stderr.startswith(f"0 results, {len(WRONG)} errors, 2 skipped, as they were there · ")
    assert sorted(map(str, read(out))) == sorted(map(str, found))


def test_what_was_wrong_is_tried_again(model_dir: Path, tmp_path: Path) -> None:
    lines: list[Any] = [{"id": n, "prompt": "x" * n} for n in range(5)]
    file, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(model_dir, file, out).exit_code == 1
    out.chmod(0o640)
    lines[0]["prompt"] = "mended"
    assert run(model_dir, write(file, lines), out).exit_code == 0
    assert by_id(out).keys() == set(range(5)) and "error" not in str(read(out))
    assert out.stat().st_mode & 0o777 == 0o640 and sorted(p.name for p in tmp_path.iterdir()) == [file.name, out.name]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_last_line_that_was_cut_off_is_done_again(cut: int, model_dir: Path, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}]), tmp_path / "out.jsonl"
    run(model_dir, file, out, "--max-rows", 1)
    whole = out.read_bytes()
    first = whole.index(b"\n") + 1
    out.write_bytes(whole[: first + cut])
    result = run(model_dir, file, out)
    assert result.exit_code == 0 and result.stderr.startswith("1 result, 0 errors, 1 skipped")
    assert out.read_bytes() == whole
    out.write_bytes(whole[:-1])  # only its end of line is missing
    assert run(model_dir, file, out).stderr.startswith("0 results, 0 errors, 2 skipped")
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"some notes", 1),
        (b'{"id": 1, "prompt": "x"}\n', 1),
        (b"\xff\n", 1),
        (b'{"id": 1, "error": {"message": ""}}\n{}', 2),
    ],
)
def test_a_file_of_something_else_is_left_alone(content: bytes, line: int, model_dir: Path, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", [{"prompt": "one"}]), tmp_path / "out.jsonl"
    out.write_bytes(content)
    result = run(model_dir, file, out)
    assert result.exit_code == 2 and out.read_bytes() == content
    assert f"line {line} of {out} is no result of exactkv generate --file; give another --out" in result.stderr


def test_could_not_run(model_dir: Path, base_dir: Path, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"
    cases: list[tuple[list[object], str]] = [
        ([model_dir, tmp_path / "none", out], "none cannot be read: No such file"),
        ([tmp_path / "none", file, out], "none"),
        ([model_dir, file, tmp_path / "no" / "out"], "cannot be written: No such file"),
        ([model_dir, file, tmp_path], "cannot be written: Is a directory"),
        ([model_dir, file, out, "--max-bytes", "much"], "--max-bytes is 'much'; expected a size"),
        ([model_dir, file, out, "--step-tokens", 4], "step_tokens is 4; expected an integer >= max_rows"),
        ([model_dir, file, out, "--draft", tmp_path / "none"], "none"),
        ([model_dir, file, out, "--json"], "--json is for one prompt"),
        ([model_dir, file, out, "--prompt-cache", tmp_path / "p"], "--prompt-cache is for one prompt"),
        ([base_dir, file, out, "--system", "Hi"], "this model has no chat template"),
        ([model_dir, file, out, "--sampling", '{"topk": 1}'], "'topk' is no setting of sampling"),
        ([model_dir, file, out, "--sampling", '{"banned_tokens": [264]}'], "token 264; the vocabulary is 0 to 263"),
        ([model_dir, file, out, "--stop", ""], "expected texts that are not empty"),
        ([f"{model_dir}", file, out, "a prompt"], "PROMPT is for one prompt, and --file has many"),
    ]
    for arguments, said in cases:
        result = run(*arguments)
        assert result.exit_code == 2 and said in result.stderr, (said, result.output)
        assert "Traceback" not in result.output and not out.exists()
    for words, said in (
        (["x", "--out", "o"], "--out is for many prompts; add --file"),
        (["x", "--max-rows", "2"], "--max-rows is for many prompts"),
        (["--file", "f"], "--file needs --out"),
    ):
        result = CliRunner().invoke(app, ["generate", *words])
        assert result.exit_code == 2 and said in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_a_message(model_dir: Path, tmp_path: Path, start: Start) -> None:
    file = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    process = start("generate", str(model_dir), "--file", str(file), "--out", "/dev/full", "--max-tokens", "2")
    assert process.communicate(timeout=60) == ("", "exactkv: No space left on device\n")
    assert process.returncode == 2


def test_two_at_once_are_refused(model_dir: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    file, out = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"
    with out.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = run(model_dir, file, out)
    assert result.exit_code == 2 and "another process is writing to" in result.stderr and out.exists()


def test_lines_are_read_when_there_is_room(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pipe that says how far it was read each time that a result is written."""
    taken, at_result = 0, []

    class Lines:
        def __iter__(self) -> Any:
            nonlocal taken
            for number in range(30):
                taken += 1
                yield json.dumps({"prompt": [number + 1]}).encode()

    original = offline.Work.take

    def noted(self: Any, result: Any) -> None:
        self.file = None
        at_result.append(taken)
        original(self, result)

    original_init = offline.Work.__init__

    def init(self: Any, file: Any, *rest: Any) -> None:
        original_init(self, Lines(), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(offline.Work, "__init__", init)
    monkeypatch.setattr(offline.Work, "take", noted)
    out = tmp_path / "out.jsonl"
    assert run(model_dir, write(tmp_path / "in.jsonl", []), out, "--max-rows", 4).exit_code == 0
    assert len(by_id(out)) == 30 and all(read <= done + 4 for done, read in enumerate(at_result, 1))


@pytest.mark.parametrize("draft", ["lookup", "{model}"])
def test_drafts_change_no_result(draft: str, model_dir: Path, tmp_path: Path) -> None:
    lines = [{"id": n, "prompt": "abcabc" * n, "max_tokens": 20, "temperature": 0.7 * (n % 2)} for n in range(1, 6)]
    file, out, drafted = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "drafted.jsonl"
    assert run(model_dir, file, out).exit_code == 0
    options = ("--draft", draft.format(model=model_dir), "--draft-tokens", 5)
    assert run(model_dir, file, drafted, *options).exit_code == 0
    plain, found = by_id(out), by_id(drafted)
    assert {n: r["tokens"] for n, r in plain.items()} == {n: r["tokens"] for n, r in found.items()}
    assert not any(r["usage"]["drafted_tokens"] for r in plain.values())
    assert sum(r["usage"]["accepted_tokens"] for r in found.values()) > 0 or draft == "lookup"
    one = ["generate", str(model_dir), "abcabc", "--json", "--raw", "--max-tokens", "20"]
    alone = json.loads(CliRunner().invoke(app, one).stdout)
    same = json.loads(CliRunner().invoke(app, [*one, *map(str, options)]).stdout)
    assert same["tokens"] == alone["tokens"] and alone["usage"]["drafted_tokens"] == 0
    assert same["usage"]["drafted_tokens"] > 0 or draft == "lookup"
    told = CliRunner().invoke(app, [*(w for w in one if w != "--json"), *map(str, options)]).stderr
    assert ("guesses came true" in told) == (same["usage"]["drafted_tokens"] > 0)


def test_progress_in_a_pipe(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "SECONDS_BETWEEN_LINES", 0.0)
    file = write(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": ""}, "", {"prompt": "y"}])
    lines = run(model_dir, file, tmp_path / "out.jsonl", "--max-rows", 1).stderr.splitlines()
    assert lines[0].startswith("1 of 4 lines, ") and lines[-2].startswith("4 of 4 lines, 1 error, ")
    assert lines[-2].endswith(" tokens/s") and lines[-1].startswith("2 results, 1 error · ")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle_and_taken_up_again(
    end: signal.Signals, model_dir: Path, tmp_path: Path, start: Start
) -> None:
    lines = [{"id": n, "prompt": f"prompt {n}", "seed": n, "max_tokens": 60} for n in range(24)]
    file, out, whole = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert run(model_dir, file, whole, "--temp", 1, "--max-rows", 8).exit_code == 0
    words = ["generate", str(model_dir), "--file", str(file), "--out", str(out), "--temp", "1", "--max-rows", "2"]
    process = start(*words)
    until = time.monotonic() + 60
    while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(end)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if end == signal.SIGKILL else 130), errors
    if end == signal.SIGINT:
        assert errors.endswith(" (interrupted)\n") and errors.count("\n") == 1
    if end == signal.SIGKILL:
        with out.open("ab") as file_of_results:
            file_of_results.write(b'{"id": 23, "text": "cut')
    there = out.read_bytes().count(b"\n")
    assert 0 < there < 24
    again = run(model_dir, file, out, "--temp", 1)
    assert again.exit_code == 0 and f"{there} skipped" in again.stderr
    found, expected = by_id(out), by_id(whole)
    assert {n: (r["text"], r["tokens"]) for n, r in found.items()} == {
        n: (r["text"], r["tokens"]) for n, r in expected.items()
    }


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        progress = offline.Progress(2)
        progress.finish(5)
        progress.fail()
        progress.close()
    written = b""
    with contextlib.suppress(OSError):  # Linux's way to say that a terminal ends
        while some := os.read(ours, 100_000):
            written += some
    os.close(ours)
    shown = written.decode()
    assert "2/2" in shown and "1 error" in shown and "tokens/s" in shown
