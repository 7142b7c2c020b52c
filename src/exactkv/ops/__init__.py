"""Arithmetic with several implementations behind one signature. ``reference`` is the specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from exactkv.ops import recurrent, recurrent_torch, reference
from exactkv.ops import torch as torch_ops


@dataclass(frozen=True)
class Ops:
    """One implementation of everything a decoder computes beside matrix products. Signatures: reference.py, and
    recurrent.py for what carries a state."""

    name: str
    attend: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    activate: Callable[..., Tensor]
    top_experts: Callable[..., tuple[Tensor, Tensor]]
    causal_conv: Callable[..., Tensor]
    selective_scan: Callable[..., tuple[Tensor, Tensor]]
    ssd_scan: Callable[..., tuple[Tensor, Tensor]]
    gated_delta_rule: Callable[..., tuple[Tensor, Tensor]]
    rg_lru: Callable[..., tuple[Tensor, Tensor]]


def _collect(name: str, module: object, recurrences: object) -> Ops:
    """The functions of both modules, by the names of the fields."""
    names = [f.name for f in fields(Ops) if f.name != "name"]
    return Ops(name, *(getattr(module, f, None) or getattr(recurrences, f) for f in names))


REFERENCE = _collect("reference", reference, recurrent)
TORCH = _collect("torch", torch_ops, recurrent_torch)

__all__ = ["REFERENCE", "TORCH", "Ops"]
