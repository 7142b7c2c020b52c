"""A local LLM inference engine whose KV caches are exact by construction.

``import exactkv`` is free of cost: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exactkv.cache import (
        AttentionPattern,
        Cache,
        CheckpointPolicy,
        ChunkedAttention,
        FullAttention,
        SlidingWindow,
        join,
    )
    from exactkv.cache.store import PromptStore
    from exactkv.errors import ExactKVError, InputError, IntegrityError, LoadError
    from exactkv.generation import Sampling, Structure, generate, stream
    from exactkv.models.load import load
    from exactkv.models.model import Model

__version__ = "0.1.0"

__all__ = [
    "AttentionPattern",
    "Cache",
    "CheckpointPolicy",
    "ChunkedAttention",
    "ExactKVError",
    "FullAttention",
    "InputError",
    "IntegrityError",
    "LoadError",
    "Model",
    "PromptStore",
    "Sampling",
    "SlidingWindow",
    "Structure",
    "generate",
    "join",
    "load",
    "load_cache",
    "stream",
    "verify",
]

_MODULES = {
    "exactkv.cache": (
        "AttentionPattern", "Cache", "CheckpointPolicy", "ChunkedAttention", "FullAttention", "SlidingWindow", "join",
        "load_cache",
    ),
    "exactkv.cache.store": ("PromptStore",),
    "exactkv.errors": ("ExactKVError", "InputError", "IntegrityError", "LoadError"),
    "exactkv.generation": ("Sampling", "Structure", "generate", "stream"),
    "exactkv.models.load": ("load",),
    "exactkv.models.model": ("Model",),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "verify":  # a module that can be called
        return import_module("exactkv.verify")
    if name not in _HOME:
        raise AttributeError(f"module 'exactkv' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
