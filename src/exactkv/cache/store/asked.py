"""What a store is asked with, checked: the model, the tokens, the salt, the options."""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from exactkv.cache.cache import Cache
from exactkv.cache.checks import is_int, listed, require
from exactkv.cache.store.tree import Namespace, ids
from exactkv.errors import InputError


@runtime_checkable
class Maker(Protocol):
    """What a store asks of a model."""

    @property
    def new_cache(self) -> Callable[..., Cache]: ...


def made(model: Maker, rows: int, options: Mapping[str, Any]) -> Cache:
    """An empty cache of so many rows. Raises InputError where ``model`` is none, or has no such options."""
    require(isinstance(model, Maker), "model", type(model).__name__, "a model, such as exactkv.load() gives")
    _, *known = inspect.signature(model.new_cache).parameters  # the first is how many rows
    for name in options:
        if name not in known:
            raise InputError(f"{name} is no option here; those of model.new_cache are {', '.join(known)}")
    return model.new_cache(rows, **options)


def namespace_of(cache: Cache, salt: str) -> Namespace:
    require(isinstance(salt, str), "salt", type(salt).__name__, "a text")
    dtype = str(cache.storage.dtype).removeprefix("torch.")
    hidden = hashlib.sha256(b"exactkv salt " + salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else ""
    return Namespace(cache.spec.identity, cache.storage.name, dtype, str(cache.storage.device), hidden)


def ids_of(tokens: Sequence[int]) -> array[int]:
    given = listed("tokens", tokens)
    require(bool(given), "tokens", given, "at least one token id")
    for i, token in enumerate(given):
        if not is_int(token) or not 0 <= token < 1 << 62:
            raise InputError(f"tokens[{i}] is {token!r}; expected token ids, integers >= 0")
    return ids(given)


def limit_of(cache: Cache, text: array[int]) -> int:
    """The last position at which a token is left to feed, and the cache can be."""
    return len(text) - 1 if cache.max_length is None else min(len(text) - 1, cache.max_length)
