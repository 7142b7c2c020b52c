"""Several caches made one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from exactkv.cache.cache import Cache
from exactkv.cache.checks import listed
from exactkv.errors import InputError


def join(caches: Iterable[Cache]) -> Cache:
    """One cache of all rows of ``caches``, in order; they may have any lengths, and be empty.

    They must be of the same model, dtype, device and maximum length. References are moved, rows are not
    copied; the caches given can be used from then on, each on its own. The greatest slack holds, and the first
    cache's ``checkpoint_policy``.
    """
    given: list[Cache] = listed("caches", caches)
    if not given:
        raise InputError("join was given no caches; expected at least one")
    for i, cache in enumerate(given):
        if not isinstance(cache, Cache):
            raise InputError(f"join was given {type(cache).__name__} at place {i}; expected caches")
    head = given[0]
    for i, cache in enumerate(given):
        for what, mine, theirs in (
            ("model", head.spec.identity, cache.spec.identity),
            ("storage", replace(head.storage, poison=False), replace(cache.storage, poison=False)),
            ("max_length", head.max_length, cache.max_length),
        ):
            if mine != theirs:
                raise InputError(f"cache {i} differs from cache 0 in its {what}: {theirs} instead of {mine}")
    return head._like(tuple(row for cache in given for row in cache._rows), given)
