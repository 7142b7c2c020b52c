"""Fixtures: small models in directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
