"""A limit of time for what an engine under test is asked to do: a loop without an end must not hang the verifier."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT = 120.0
"""Seconds for one operation."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the block after so many seconds: in the main thread of a system with alarms;
    elsewhere there is no limit. An alarm of somebody else's is left alone."""
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not usable or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
