"""What is asked of the machine beside speed: when this process began, and the most memory that something took."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """How long ``work`` takes, what it leaves to the device included."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def process_seconds() -> float | None:
    """How long this process has been running; None where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22: ticks since the machine began
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return None


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()


class PeakMemory:
    """The most memory in use since `reset`, over the weights: on CUDA of torch's allocator, on a CPU of the process
    (Linux only), over what it had when this was made."""

    def __init__(self, device: torch.device, weights: int):
        self.device = device
        self._before: int | None = weights
        if device.type != "cuda":
            gc.collect()
            _trim()
            self._before = _of_process("VmRSS")

    def reset(self) -> None:
        """Begin anew; memory that nothing refers to is given back first."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _trim()
        try:
            _FORGET.write_text("5")  # VmHWM begins anew at what is in use
        except OSError:
            self._before = None

    def over(self) -> int | None:
        """Bytes; None where the system does not say."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _of_process("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)


def _of_process(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) << 10 if found else None


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on the device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _trim() -> None:
    """Have the C library give back what it keeps of freed memory (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
