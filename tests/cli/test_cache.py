"""`exactkv cache`: what it says of stores and files, what it removes, and its exit codes."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactkv import PromptStore
from exactkv.cache.store import index
from exactkv.cli.main import app
from tests.cache.store.helpers import MODELS, filled, stored
from tests.tiny import random_tokens

TEXT = random_tokens(40, 3)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with PromptStore(directory=tmp_path / "store") as store:
        stored(store, MODELS["hybrid"], TEXT, every=10)
        stored(store, MODELS["hybrid"], [*TEXT[:30], 1, 2, 3])
        stored(store, MODELS["full"], TEXT, salt="tenant")
    return tmp_path / "store"


def test_ls_and_show(directory: Path) -> None:
    code, out, _ = run("ls", directory)
    assert code == 0 and "3 texts" in out and "s ago" in out and "hybrid float64" in out and "kB" in out
    found = json.loads(run("ls", directory, "--json")[1])
    assert found["files"] == []
    assert sorted(t["tokens"] for t in found["store"]["texts"]) == [33, 40, 40]
    assert found["store"]["bytes"] >= max(t["bytes"] for t in found["store"]["texts"])
    code, out, _ = run("show", directory)
    assert code == 0 and "a prompt store" in out and "none" in out and "tenant" not in out
    shown = json.loads(run("show", directory, "--json")[1])
    assert {s["family"] for s in shown["spaces"]} == {"hybrid", "tiny"}
    marks = {tuple(t["checkpoints"]) for t in shown["texts"] if t["tokens"] != 40}
    assert marks == {(10, 20, 30, 32, 33)}


def test_a_saved_cache(tmp_path: Path) -> None:
    filled(MODELS["hybrid"], TEXT, every=10).save(tmp_path / "one.cache")
    (tmp_path / "notes.txt").write_text("nothing")
    code, out, _ = run("ls", tmp_path)
    assert code == 0 and "one.cache" in out and "1 saved caches" in out
    code, out, _ = run("show", tmp_path / "one.cache")
    assert code == 0 and "40 tokens" in out and "checkpoints at 10, 20, 30, 40" in out
    assert json.loads(run("show", tmp_path / "one.cache", "--json")[1])["rows"][0]["length"] == 40
    assert run("verify", tmp_path / "one.cache")[0] == 0
    content = bytearray((tmp_path / "one.cache").read_bytes())
    content[-9] ^= 1
    (tmp_path / "one.cache").write_bytes(content)
    code, out, _ = run("verify", tmp_path / "one.cache")
    assert code == 1 and "altered" in out


def test_verify_says_what_is_broken(directory: Path) -> None:
    code, out, _ = run("verify", directory)
    assert code == 0 and "whole" in out
    files = sorted(directory.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-3])
    files[2].write_bytes(files[3].read_bytes())
    (directory / "stray.safetensors").write_text("x")
    code, out, _ = run("verify", directory)
    assert code == 1 and f"{files[0].name} is missing" in out and "truncated" in out and "the index says" in out
    found = json.loads(run("verify", directory, "--json")[1])
    assert [len(found[k]) for k in ("broken", "unreadable")] == [3, 0] and found["unknown"] == ["stray.safetensors"]
    assert run("verify", directory, "-q")[1].count("\n") == 3
    assert len(list(directory.glob("*.safetensors"))) == len(files), "nothing is changed"


def test_verify_of_an_index_that_is_damaged(directory: Path) -> None:
    index = directory / "index.sqlite"
    whole = index.read_bytes()
    index.write_bytes(b"x" * len(whole))
    code, out, _ = run("verify", directory)
    assert code == 1 and "index.sqlite" in out
    index.write_bytes(whole[:4096] + b"\xff" * 4096 + whole[8192:])
    assert run("verify", directory)[0] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_verify_could_not_read(directory: Path) -> None:
    file = next(directory.glob("*.safetensors"))
    file.chmod(0)
    assert run("verify", directory)[0] == 2


def test_prune(directory: Path) -> None:
    before = json.loads(run("show", directory, "--json")[1])["bytes"]
    would = json.loads(run("prune", directory, "--max-bytes", "60kB", "--dry-run", "--json")[1])
    assert json.loads(run("show", directory, "--json")[1])["bytes"] == before
    did = json.loads(run("prune", directory, "--max-bytes", "60kB", "--json")[1])
    assert {**would, "dry_run": False} == did and 0 < did["left"] <= 60_000 and did["bytes"] == before - did["left"]
    assert json.loads(run("show", directory, "--json")[1])["bytes"] == did["left"]
    assert json.loads(run("prune", directory, "--older-than", "1h", "--json")[1])["entries"] == 0
    assert run("verify", directory)[0] == 0
    time.sleep(0.01)
    code, out, _ = run("prune", directory, "--older-than", "0s")
    assert code == 0 and "went" in out and "0 B left" in out
    with PromptStore(directory=directory) as store:
        stored(store, MODELS["full"], TEXT)
    assert "0 B would be left" in run("prune", directory, "--all", "--dry-run")[1]
    assert run("prune", directory, "--all")[0] == 0
    assert not list(directory.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "missing"], "no directory"),
        (["show", "missing"], "does not exist"),
        (["verify", "missing"], "does not exist"),
        (["verify", "."], "no prompt store"),
        (["ls", "."], "neither"),
        (["prune", ".", "--all"], "no prompt store"),
        (["prune", "."], "nothing to prune by"),
        (["prune", ".", "--max-bytes", "much"], "expected a size"),
        (["prune", ".", "--older-than", "7"], "expected an age"),
    ],
)
def test_what_could_not_be_done(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(*words)
    assert code == 2 and said in error


def test_ls_goes_on_after_a_broken_file(tmp_path: Path) -> None:
    filled(MODELS["full"], TEXT).save(tmp_path / "good")
    raw = b'{"a":' + b"[" * 200_000
    (tmp_path / "deep").write_bytes(len(raw).to_bytes(8, "little") + raw)
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-3])
    code, out, _ = run("ls", tmp_path)
    assert code == 0 and "1 saved caches" in out and "broken: deep" in out and "broken: cut" in out
    found = json.loads(run("ls", tmp_path, "--json")[1])
    assert [Path(one["file"]).name for one in found["broken"]] == ["cut", "deep"]
    assert run("show", tmp_path / "deep")[0] == 2
    assert run("verify", tmp_path / "deep")[0] == 1


@pytest.mark.parametrize(
    "sql",
    ["DROP TABLE marks", "UPDATE pieces SET tokens = x'01'", "UPDATE spaces SET model = '{'", "DELETE FROM spaces"],
)
def test_a_damaged_index_is_told_in_words(sql: str, directory: Path) -> None:
    with sqlite3.connect(directory / "index.sqlite") as db:
        db.execute(sql)
    db.close()
    for words in (["ls"], ["show"]):
        code, _, error = run(*words, directory)
        assert code == 2 and "damaged" in error and str(directory) in error
    code, out, _ = run("verify", directory)
    assert code == 1 and "broken" in out and "damaged" in out


def test_an_index_that_is_locked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.05)
    db = sqlite3.connect(directory / "index.sqlite", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    code, _, error = run("prune", directory, "--all")
    assert code == 2 and "locked" in error and "delete" not in error
    db.close()
