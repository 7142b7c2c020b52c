"""Several processes on one directory, and kills at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exactkv import PromptStore
from tests.cache.store.disk_worker import text_of
from tests.cache.store.helpers import MODELS, assert_hot_is_cold, check, filled

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.cache.store.disk_worker", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def forked_writer(directory: Path, first: int, limit: int | None = None) -> tuple[int, int]:
    """A process that writes, from a fork: no import to wait for. Its id, and where it says what is finished."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.dup2(writing, 1)
            sys.stdout = os.fdopen(1, "w")
            from tests.cache.store import disk_worker

            disk_worker.write(str(directory), first, limit)
        finally:
            os._exit(1)
    os.close(writing)
    return pid, reading


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_kills_lose_nothing_that_was_finished(tmp_path, kills):
    drawn, finished, model = random.Random(kills), [], MODELS["hybrid"]
    for kill in range(kills):
        first = kill * 10_000
        pid, reading = forked_writer(tmp_path, first)
        with os.fdopen(reading) as said:
            assert said.readline().strip() == "ready"
            time.sleep(drawn.uniform(0, 0.4))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            finished += [int(line) for line in said.read().split()]
    with PromptStore(directory=tmp_path) as store:
        check(store)
        for number in finished:
            asked = [*text_of(number), 5]
            found = store.lookup(model, asked)
            assert found.cached >= len(asked) - 1, "a finished entry is whole"
            if number % 10_000 < 2:
                assert_hot_is_cold(model, found, asked)
        stats = store.stats()
        assert (stats.broken, stats.disk_errors) == (0, 0)
        assert len(finished) >= kills // 2
    left = [f.name for f in tmp_path.iterdir() if f.name.endswith(".tmp")]
    assert not left, "what was half written is removed on opening"
    print(f"{kills} kills, {len(finished)} finished entries, {stats.disk_pieces} pieces")


def test_kills_within_a_limit(tmp_path):
    """Evictions are killed too: the limit holds at once, and when opened nothing is left that nobody counts."""
    drawn, limit, model = random.Random(5), 150_000, MODELS["hybrid"]
    for kill in range(6):
        pid, reading = forked_writer(tmp_path, kill * 10_000, limit)
        with os.fdopen(reading) as said:
            lines = [said.readline() for _ in range(6)]
            time.sleep(drawn.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            lines += [line for line in said.read().splitlines(keepends=True) if line.endswith("\n")]
        assert sum(f.stat().st_size for f in tmp_path.iterdir() if "safetensors" in f.name) <= limit
    with PromptStore(directory=tmp_path, directory_bytes=limit) as store:
        check(store)
        known = store._disk.index.known()
        assert {f.name for f in tmp_path.iterdir() if "safetensors" in f.name} == known
        for number in range(6):
            assert_hot_is_cold(model, store.lookup(model, [*text_of(number), 5]), [*text_of(number), 5])
        last = [*text_of(int(lines[-1])), 5]
        assert store.lookup(model, last).cached == len(last) - 1
        assert store.stats().broken == 0


def test_two_processes_share_a_directory(tmp_path):
    limit = 60_000
    processes = [start(tmp_path, seed, 24, limit) for seed in (1, 2)]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        reused, broken = map(int, out.split())
        assert reused > 15 and broken == 0
    with PromptStore(directory=tmp_path, directory_bytes=limit) as store:
        check(store)


def test_a_store_shrinks_to_its_limit_when_opened(tmp_path):
    with PromptStore(directory=tmp_path) as store:
        for number in range(6):
            store.insert(filled(MODELS["sliding"], text_of(number)))
        assert store.stats().disk_bytes > 9_000
    with PromptStore(directory=tmp_path, directory_bytes=9_000) as store:
        assert 0 < store.stats().disk_bytes <= 9_000
        check(store)
