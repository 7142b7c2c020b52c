"""Directories that are shared, damaged, full or closed to us, and questions that are none."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest
import torch

from exactkv import PromptStore, load_cache
from exactkv.cache.store import index, writer
from exactkv.cache.store.disk import DiskTier
from exactkv.cache.store.inspect import describe_store, verify_store
from exactkv.errors import InputError, LoadError
from tests.cache.store.helpers import MODELS, assert_hot_is_cold, check, filled, stored
from tests.tiny import random_tokens

TEXT = random_tokens(40, 3)
MODEL = MODELS["sliding"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_TOKENS", 7)


def changed(directory: Path, sql: str) -> None:
    db = sqlite3.connect(directory / "index.sqlite")
    db.execute(sql)
    db.commit()
    db.close()


def test_what_others_keep_in_the_directory_stays(tmp_path):
    """Weights and saved caches, also under a name as ours are."""
    mine = {tmp_path / "model.safetensors", tmp_path / "cache.kv", tmp_path / "a.safetensors.1.ab.tmp"}
    for path in mine:
        path.write_bytes(b"precious")
    saved, weights = (tmp_path / f"{c * 32}.safetensors" for c in "ab")
    filled(MODEL, TEXT).save(saved)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, weights)
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    PromptStore(directory=tmp_path).close()
    assert {*mine, saved, weights} <= set(tmp_path.iterdir())
    assert load_cache(saved, MODEL).lengths == [40]


def test_an_index_never_deletes_outside_its_directory(tmp_path):
    (tmp_path / "precious").write_text("x")
    with PromptStore(directory=tmp_path / "store") as store:
        stored(store, MODEL, TEXT)
    changed(tmp_path / "store", "UPDATE files SET name = '../precious', state = 'going' WHERE rowid = 1")
    with PromptStore(directory=tmp_path / "store") as store:
        store.clear()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("directory", ["", "a\0b", 3, "/proc/zz", b"x"])
def test_a_directory_that_is_none(directory):
    with pytest.raises(InputError, match="directory"):
        PromptStore(directory=directory)


def test_an_interrupt_as_a_transaction_begins(tmp_path, monkeypatch):
    """It comes when BEGIN is done and nothing else is: the others are not locked out."""
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.05)
    store = PromptStore(0, tmp_path)
    real = store._disk.index._db

    class Interrupted:
        def execute(self, sql, *rest):
            done = real.execute(sql, *rest)
            if sql == "BEGIN IMMEDIATE":
                raise KeyboardInterrupt
            return done

        def __getattr__(self, name):
            return getattr(real, name)

    store._disk.index._db = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        stored(store, MODEL, TEXT)
    store._disk.index._db = real
    assert not real.in_transaction
    real.execute("BEGIN IMMEDIATE")  # as if it came a line earlier still: the next change undoes it
    assert stored(store, MODEL, TEXT).on_disk
    with PromptStore(0, tmp_path) as other:
        assert stored(other, MODEL, TEXT[:20]).on_disk


DAMAGE = [
    "UPDATE pieces SET tokens = x'010203'",
    "UPDATE pieces SET tokens = 'abc'",
    "UPDATE pieces SET stop = 3",
    "UPDATE pieces SET stop = 'x'",
    "UPDATE pieces SET file = '../precious'",
    "UPDATE pieces SET parent = id",
    "UPDATE pieces SET used = 'never'",
    "UPDATE spaces SET model = '{'",
    "UPDATE spaces SET identity = x'ff'",
    "UPDATE files SET owner = 'x', state = 'writing'",
    "UPDATE files SET bytes = 'much'",
    "UPDATE files SET bytes = 9e99",
    "DELETE FROM spaces",
    "DROP TABLE marks",
]


@pytest.mark.parametrize("sql", DAMAGE)
def test_a_damaged_index_is_a_miss(sql, tmp_path):
    with PromptStore(directory=tmp_path) as store:
        stored(store, MODEL, TEXT)
    changed(tmp_path, sql)
    for limit in (None, 50_000):
        with PromptStore(0, tmp_path, limit) as store:
            asked = [*TEXT, 1]
            assert_hot_is_cold(MODEL, store.lookup(MODEL, asked), asked)
            store.explain(MODEL, asked, salt="other")
            stored(store, MODEL, TEXT[:20])
            assert_hot_is_cold(MODEL, store.lookup(MODEL, asked), asked)
            store.stats()
    for look in (describe_store, verify_store):
        try:
            look(tmp_path)
        except LoadError as error:
            assert str(tmp_path) in str(error)


def test_damaged_rows_are_counted(tmp_path):
    with PromptStore(0, tmp_path) as store:
        stored(store, MODEL, TEXT)
        changed(tmp_path, DAMAGE[0])
        assert store.lookup(MODEL, [*TEXT, 1]).cached == 0
        stats = store.stats()
        assert stats.disk_errors and "damaged" in stats.last_disk_error
    assert "damaged" in verify_store(tmp_path)["broken"][0]["what"]


def limited(tier: DiskTier, full: list[bool]):
    """The tier's index cannot be written while ``full`` says so."""
    open_, tier_writing = tier.index._db.execute, tier.index

    class Full:
        def execute(self, sql, *rest):
            if full[0] and not sql.startswith(("SELECT", "PRAGMA")):
                raise sqlite3.OperationalError("database or disk is full")
            return open_(sql, *rest)

        def __getattr__(self, name):
            return getattr(real, name)

    real = tier_writing._db
    tier_writing._db = Full()


def test_a_full_disk_can_be_cleared(tmp_path, monkeypatch):
    """The index cannot be written before files have gone."""
    store, full = PromptStore(0, tmp_path), [True]
    stored(store, MODEL, TEXT)
    limited(store._disk, full)
    store.clear()
    assert not list(tmp_path.glob("*.safetensors")) and store.stats().disk_bytes == 0
    assert stored(store, MODEL, TEXT).on_disk
    check(store)
    limited(store._disk, full)
    monkeypatch.setattr(store._disk.index, "open", lambda: None)
    monkeypatch.setattr(store._disk.index, "close", lambda: None)
    with pytest.raises(OSError, match="not cleared.*full"):
        store.clear()


def test_a_directory_that_can_only_be_read():
    """In a child that is nobody, as root may write anywhere."""
    directory = Path(tempfile.mkdtemp())
    try:
        with PromptStore(directory=directory) as store:
            stored(store, MODEL, TEXT)
        for path in directory.iterdir():
            path.chmod(0o444)
        directory.chmod(0o555)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setuid(65534)
                with PromptStore(0, directory) as store:
                    assert store.lookup(MODEL, TEXT).cached == 39
                    done = stored(store, MODEL, [*TEXT, 1])
                    assert not done.on_disk and "reading only" in done.reason and "permission" in done.reason
                    assert store.stats().disk_errors == 0
                    try:
                        store.clear()
                    except OSError as error:
                        assert "Permission" in str(error) and "delete" not in str(error)
                    else:
                        raise AssertionError
                assert describe_store(directory)["pieces"]
                assert verify_store(directory)["broken"] == []
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        directory.chmod(0o755)
        shutil.rmtree(directory)


def test_a_pin_without_memory_holds_on_the_disk(tmp_path):
    with PromptStore(0, tmp_path, directory_bytes=40_000) as store:
        stored(store, MODEL, TEXT[:14])
        with store.pin(MODEL, TEXT[:14]) as pin:
            assert pin.tokens == 14
            for seed in range(20):
                stored(store, MODEL, random_tokens(14, 50 + seed))
            assert store.stats().disk_evictions > 0
            assert store.lookup(MODEL, [*TEXT[:14], 1]).cached == 14
        assert store.pin(MODEL, [96, 95]).tokens == 0


def test_what_another_process_evicts_meanwhile_is_not_broken(tmp_path, monkeypatch):
    with PromptStore(0, tmp_path) as mine, PromptStore(0, tmp_path) as other:
        stored(mine, MODEL, TEXT)
        load = DiskTier.load

        def evicted(self, *arguments):
            other.clear()
            return load(self, *arguments)

        monkeypatch.setattr(DiskTier, "load", evicted)
        assert mine.lookup(MODEL, TEXT).cached == 0
        assert mine.stats().broken == 0


def test_what_is_refused_and_what_is_the_limit(tmp_path):
    with PromptStore(0, tmp_path) as store:
        done = stored(store, MODEL, TEXT)
        assert done.on_disk and done.reason == "" and store.stats().refused == 0
    with PromptStore() as store:
        stored(store, MODELS["full"], TEXT)
        found = store.lookup(MODELS["full"], [*TEXT, 1], max_length=38)
        assert found.cached == 38 and "max_length is 38" in found.reason
        assert "max_length" not in store.lookup(MODELS["full"], [*TEXT, 1], max_length=41).reason


def test_questions_that_are_none():
    with PromptStore() as store:
        with pytest.raises(InputError, match="model is 'int'"):
            store.lookup(3, TEXT)
        for name in ("nonsense", "batch_size"):
            with pytest.raises(InputError, match=f"{name} is no option.*slack"):
                store.lookup(MODEL, TEXT, **{name: 1})
