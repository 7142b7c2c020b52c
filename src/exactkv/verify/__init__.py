"""Whether decoding with a cache equals one full forward pass: for exactkv, transformers, mlx-lm, or an engine of
your own.

``exactkv.verify(target)`` gives a report, ``exactkv.verify.assert_exact(target)`` is for tests.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from exactkv.verify.kinds import KINDS
from exactkv.verify.report import Diagnosis, Outcome, Report
from exactkv.verify.runner import assert_exact, explain, schedule_names, verify
from exactkv.verify.target import Completion, Generator, Hit, Layer, NotSupported, Refused, Request, Target

__all__ = [
    "KINDS",
    "Completion",
    "Diagnosis",
    "Generator",
    "Hit",
    "Layer",
    "NotSupported",
    "Outcome",
    "Refused",
    "Report",
    "Request",
    "Target",
    "assert_exact",
    "explain",
    "schedule_names",
    "verify",
]


class _CallableModule(ModuleType):
    """``exactkv.verify`` is the function and the module: importing the one would hide the other else."""

    def __call__(self, target: Any, **options: Any) -> Report:
        return verify(target, **options)


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _CallableModule
    _CallableModule.__call__.__doc__ = verify.__doc__
