"""`exactkv verify`: exit codes, what goes to which stream, files; mostly with reports made by hand."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from exactkv.cli.main import app
from exactkv.cli.verify import strict
from exactkv.errors import LoadError
from exactkv.verify import runner
from exactkv.verify.report import Report
from tests.cli.conftest import SOURCE, Start
from tests.verify import reports

Fake = Callable[[Report | BaseException], dict[str, Any]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Have the runner return a report, or raise. What it was called with is in the dict returned."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def set_up(result: Report | BaseException) -> dict[str, Any]:
        called: dict[str, Any] = {}

        def verify(target: Any, **options: Any) -> Report:
            called.update(options, target=target)
            print("a library prints something")
            if isinstance(result, BaseException):
                raise result
            for i, outcome in enumerate(result.outcomes):
                options["progress"](i, len(result.outcomes), outcome.schedule, None)
                options["progress"](i + 1, len(result.outcomes), outcome.schedule, outcome)
            return result

        monkeypatch.setattr(runner, "verify", verify)
        return called

    return set_up


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


CODES = [
    (reports.report(), 0, ""),
    (reports.report([reports.exact(), reports.unsupported("fork")]), 0, ""),
    (reports.mixed(), 1, ""),
    (reports.report([reports.undecided(), reports.violation()]), 1, ""),
    (reports.report([reports.exact(), reports.undecided()]), 2, "1 of 2 schedules could not be decided (long: every"),
    (reports.report([reports.unsupported("fork")]), 2, "supports none of these schedules"),
    (reports.report([]), 2, "no schedule was run"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "code", "reason"), CODES)
@pytest.mark.parametrize("options", [[], ["--json"], ["--quiet"]])
def test_exit_codes(fake: Fake, report: Report, code: int, reason: str, options: list[str]) -> None:
    fake(report)
    result = run("model", *options)
    assert result.exit_code == code
    assert reason in result.stderr and ("exactkv:" in result.stderr) == bool(reason)


def test_arguments_reach_the_runner(fake: Fake) -> None:
    called = fake(reports.report())
    run(
        "a/b",
        "--engine",
        "mlx",
        "--schedules",
        "steps, save  and load",
        "--dtype",
        "float64",
        "--seed",
        3,
        "--length",
        40,
    )
    assert callable(called.pop("progress"))
    assert called == {
        "target": "a/b", "engine": "mlx", "schedules": ["steps", "save and load"], "dtype": "float64", "seed": 3,
        "length": 40,
    }  # fmt: skip
    called = fake(reports.report())
    run("a/b")
    assert (called["engine"], called["schedules"], called["dtype"], called["length"]) == (None, "all", "auto", None)


@pytest.mark.parametrize(
    "arguments",
    [[], [""], ["m", "--engine", "vllm"], ["m", "--dtype", "int8"], ["m", "--seed", "-1"], ["m", "--length", "0"],
     ["m", "--schedules", " ,"], ["m", "extra"]],
)  # fmt: skip
def test_bad_arguments_are_two(fake: Fake, arguments: list[str]) -> None:
    called = fake(reports.report())
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr
    assert called == {}


def test_an_unknown_schedule_is_two() -> None:
    result = run("model", "--schedules", "steps,nonsense", "--json")
    assert result.exit_code == 2 and result.stdout == ""
    assert "'nonsense'" in result.stderr


def test_what_cannot_be_loaded_is_two(fake: Fake) -> None:
    fake(LoadError("model: no such thing"))
    result = run("model", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("exactkv: model: no such thing\n")


def test_a_crash_is_two_with_its_traceback(fake: Fake) -> None:
    fake(ZeroDivisionError("of our own"))
    result = run("model")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" in result.stderr and "could not run: ZeroDivisionError" in result.stderr


def test_the_table_is_on_standard_output(fake: Fake) -> None:
    fake(reports.mixed())
    result = run("model")
    assert result.stdout.startswith("verify Llama4ForCausalLM, shrunk\n")
    assert result.stdout.endswith(reports.mixed().summary() + "\n")
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())
    assert result.stderr == "a library prints something\n"  # no progress in a pipe


def test_quiet_is_the_verdict(fake: Fake) -> None:
    fake(reports.report())
    assert run("model", "-q").stdout == f"✓ {reports.report().summary()}\n"


# JSON.


def test_json_is_one_strict_object(fake: Fake) -> None:
    fake(reports.mixed())
    result = run("model", "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(result.stdout, parse_constant=refuse)
    assert found["format"] == 1 and found["exact"] is False
    assert set(found) == set(reports.mixed().to_json())
    bad = found["outcomes"][5]
    assert bad["worst"] is None and bad["differences"][20:22] == [None, None] and bad["reason"] == "NaN at position 20"
    assert found["outcomes"][2]["diagnosis"]["operations"] == reports.diagnosis().operations


def test_json_of_anything() -> None:
    import numpy as np

    given = {1: (math.inf, np.float32(0.5)), "path": Path("a"), "flag": True, "none": None, "big": 2**70}
    assert strict(given) == {"1": [None, 0.5], "path": "a", "flag": True, "none": None, "big": 2**70}


# Files.


def test_html_and_script_are_written(fake: Fake, tmp_path: Path) -> None:
    fake(reports.mixed())
    result = run("model", "--html", tmp_path / "r.html", "--script", tmp_path / "s.py", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)
    assert "What is wrong" in (tmp_path / "r.html").read_text("utf-8")
    assert (tmp_path / "s.py").read_text() == reports.diagnosis().script
    assert sorted(os.listdir(tmp_path)) == ["r.html", "s.py"]
    assert "the script for 'steps' is in" in result.stderr


def test_no_script_where_there_is_nothing_to_show(fake: Fake, tmp_path: Path) -> None:
    fake(reports.report())
    result = run("model", "--script", tmp_path / "s.py", "--quiet")
    assert result.exit_code == 0 and "there is no violation" in result.stderr
    fake(reports.report([reports.violation(diagnosis=None)]))
    result = run("model", "--script", tmp_path / "s.py")
    assert result.exit_code == 1 and "no violation has one" in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["--html", "--script"])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(fake: Fake, tmp_path: Path, option: str) -> None:
    called = fake(reports.report())
    for place in (tmp_path / "missing" / "file", tmp_path, os.devnull, ""):
        result = run("model", option, place)
        assert result.exit_code == 2 and option in result.stderr
    assert called == {}


def test_two_outputs_in_one_file_are_refused(fake: Fake, tmp_path: Path) -> None:
    assert run("model", "--html", tmp_path / "x", "--script", tmp_path / "." / "x").exit_code == 2


def test_a_failed_write_leaves_the_old_file(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "r.html").write_text("old")
    fake(reports.report())
    monkeypatch.setattr(os, "replace", full)
    result = run("model", "--html", tmp_path / "r.html")
    assert result.exit_code == 2 and "r.html cannot be written: No space left on device" in result.stderr
    assert os.listdir(tmp_path) == ["r.html"] and (tmp_path / "r.html").read_text() == "old"


def test_a_link_stays_a_link(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    fake(reports.report())
    assert run("model", "--html", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink() and "Schedules" in (tmp_path / "real.html").read_text("utf-8")


# Schedules.


def test_schedules_are_listed() -> None:
    listed = run("--list-schedules")
    assert listed.exit_code == 0
    found = json.loads(run("--list-schedules", "--json").stdout)["schedules"]
    assert len(found) > 20
    for schedule in found:
        assert set(schedule) == {"name", "kinds", "description"}
        assert schedule["name"] in listed.stdout


# As a process.

WAITING = """
import sys, time
from exactkv.verify import runner
def verify(target, *, progress, **options):
    progress(0, 3, "steps [dynamic]", None)
    print("started", file=sys.stderr, flush=True)
    time.sleep(60)
runner.verify = verify
sys.argv = ["exactkv", "verify", "model", *sys.argv[1:]]
from exactkv.cli.main import main
main()
"""


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "--json", "--html", str(tmp_path / "r.html")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "exactkv: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_progress_on_a_terminal() -> None:
    """Standard error is a terminal: what runs, the how manieth it is; and the cursor is given back at the end."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while b"steps [dynamic]" not in seen or b"0/3" not in seen:
        seen += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    while not seen.rstrip().endswith(b"interrupted"):
        seen += os.read(ours, 4096)
    assert process.wait(timeout=30) == 130
    assert seen.count(b"\x1b[?25h") == seen.count(b"\x1b[?25l") == 1
    os.close(ours)


def test_a_reader_that_leaves_is_no_violation(start: Start, model_dir: Path) -> None:
    process = start("verify", str(model_dir), "--schedules", "steps")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


# In earnest.


def test_a_model_on_the_disk_is_exact(model_dir: Path, tmp_path: Path) -> None:
    result = run(model_dir, "--schedules", "steps,rewind,ragged batch", "--json", "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["exact"] and [o["schedule"] for o in found["outcomes"]] == ["steps", "rewind", "ragged batch"]
    assert all(o["compared"] > 50 for o in found["outcomes"])
    assert "<title>position 63: " in (tmp_path / "r.html").read_text("utf-8")


def test_a_model_that_is_not_there() -> None:
    result = run("./no/such/model")
    assert result.exit_code == 2 and "no/such/model" in result.stderr and "Traceback" not in result.stderr
