"""The disk tier: found again, whole or not at all, within its limit, whatever happens to its files."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest
import torch

from exactkv import LoadError, PromptStore
from exactkv.cache.store import index, writer
from exactkv.errors import InputError
from tests.cache.store.helpers import MODELS, assert_hot_is_cold, check, filled, stored
from tests.tiny import random_tokens, tiny_model

TEXT = random_tokens(40, 3)
EVERY = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_TOKENS", 7)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@EVERY
@pytest.mark.parametrize("merge", [True, False])
def test_found_again_by_another_store(name, merge, tmp_path):
    model = MODELS[name]
    with PromptStore(directory=tmp_path) as store:
        assert stored(store, model, TEXT, every=10).on_disk
    for asked, least in ((TEXT, 39), ([*TEXT, 1], 40), ([*TEXT[:33], 96, 96], 30), ([96, 5], 0)):
        with PromptStore(directory=tmp_path, merge=merge) as store:
            for reads in (True, False):
                before = store.stats().disk_reads
                found = store.lookup(model, asked)
                assert least <= found.cached < len(asked)
                assert_hot_is_cold(model, found, asked)
                assert reads or store.stats().disk_reads == before, "what was read is in memory now"
            assert store.stats().disk_hits == (least > 0)
            check(store)


@EVERY
def test_with_no_memory_at_all(name, tmp_path):
    model, store = MODELS[name], PromptStore(0, tmp_path)
    done = stored(store, model, TEXT, every=10)
    assert done.on_disk and not done.in_memory
    for asked in (TEXT, [*TEXT, 1], [*TEXT[:33], 96, 96]):
        found = store.lookup(model, asked)
        assert found.cached >= 30
        assert_hot_is_cold(model, found, asked)
    assert store.stats().bytes == 0
    check(store)


@EVERY
def test_the_limit_holds(name, tmp_path, monkeypatch):
    """Looked at before and after each file is written."""
    model, limit = MODELS[name], 60_000
    store = PromptStore(10_000, tmp_path, directory_bytes=limit)
    write, seen = writer.DiskTier.put, []

    def watched(*arguments, **options):
        made = write(*arguments, **options)
        on_disk = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
        assert on_disk <= store._disk.index.total() <= limit
        seen.append(on_disk)
        return made

    monkeypatch.setattr(writer.DiskTier, "put", watched)
    for seed in range(12):
        text = random_tokens(20, seed % 4) + random_tokens(6, seed)
        stored(store, model, text)
        found = store.lookup(model, text)
        assert_hot_is_cold(model, found, text)
        check(store)
    assert len(seen) > 12
    refused = PromptStore(0, tmp_path / "small", directory_bytes=100)
    done = stored(refused, model, TEXT)
    assert not done.on_disk and done.reason and refused.stats().refused_on_disk == 1


# Files that are not what was written.


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[:-5])
    else:
        content[{"header": 200, "first": -1, "length": 0}[how]] ^= 0x10
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["full", "hybrid"])
@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "header", "first", "length"])
def test_a_broken_file_is_never_served_and_is_dropped(name, how, tmp_path):
    model = MODELS[name]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT, every=10)
    for number in range(3):
        damage(files(tmp_path)[number], how)
        with PromptStore(directory=tmp_path) as store:
            asked = [*TEXT, 1]
            assert_hot_is_cold(model, store.lookup(model, asked), asked)
            check(store)
            stored(store, model, TEXT, every=10)
            assert store.stats().disk_errors == 0
    with PromptStore(directory=tmp_path) as store:
        found = store.lookup(model, [*TEXT, 1])
        assert_hot_is_cold(model, found, [*TEXT, 1])


@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_files_that_changed_places_are_not_served(name, tmp_path):
    model = MODELS[name]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT)
        stored(store, model, random_tokens(40, 5))
    contents = [f.read_bytes() for f in files(tmp_path)]
    for file, content in zip(files(tmp_path), contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    with PromptStore(directory=tmp_path) as store:
        for asked in (TEXT, random_tokens(40, 5)):
            found = store.lookup(model, asked)
            assert found.cached == 0
            assert_hot_is_cold(model, found, asked)
        assert store.stats().broken >= 2


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(24, "Too many open files"), OSError(5, "I/O")])
def test_what_cannot_be_read_now_is_not_dropped(error, tmp_path, monkeypatch):
    model = MODELS["hybrid"]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT)
    with PromptStore(directory=tmp_path) as store:
        opened = Path.open

        def failing(self, mode="r", *rest, **options):
            if self.suffix == ".safetensors":
                raise error
            return opened(self, mode, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", failing)
            found = store.lookup(model, TEXT)
            assert found.cached == 0
            assert_hot_is_cold(model, found, TEXT)
            assert store.stats().disk_errors > 0 and store.stats().broken == 0
        assert store.lookup(model, TEXT).cached == 39


def test_a_full_disk_is_a_refusal(tmp_path, monkeypatch):
    model, store = MODELS["hybrid"], PromptStore(directory=tmp_path)
    stored(store, model, TEXT[:20])

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = stored(store, model, TEXT)
    assert done.in_memory and not done.on_disk and done.reason
    assert "No space left" in store.stats().last_disk_error
    check(store)
    assert stored(store, model, TEXT).on_disk
    check(store)


def test_an_index_that_is_locked_or_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.05)
    model = MODELS["full"]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT[:20])
        other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        done = stored(store, model, TEXT)
        assert done.in_memory and not done.on_disk and store.stats().disk_errors
        assert store.lookup(model, TEXT).cached == 39
        other.execute("ROLLBACK")
        other.close()
        assert stored(store, model, TEXT).on_disk
    (tmp_path / "index.sqlite").write_bytes(b"x" * 5000)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"index.sqlite{suffix}").unlink(missing_ok=True)
    with pytest.raises(LoadError, match="cannot be used as an index"):
        PromptStore(directory=tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    PromptStore(directory=tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(LoadError, match="format 99"):
        PromptStore(directory=tmp_path)


def test_an_older_format_is_brought_up_to_date_or_refused(tmp_path):
    model = MODELS["full"]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT)
        held = store._disk.index
        held.db.execute("DROP TABLE gone")
        held.db.execute("DROP INDEX marks_used")
        held.db.execute("PRAGMA user_version = 1")
        held.read_only = "for a test"
        with pytest.raises(LoadError, match="older format 1"):
            held._make(held.path)
    with PromptStore(directory=tmp_path, directory_bytes=0) as store:
        assert "evicted" in store.explain(model, TEXT)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        PromptStore(directory=tmp_path / "file")


# What separates entries, and what is left behind.


def test_salt_and_model_separate_and_the_salt_is_not_on_the_disk(tmp_path):
    model, secret = MODELS["full"], "sk-0123456789-secret"
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT, salt=secret)
    for path in tmp_path.iterdir():
        assert secret.encode() not in path.read_bytes()
    with PromptStore(directory=tmp_path) as store:
        assert store.lookup(model, TEXT).cached == 0
        assert store.lookup(tiny_model([model.spec.layers[0].attention.pattern] * 2, seed=1), TEXT, secret).cached == 0
        float32 = tiny_model([model.spec.layers[0].attention.pattern] * 2, torch.float32)
        assert store.lookup(float32, TEXT, secret).cached == 0
        assert store.lookup(model, TEXT, secret).cached == 39
        assert "under another salt" in store.explain(model, TEXT)


def test_old_orphans_are_removed_and_young_ones_are_not(tmp_path):
    PromptStore(directory=tmp_path).close()
    names = [f"{'a' * 32}.safetensors", f".{'b' * 32}.safetensors.1.ab.tmp", "mine.txt"]
    for name in names:
        (tmp_path / name).write_text("x")
    PromptStore(directory=tmp_path).close()
    assert all((tmp_path / name).exists() for name in names)
    for name in names:
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    PromptStore(directory=tmp_path).close()
    assert [(tmp_path / name).exists() for name in names] == [False, False, True]


def test_an_entry_that_another_process_deletes_meanwhile(tmp_path):
    model = MODELS["hybrid"]
    with PromptStore(0, tmp_path) as mine, PromptStore(0, tmp_path) as other:
        stored(mine, model, TEXT)
        assert other.lookup(model, TEXT).cached == 39
        mine.clear()
        assert files(tmp_path) == [] and other.lookup(model, TEXT).cached == 0
        stored(other, model, TEXT)
        assert mine.lookup(model, TEXT).cached == 39


def test_a_pin_holds_on_the_disk_too(tmp_path):
    model = MODELS["sliding"]
    with PromptStore(directory=tmp_path, directory_bytes=40_000) as store:
        stored(store, model, TEXT[:14])
        with store.pin(model, TEXT[:14]):
            for seed in range(20):
                stored(store, model, random_tokens(14, 50 + seed))
        assert store.stats().disk_evictions > 0
    with PromptStore(directory=tmp_path) as store:
        assert store.lookup(model, [*TEXT[:14], 1]).cached >= 7


def test_what_is_used_in_memory_stays_on_the_disk(tmp_path):
    model = MODELS["full"]
    with PromptStore(directory=tmp_path, directory_bytes=80_000) as store:
        stored(store, model, TEXT)
        for seed in range(12):
            stored(store, model, random_tokens(14, 50 + seed))
            assert store.lookup(model, TEXT).cached == 39
        assert store.stats().disk_evictions > 0
    with PromptStore(directory=tmp_path) as store:
        assert store.lookup(model, TEXT).cached == 39


def test_a_checksum_is_what_tells(tmp_path, monkeypatch):
    """A deliberate fault: with checksums not compared, the altered file would be served."""
    model = MODELS["full"]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT)
    damage(files(tmp_path)[0], "first")
    from exactkv.cache import container

    class Blind(container.Header):
        def tensors(self, file):
            self.digests = {}
            for name, entry in self.entries.items():
                low, high = entry["data_offsets"]
                dtype = container.DTYPES[entry["dtype"]]
                yield name, torch.frombuffer(bytearray(file.read(high - low)), dtype=dtype).reshape(entry["shape"])

    with monkeypatch.context() as patch, PromptStore(directory=tmp_path) as store:
        patch.setattr(container, "Header", Blind)
        with pytest.raises(AssertionError):
            assert_hot_is_cold(model, store.lookup(model, [*TEXT, 1]), [*TEXT, 1])
    with PromptStore(directory=tmp_path) as store:
        assert_hot_is_cold(model, store.lookup(model, [*TEXT, 1]), [*TEXT, 1])
        assert store.stats().broken == 1


def test_inserting_from_a_found_cache_writes_what_is_new(tmp_path):
    model = MODELS["hybrid"]
    with PromptStore(directory=tmp_path) as store:
        stored(store, model, TEXT)
        written = store.stats().disk_writes
        found = store.lookup(model, [*TEXT, 1]).cache
        store.insert(found)
        assert store.stats().disk_writes == written
        store.insert(filled(model, [*TEXT, 5, 6]))
        assert store.stats().disk_pieces > 0 and store.stats().disk_writes > written


def test_an_edit_far_before_the_end_asks_again(tmp_path):
    """A cache found on the disk has one checkpoint; the store has them all."""
    model = MODELS["hybrid"]
    with PromptStore(0, tmp_path) as store:
        stored(store, model, TEXT, every=10)
        found = store.lookup(model, [*TEXT, 1])
        assert found.cached == 40 and found.cache.checkpoints(0) == [40]
        edited = [*TEXT[:35], 1, 2]
        again = store.lookup(model, edited)
        assert again.cached == 30
        assert_hot_is_cold(model, again, edited)
