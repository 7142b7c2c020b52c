"""Exact KV caches. Knows positions, rows and bytes; knows nothing of models or text."""

from exactkv.cache.batch import join
from exactkv.cache.cache import Cache
from exactkv.cache.checkpoint import CheckpointPolicy
from exactkv.cache.checks import check_lengths
from exactkv.cache.file import describe_file, load_cache
from exactkv.cache.layer import AttentionLayer
from exactkv.cache.pattern import AttentionPattern, ChunkedAttention, FullAttention, SlidingWindow, visible
from exactkv.cache.recurrent import RecurrentLayer, StatePart, StateParts
from exactkv.cache.row import CacheSpec
from exactkv.cache.storage import make_storage
from exactkv.cache.tables import RowTables
from exactkv.cache.uncached import uncached_step
from exactkv.cache.view import KVSegment, KVView, RowView, Step

__all__ = [
    "AttentionLayer", "AttentionPattern", "Cache", "CacheSpec", "CheckpointPolicy", "ChunkedAttention", "FullAttention",
    "KVSegment", "KVView", "RecurrentLayer", "RowTables", "RowView", "SlidingWindow", "StatePart", "StateParts", "Step",
    "check_lengths", "describe_file", "join", "load_cache", "make_storage", "uncached_step", "visible",
]  # fmt: skip
