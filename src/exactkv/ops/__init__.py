"""Arithmetic with several implementations behind one signature. ``reference`` is the specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from exactkv.ops import reference
from exactkv.ops import torch as torch_ops


@dataclass(frozen=True)
class Ops:
    """One implementation of everything a decoder computes beside matrix products. Signatures: reference.py."""

    name: str
    attend: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    activate: Callable[..., Tensor]
    top_experts: Callable[..., tuple[Tensor, Tensor]]


def _collect(name: str, module: object) -> Ops:
    return Ops(name, *(getattr(module, f) for f in ("attend", "linear", "experts", "gated", "activate", "top_experts")))


REFERENCE = _collect("reference", reference)
TORCH = _collect("torch", torch_ops)

__all__ = ["REFERENCE", "TORCH", "Ops"]
