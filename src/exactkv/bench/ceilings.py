"""What the machine can do at most, measured: memory read, and matrix products in a dtype.

Each is the best of several runs, of several ways to do it, so that a ratio to it does not flatter.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exactkv.bench.machine import available_bytes, seconds
from exactkv.bench.work import Work
from exactkv.ops import TORCH

INPUTS = 8192
"""Columns of the matrix that is read by a product with one row."""

PROBE, LONGEST = 256, 0.4
"""The side of the matrices by whose product it is foretold how long larger ones take, and the seconds that one may."""


@dataclass(frozen=True)
class Sizes:
    """``buffer``: bytes to read, many times what any cache holds. ``side``: of square matrices. ``calls`` are made
    between two looks at the clock, ``repeats`` times, after ``warm_up`` seconds."""

    buffer: int
    side: int
    calls: int
    repeats: int
    warm_up: float


SIZES = {"cpu": Sizes(1 << 30, 1024, 1, 4, 0.1), "cuda": Sizes(2 << 30, 8192, 10, 5, 0.5)}


@dataclass(frozen=True)
class Ceilings:
    """``reading``: bytes a second; ``reading_by``: what read the fastest; ``matmul``: operations a second, two a
    multiplication; ``matmul_side``: of the square matrices; ``seconds``: what measuring took."""

    reading: float
    reading_by: str
    matmul: float
    matmul_side: int
    seconds: float

    def least_seconds(self, work: Work) -> float:
        """The time under which ``work`` cannot be done: reading and computing go on side by side."""
        return max(work.bytes / self.reading, work.flops / self.matmul)

    def limit(self, work: Work) -> str:
        """Which of the two ceilings that is: "reading" or "matmul"."""
        return "reading" if work.bytes / self.reading >= work.flops / self.matmul else "matmul"


def measure_ceilings(device: torch.device, dtype: torch.dtype, sizes: Sizes | None = None) -> Ceilings:
    """The ceilings of ``device`` for arithmetic in ``dtype``. The buffer is made smaller where memory is short."""
    started = time.perf_counter()
    s = SIZES[device.type] if sizes is None else sizes
    free = available_bytes(device)
    nbytes = s.buffer if free is None else max(1 << 20, min(s.buffer, free // 4))
    rates = _reading_rates(device, dtype, nbytes, s)
    best = max(rates, key=lambda name: rates[name])
    matmul, side = _matmul_rate(device, dtype, s)
    return Ceilings(rates[best], best, matmul, side, time.perf_counter() - started)


def _reading_rates(device: torch.device, dtype: torch.dtype, nbytes: int, s: Sizes) -> dict[str, float]:
    """Bytes a second by each way of reading."""
    rows = max(1, nbytes // (INPUTS * dtype.itemsize))
    weight = torch.ones(rows, INPUTS, dtype=dtype, device=device)  # written, or pages would be missing
    x = torch.ones(1, INPUTS, dtype=dtype, device=device)
    words = weight.view(torch.float32)
    ways: dict[str, Callable[[], Any]] = {
        "a sum": words.sum,
        "a maximum": words.amax,
        "a product with one row": lambda: TORCH.linear(x, weight),
    }
    if kernel := _kernel(x, weight):
        ways["a product with one row (triton)"] = kernel
    return {name: weight.nbytes / _fastest(way, device, s) for name, way in ways.items()}


def _matmul_rate(device: torch.device, dtype: torch.dtype, s: Sizes) -> tuple[float, int]:
    """Operations a second, and the side of the matrices: smaller ones where a product would take long."""

    def product(side: int) -> Callable[[], Any]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return lambda: TORCH.linear(a, b)

    side, probe = s.side, min(s.side, PROBE)
    small = product(probe)
    small()
    taken = seconds(small, device)
    while side > probe and taken * (side / probe) ** 3 > LONGEST:
        side //= 2
    return 2 * side**3 / _fastest(product(side), device, s), side


def _kernel(x: Tensor, weight: Tensor) -> Callable[[], Any] | None:
    """The kernel by which captured steps read weights; None where they do not run."""
    kernels = weight.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if not kernels or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    from exactkv.ops.triton import launch

    out = torch.empty(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    return lambda: launch.gemv(x, weight, out)


def _fastest(work: Callable[[], Any], device: torch.device, s: Sizes) -> float:
    """The least time of one call."""

    def calls() -> None:
        for _ in range(s.calls):
            work()

    end = time.perf_counter() + s.warm_up
    seconds(work, device)
    while time.perf_counter() < end:
        seconds(calls, device)
    return min(seconds(calls, device) for _ in range(s.repeats)) / s.calls
