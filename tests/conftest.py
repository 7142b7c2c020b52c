"""What holds for every test: dead memory is poison, no network, few threads, hypothesis without deadlines."""

from __future__ import annotations

import os
import signal

os.environ["EXACTKV_POISON"] = "1"  # before anything that reads it
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; programs started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // WORKERS)))

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
