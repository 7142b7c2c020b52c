"""What is asked of mlx-lm's batches and of its store of prompts. As `mlx_calls`: plain functions for scripts too."""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as kv

from exactkv.verify.targets.mlx_calls import load, nbytes, new_cache, numbers


class Hit(NamedTuple):
    """A cache of the first ``length`` tokens asked for."""

    cache: Any
    length: int


class Batch(list):  # type: ignore[type-arg]
    """The caches of several rows. Still empty (before 0.31.2): made when the first prompts are known."""

    rows = 0


def new_batch(model: Any, rows: int, kind: Any = None) -> Any:
    """As `PromptProcessingBatch` starts: caches merged while they are empty."""
    if not hasattr(kv, "BatchKVCache"):
        raise NotImplementedError("batches")
    if kind in ("8 bit", "4 bit"):
        raise NotImplementedError("batches of quantized caches")
    batch = Batch()
    batch.rows = rows
    try:
        from mlx_lm.generate import PromptProcessingBatch  # noqa: F401 - versions without it pad prompts at the left
    except ImportError:
        return batch
    batch[:] = merged([new_cache(model, kind) for _ in range(rows)])
    return batch


def load_batch(path: Any, rows: int) -> Any:
    batch = Batch(load(path))
    batch.rows = rows
    return batch


def merged(caches: Any) -> Any:
    """Caches of a row each as a batch."""
    try:
        from mlx_lm.generate import _merge_caches
    except ImportError as error:
        raise NotImplementedError("joining batches") from error
    return Batch(_merge_caches(caches))


def left_padded(model: Any, padding: Any) -> Any:
    """Empty caches for prompts that are padded at the left, as older versions make them."""
    from mlx_lm.generate import _make_cache

    return _make_cache(model, padding, *[None] * (_make_cache.__code__.co_argcount - 2))


def feed_batch(model: Any, batch: Any, rows: Any) -> Any:
    """Each row its own tokens, as the library's prompt processing does: logits [n_i, V] a row."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    padding = [width - n for n in lengths]
    at_left = not batch
    if at_left:
        batch[:] = left_padded(model, padding)
    elif any(padding):
        if not all(hasattr(c, "prepare") for c in batch):
            raise NotImplementedError("rows of different lengths for a batch on its way")
        for c in batch:
            c.prepare(lengths=lengths, right_padding=padding)
    tokens = [[0] * p + list(r) if at_left else list(r) + [0] * p for r, p in zip(rows, padding, strict=True)]
    logits = model(mx.array(tokens), cache=batch)
    mx.eval(logits, [c.state for c in batch])
    if any(padding) and not at_left:
        for c in batch:
            c.finalize()
        mx.eval([c.state for c in batch])
    logits = numbers(logits)
    return [x[width - n :] if at_left else x[:n] for x, n in zip(logits, lengths, strict=True)]


def lengths(batch: Any) -> Any:
    """What the first cache that counts tokens by row says they hold."""
    if not batch:
        return [0] * batch.rows
    for c in batch:
        for one in (c, *getattr(c, "caches", ())):
            if isinstance(getattr(one, "offset", None), mx.array):
                return [int(n) for n in one.offset.tolist()]
    raise NotImplementedError("a batch's lengths: no layer counts tokens by row")


def select(batch: Any, rows: Any) -> Any:
    """The batch with just these rows."""
    if not batch or not all(hasattr(c, "filter") for c in batch):
        raise NotImplementedError("selecting rows of a batch of such caches, or of one that holds nothing")
    for c in batch:
        c.filter(mx.array(list(rows), mx.int32))
    return batch


def join(caches: Any) -> Any:
    """All rows of caches and batches, in order: caches are merged, batches extended."""
    joined: Any = None
    singles: list[Any] = []
    for cache in [*caches, None]:
        if cache is not None and not isinstance(cache, Batch):
            singles.append(cache)
            continue
        for batch in ([merged(singles)] if singles else []) + ([] if cache is None else [cache]):
            if not batch or not all(hasattr(c, "extend") for c in batch):
                raise NotImplementedError("joining a batch of such caches, or one that holds nothing")
            if joined is not None:
                for c, other in zip(joined, batch, strict=True):
                    c.extend(other)
            joined = joined or batch
        singles = []
    return joined


def extract(batch: Any, row: int) -> Any:
    if not batch or not all(hasattr(c, "extract") for c in batch):
        raise NotImplementedError("taking a row out of a batch of such caches, or of one that holds nothing")
    return [c.extract(row) for c in batch]


def rewind_batch(batch: Any, counts: Any) -> Any:
    """The same number everywhere is all that mlx-lm can take back. Zeros where it declines."""
    if len(set(counts)) > 1:
        raise NotImplementedError("rewinding rows by different counts")
    if not batch or not kv.can_trim_prompt_cache(batch):
        return [0] * len(counts)
    return [int(kv.trim_prompt_cache(batch, counts[0]))] * len(counts)


def new_store(entries: Any = None) -> Any:
    """mlx-lm's prompt cache, which its server keeps."""
    try:
        from mlx_lm.models.cache import LRUPromptCache
    except ImportError:
        try:
            from mlx_lm.server import LRUPromptCache
        except ImportError as error:
            raise NotImplementedError("a prefix store") from error
    return LRUPromptCache(max_size=10 if entries is None else entries)


def put(store: Any, tokens: Any, cache: Any, salt: str = "") -> None:
    """The server files caches under (model, draft model, adapter): another salt is another model."""
    store.insert_cache(("model", salt), list(tokens), cache)


def get(store: Any, tokens: Any, salt: str = "") -> Any:
    """What is left to feed tells how much the cache holds."""
    cache, rest = store.fetch_nearest_cache(("model", salt), list(tokens))
    return Hit(cache, 0 if cache is None else len(tokens) - len(rest))


def store_nbytes(store: Any) -> Any:
    """What the store says, and the sum over the caches in its tree of prefixes."""
    if not hasattr(store, "nbytes"):
        raise NotImplementedError("a store's bytes")

    def entries(node: Any) -> Any:
        for value in node.values():
            if hasattr(value, "prompt_cache"):
                yield value.prompt_cache
            elif isinstance(value, dict):
                yield from entries(value)

    trie = getattr(store, "_trie", store)
    tree = getattr(trie, "_trie", None) or getattr(trie, "_cache", {})
    return int(store.nbytes), sum(nbytes(prompt_cache) for prompt_cache in entries(tree))
