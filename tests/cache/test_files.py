"""Saved caches: whole in another process, refused where anything differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exactkv
from exactkv.errors import LoadError
from tests.cache.helpers import MIXED, feed
from tests.hybrid import hybrid_model
from tests.tiny import FULL, random_tokens, tiny_model, window

MODELS = {"mixed": lambda: tiny_model(MIXED), "hybrid": hybrid_model, "full": lambda: tiny_model([FULL])}
GO_ON = """
import sys, torch, exactkv
from tests.cache.test_files import MODELS, MORE
from tests.cache.helpers import feed
model = MODELS[sys.argv[1]]()
cache = exactkv.load_cache(sys.argv[2], model)
torch.save([feed(model, cache, *[[t] for t in [t] * cache.batch_size]) for t in MORE], sys.argv[3])
"""
MORE = random_tokens(12, seed=5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [[0], [1], [7], [8], [30, 0, 13]], ids=str)
def test_another_process_goes_on_bit_for_bit(kind: str, rows: list[int], tmp_path: Path) -> None:
    model = MODELS[kind]()
    cache = model.new_cache(len(rows), step=4)
    width = max(rows)
    for start in range(0, width, 5):  # in pieces, so that runs move
        piece = [random_tokens(n, seed=r)[start : start + 5] for r, n in enumerate(rows)]
        feed(model, cache, *piece)
        cache.checkpoint()
    if width > 9:
        cache.rewind([max(0, n - 2) for n in rows])
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    subprocess.run([sys.executable, "-c", GO_ON, kind, str(path), str(tmp_path / "out")], check=True, timeout=60,
                   cwd=Path(__file__).parents[2])  # fmt: skip
    for ours, theirs in zip(
        [feed(model, cache, *([[t]] * len(rows))) for t in MORE], torch.load(tmp_path / "out"), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model([window(3)])
    cache = model.new_cache()
    model([random_tokens(9)], cache=cache)
    cache.checkpoint()
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache.save(path)
    return path


def test_every_altered_byte_is_noticed(saved: Path, tmp_path: Path) -> None:
    model, whole = tiny_model([window(3)]), saved.read_bytes()
    exactkv.load_cache(saved, model)
    broken = tmp_path / "broken"
    for i in range(0, len(whole), 7):
        broken.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(LoadError):
            exactkv.load_cache(broken, model)
    for i in range(0, len(whole), 131):
        broken.write_bytes(whole[:i])
        with pytest.raises(LoadError):
            exactkv.load_cache(broken, model)


def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    for other in (
        tiny_model([window(3)], seed=1),
        tiny_model([window(4)]),
        tiny_model([FULL]),
        tiny_model([window(3)], dtype=torch.float32),
    ):
        with pytest.raises(LoadError, match=r"cache\.safetensors"):
            exactkv.load_cache(saved, other)
    with pytest.raises(LoadError):
        exactkv.load_cache(tmp_path / "missing", tiny_model([FULL]))


def test_a_file_in_place_is_replaced_whole(saved: Path) -> None:
    model = tiny_model([window(3)])
    cache = exactkv.load_cache(saved, model)
    assert cache.tokens(0) == random_tokens(9) and cache.checkpoints(0) == [9]
    cache.save(saved)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
