"""What is said of one GGUF architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exactkv.models.families.family import Names
from exactkv.models.gguf.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Architecture:
    """``model_types``: Hugging Face's names for what it may hold. ``config``: makes config.json's fields of the
    metadata. ``names``: of tensors, where they differ from those of the other architectures. ``permuted``: GGUF
    reorders the rows of q and k for its rope. ``norm_offset``: what it adds to norm weights. ``left_aside``: regular
    expressions of tensors that the decoder does not need."""

    model_types: tuple[str, ...]
    config: Callable[[Metadata], dict[str, Any]]
    names: Names = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    left_aside: tuple[str, ...] = ()


Table = Mapping[str, Architecture]
