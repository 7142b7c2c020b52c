"""Prompt stores: exact reuse between texts that begin alike, in memory and on the disk."""

from exactkv.cache.store.report import Inserted, Lookup, StoreStats
from exactkv.cache.store.store import Pin, PromptStore

__all__ = ["Inserted", "Lookup", "Pin", "PromptStore", "StoreStats"]
