"""exactkv itself as a target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactkv.cache import Cache, ChunkedAttention, SlidingWindow, join, load_cache
from exactkv.cache.row import memories, state_tensors
from exactkv.cache.store import PromptStore
from exactkv.cache.store.memory import TOKEN_BYTES
from exactkv.cache.store.pieces import tensor_bytes
from exactkv.errors import InputError, LoadError
from exactkv.generation import stream
from exactkv.models.config import Config
from exactkv.models.load import load as load_model
from exactkv.models.load import read_spec, text_config
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.spec import LayerSpec
from exactkv.ops.packed import dense
from exactkv.verify.configs import read_config
from exactkv.verify.target import (
    Array,
    Completion,
    Generator,
    Hit,
    Layer,
    NotSupported,
    Refused,
    Request,
    Target,
    Tokens,
)

SMALL = 5_000_000
"""Parameters up to which a hundred calls take no time."""


def load(model: str, *, dtype: str = "float32", seed: int = 0) -> ExactKVTarget:
    """``model``: what `exactkv.load` takes, or a config.json (or a directory with nothing else): then a tiny
    random model of its architecture."""
    config = read_config(model)
    if config is None:
        return ExactKVTarget(load_model(model, device="cpu", dtype=dtype, progress=False))
    return from_recipe({"config": tiny(config, seed), "seed": seed, "dtype": dtype})


def tiny(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The shrunken config, without fields that shrinking has added and this family does not read: engines differ in
    which they ask for. What the config itself says and nobody reads stays an error."""
    from exactkv.verify import shrink

    small = shrink.shrink(text_config(config)[1], seed)
    family, fields = text_config(small)
    reader = Config(fields, family.name)
    family.spec(reader)
    strange = set(reader.unknown()) - shrink.text_config(config).keys()
    return {name: value for name, value in small.items() if name not in strange}


def from_recipe(recipe: dict[str, Any]) -> ExactKVTarget:
    dtype = getattr(torch, recipe.get("dtype", "float32"))
    if "model" in recipe:
        return ExactKVTarget(load_model(recipe["model"], device="cpu", dtype=dtype, progress=False))
    family, fields = text_config(recipe["config"])
    spec = read_spec(family, fields)
    weights = random_weights(spec, recipe["seed"], dtype, gain=1.5)
    return ExactKVTarget(Model(spec, weights, name=f"tiny {family.name}"), recipe)


class ExactKVTarget(Target):
    """An exactkv model. ``recipe``: how it was made, if from a config."""

    engine = "exactkv"
    caches: tuple[str, ...] = ("dense",)
    generators = (Generator("stream", stops=True, caches=True, closes=True),)

    def __init__(self, model: Model, recipe: dict[str, Any] | None = None):
        from exactkv import __version__

        self.model, self._made = model, recipe
        self.name = f"exactkv {model.name or model.spec.family}"
        self.versions = {"exactkv": __version__, "torch": torch.__version__}
        self.vocab_size, self.max_length = model.spec.vocab_size, model.spec.max_length
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.layers = tuple(_described(layer) for layer in model.spec.layers)
        self.small = sum(w.numel() for w in model.decoder.weights.values()) <= SMALL
        self.config = recipe["config"] if recipe else None
        self.quantized_caches = tuple(name for name in ("int8", "int4") if _keeps(model, name))

    # Required.

    def forward(self, rows: Sequence[Tokens]) -> Array:
        return _array(self.model([list(r) for r in rows]))

    def new_cache(self, kind: str | None = None, step: int | None = None, max_length: int | None = None) -> Cache:
        make = partial(self.model.new_cache, storage=kind or "dense", max_length=max_length)
        made = make() if step is None else make(step=step)
        if made.spec.identity != self.model.new_cache(0).spec.identity:
            raise NotSupported("a cache of another maximum: this model's rope follows it (dynamic NTK, long rope)")
        return made

    def feed(self, cache: Cache, tokens: Tokens, positions: bool = False) -> Array:
        if positions:
            raise NotSupported("positions named by the caller: the cache owns them")
        fed: Array = _array(self.model([list(tokens)], cache=cache))[0]
        return fed

    # Numbers.

    def precise(self, rows: Sequence[Tokens]) -> Array:
        wider = torch.float64 if self.model.dtype in (torch.float32, torch.float64) else torch.float32
        if wider == self.model.dtype:
            raise NotSupported("a wider dtype than float64")
        weights = {name: dense(w, wider) for name, w in self.model.decoder.weights.items()}
        model = Model(self.model.spec, weights, ops=self.model.decoder.ops, name=self.model.name)
        return _array(model([list(r) for r in rows]))

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        return _array(self._jittered(scale, seed)([list(r) for r in rows]))

    def quantized(self, kind: str, tokens: Tokens, scale: float = 0.0, seed: int = 0) -> Array:
        model = self._jittered(scale, seed) if scale else self.model
        logits: Array = _array(model([list(tokens)], storage=kind))[0]
        return logits

    def _jittered(self, scale: float, seed: int) -> Model:
        model = copy.copy(self.model)
        model.decoder = copy.copy(self.model.decoder)
        embedding = dense(model.decoder.embedding)
        noise = torch.rand(embedding.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        model.decoder.embedding = (embedding * (1 + scale * (2 * noise - 1))).to(embedding.dtype)
        return model

    def reseeded(self, seed: int) -> Target:
        if self._made is None:
            raise NotSupported("other weights")
        return from_recipe({**self._made, "seed": seed})

    def hidden(self, tokens: Tokens) -> list[Array]:
        return self._hidden(lambda: self.model([list(tokens)]))

    def feed_hidden(self, cache: Cache, tokens: Tokens) -> list[Array]:
        return self._hidden(lambda: self.model([list(tokens)], cache=cache))

    def _hidden(self, call: Callable[[], object]) -> list[Array]:
        decoder = self.model.decoder
        seen: list[Array] = []

        def recording(layer: Any) -> Any:
            def run(x: Tensor, *rest: Any) -> Tensor:
                if not seen:
                    seen.append(_states(x))
                out: Tensor = layer(x, *rest)
                seen.append(_states(out))
                return out

            return run

        layers = decoder.layers
        decoder.layers = [recording(layer) for layer in layers]
        try:
            call()
        finally:
            decoder.layers = layers
        return seen

    # One cache.

    def length(self, cache: Cache) -> int:
        return cache.lengths[0]

    def reported_nbytes(self, cache: Cache) -> int:
        return cache.nbytes

    def nbytes(self, cache: Cache) -> int:
        rows = [t for memory in memories(cache._rows) for parts in memory.buffers for t in parts.values()]
        return sum(t.nbytes for t in {id(t): t for t in [*rows, *state_tensors(cache._rows)]}.values())

    def rewind(self, cache: Cache, count: int) -> int:
        length = cache.lengths[0]
        return length - cache.rewind(length - count)[0]

    def rewindable(self, kind: str | None, count: int) -> Cache:
        return self.model.new_cache(storage=kind or "dense", slack=max(0, count - 1))

    def fork(self, cache: Cache) -> Cache:
        return cache.fork(1)

    def reset(self, cache: Cache) -> Cache:
        cache.rewind(0)
        return cache

    def save(self, cache: Cache, path: Path) -> None:
        cache.save(path)

    def load(self, path: Path) -> Cache:
        try:
            return load_cache(path, self.model)
        except LoadError as error:
            raise Refused(str(error)) from error

    def load_batch(self, path: Path, rows: int) -> Cache:
        return self.load(path)

    def identifies_model(self) -> bool:
        return True

    def recipe(self) -> dict[str, Any]:
        if self._made is None:
            raise NotSupported("a second process: the model was given as an object")
        return {"engine": "exactkv", **self._made}

    # Batches.

    def new_batch(self, rows: int, kind: str | None = None) -> Cache:
        return self.model.new_cache(rows, kind or "dense")

    def feed_batch(self, batch: Cache, rows: Sequence[Tokens]) -> list[Array]:
        lengths = [len(r) for r in rows]
        width = max(lengths, default=0)
        logits = _array(self.model([[*r, *[0] * (width - len(r))] for r in rows], cache=batch, lengths=lengths))
        return [one[:n] for one, n in zip(logits, lengths, strict=True)]

    def lengths(self, batch: Cache) -> list[int]:
        return batch.lengths

    def select(self, batch: Cache, rows: Sequence[int]) -> Cache:
        return batch.select(rows)

    def join(self, caches: Sequence[Cache]) -> Cache:
        return join(caches)

    def extract(self, batch: Cache, row: int) -> Cache:
        return batch.select([row])

    def rewind_batch(self, batch: Cache, counts: Sequence[int]) -> list[int]:
        lengths = batch.lengths
        reached = batch.rewind([n - c for n, c in zip(lengths, counts, strict=True)])
        return [n - r for n, r in zip(lengths, reached, strict=True)]

    # A store of prefixes.

    def new_store(self, entries: int | None = None) -> PromptStore:
        """Limited to the bytes that so many texts of some tokens take."""
        if entries is None:
            return PromptStore()
        cache, unlimited = self.new_cache(), PromptStore()
        self.feed(cache, [1] * min(self.max_length, 8))
        unlimited.insert(cache)
        return PromptStore(entries * unlimited.stats().bytes)

    def put(self, store: PromptStore, tokens: Tokens, cache: Cache, salt: str = "") -> None:
        store.insert(cache, salt=salt)

    def get(self, store: PromptStore, tokens: Tokens, salt: str = "") -> Hit:
        before = store.stats().reused_tokens
        found = store.lookup(self.model, tokens, salt)
        return Hit(found.cache, found.cached, store.stats().reused_tokens - before)

    def store_nbytes(self, store: PromptStore) -> tuple[int, int]:
        tokens = store.stats().tokens
        return store.stats().bytes, tensor_bytes(store._memory.found()) + TOKEN_BYTES * tokens

    # Generation.

    def generate(self, generator: str, requests: Sequence[Request], close_after: int | None = None) -> list[Completion]:
        done = []
        for request in requests:
            running = stream(self.model, list(request.prompt), request.max_tokens, stop_token_ids=list(request.stop))
            for _ in running:
                if close_after is not None and len(running.tokens) >= close_after:
                    running.close()
                    break
            stats = running.stats
            done.append(
                Completion(
                    list(running.tokens), running.finish_reason, running.cache,
                    prompt_tokens=stats.prompt_tokens, completion_tokens=stats.generated_tokens,
                )
            )  # fmt: skip
        return done


def _keeps(model: Model, storage: str) -> bool:
    """Whether the model has rows, of heads that this storage takes."""
    try:
        return bool(model.new_cache(0, storage).layers)
    except InputError:
        return False


def _described(layer: LayerSpec) -> Layer:
    if layer.attention is None:
        return Layer("recurrent")
    if layer.recurrent is not None:  # side by side: a state that sees everything, and rows
        return Layer("other")
    pattern = layer.attention.pattern
    if isinstance(pattern, SlidingWindow):
        return Layer("sliding", pattern.window, pattern.anchors)
    if isinstance(pattern, ChunkedAttention):
        return Layer("chunked", pattern.chunk_size, pattern.anchors)
    return Layer("full")


def _states(x: Tensor) -> Array:
    """Hidden states of one row, [T, D]; several streams of them [streams, 1, T, D] side by side."""
    one = x[0] if x.dim() == 3 else x[:, 0].transpose(0, 1).flatten(1)
    return np.array(_array(one))  # a copy: layers add in place


def _array(logits: Tensor | None) -> Array:
    assert logits is not None
    return np.asarray(logits.detach().to(torch.float64).cpu().numpy(), dtype=np.float64)
