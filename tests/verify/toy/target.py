"""The toy engine as a `Target`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from exactkv.verify.target import Array, Completion, Generator, Hit, Layer, Refused, Request, Target, Tokens
from tests.verify.toy import files
from tests.verify.toy.cache import Cache, CacheError, feed, join
from tests.verify.toy.generate import Assisted, Lookup, Plain
from tests.verify.toy.model import Config, LayerConfig, Model
from tests.verify.toy.scheduler import Running, Scheduler
from tests.verify.toy.store import Store

PLAIN, LOOKUP, ASSISTED, SCHEDULER = "plain", "lookup speculation", "assisted speculation", "scheduler"


def from_recipe(recipe: dict[str, Any]) -> ToyTarget:
    layers = tuple(LayerConfig(**layer) for layer in recipe["config"]["layers"])
    return ToyTarget(Config(**{**recipe["config"], "layers": layers}), recipe["seed"])


class ToyTarget(Target):
    name = "toy"
    engine = "tests.verify.toy.target:from_recipe"
    dtype = "float64"
    caches = ("default",)
    quantized_caches = ("q8", "q4")
    generators = (
        Generator(PLAIN, "plain", stops=True, caches=True, closes=True),
        Generator(LOOKUP, "speculative", stops=True, caches=True, closes=True),
        Generator(ASSISTED, "speculative", stops=True, caches=True, closes=True),
        Generator(SCHEDULER, "batch", stops=True),
    )

    def __init__(self, config: Config, seed: int = 0):
        self.config, self.seed = asdict(config), seed
        self.model = Model(config, seed)
        self.vocab_size, self.max_length = config.vocab_size, config.max_length
        self.layers = tuple(Layer(layer.kind, layer.size) for layer in config.layers)
        self.length_dependent = config.long_after is not None

    # Required.

    def forward(self, rows: Sequence[Tokens]) -> Array:
        return self.model.forward(np.array(rows))

    def new_cache(self, kind: str | None = None, step: int | None = None, max_length: int | None = None) -> Cache:
        options = {} if step is None else {"step": step}
        return Cache(self.model, kind or "default", max_length=max_length, **options)

    def feed(self, cache: Cache, tokens: Tokens, positions: bool = False) -> Array:
        named = cache.lengths[0] + np.arange(len(tokens))[None] if positions else None
        return feed(cache, [tokens], named)[0]

    # Numbers.

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        drawn = np.random.default_rng(seed).uniform(-1, 1, self.model.embedding.shape)
        return self.model.forward(np.array(rows), noise=1 + scale * drawn)

    def reseeded(self, seed: int) -> Target:
        return type(self)(self.model.config, seed)

    def hidden(self, tokens: Tokens) -> list[Array]:
        seen: list[Array] = []
        self.model.forward(np.array([tokens]), seen=seen)
        return [x[0] for x in seen]

    def feed_hidden(self, cache: Cache, tokens: Tokens) -> list[Array]:
        seen: list[Array] = []
        feed(cache, [tokens], seen=seen)
        return [x[0] for x in seen]

    # One cache.

    def length(self, cache: Cache) -> int:
        return cache.lengths[0]

    def nbytes(self, cache: Cache) -> int:
        return cache.nbytes

    def rewind(self, cache: Cache, count: int) -> int:
        return self.rewind_batch(cache, [count])[0]

    def rewindable(self, kind: str | None, count: int) -> Cache:
        return Cache(self.model, kind or "default", slack=count)

    def fork(self, cache: Cache) -> Cache:
        return cache.fork()

    def reset(self, cache: Cache) -> Cache:
        cache.reset()
        return cache

    def save(self, cache: Cache, path: Path) -> None:
        files.save(cache, path)

    def load(self, path: Path) -> Cache:
        try:
            return files.load(self.model, path)
        except CacheError as error:
            raise Refused(str(error)) from error

    def load_batch(self, path: Path, rows: int) -> Cache:
        return self.load(path)

    def reported_nbytes(self, cache: Cache) -> int:
        return cache.nbytes

    def identifies_model(self) -> bool:
        return True

    def recipe(self) -> dict[str, Any]:
        return {"engine": self.engine, "config": self.config, "seed": self.seed}

    # Batches.

    def new_batch(self, rows: int, kind: str | None = None) -> Cache:
        return Cache(self.model, kind or "default", rows)

    def feed_batch(self, batch: Cache, rows: Sequence[Tokens]) -> list[Array]:
        return feed(batch, rows)

    def lengths(self, batch: Cache) -> list[int]:
        return list(batch.lengths)

    def select(self, batch: Cache, rows: Sequence[int]) -> Cache:
        return batch.select(rows)

    def join(self, caches: Sequence[Cache]) -> Cache:
        return join(caches)

    def extract(self, batch: Cache, row: int) -> Cache:
        return batch.select([row])

    def rewind_batch(self, batch: Cache, counts: Sequence[int]) -> list[int]:
        try:
            return batch.rewind(counts)
        except CacheError as error:
            raise Refused(str(error)) from error

    # A store.

    def new_store(self, entries: int | None = None) -> Store:
        return Store(entries)

    def put(self, store: Store, tokens: Tokens, cache: Cache, salt: str = "") -> None:
        store.put(tokens, cache, salt)

    def get(self, store: Store, tokens: Tokens, salt: str = "") -> Hit:
        found = store.get(tokens, salt)
        return Hit(found.cache, found.length, found.reported)

    def store_nbytes(self, store: Store) -> tuple[int, int]:
        return store.nbytes, store.true_nbytes()

    # Generation.

    def generate(self, generator: str, requests: Sequence[Request], close_after: int | None = None) -> list[Completion]:
        if generator == SCHEDULER:
            return self._scheduled(requests)
        make = {PLAIN: Plain, LOOKUP: Lookup, ASSISTED: Assisted}[generator]
        return [self._streamed(make(self.model, r.prompt, r.max_tokens, r.stop), close_after) for r in requests]

    def _streamed(self, text: Plain, close_after: int | None) -> Completion:
        received: list[int] = []
        running = text.run()
        for token in running:
            received.append(token)
            if len(received) == close_after:
                running.close()
                break
        return Completion(
            received, text.finish_reason, text.cache,
            prompt_tokens=len(text.prompt), completion_tokens=len(text.tokens),
        )  # fmt: skip

    def _scheduled(self, requests: Sequence[Request]) -> list[Completion]:
        running = [Running(list(r.prompt), r.max_tokens, frozenset(r.stop)) for r in requests]
        Scheduler(self.model).run(running)
        return [
            Completion(
                r.tokens, r.finish_reason, prompt_tokens=len(r.prompt), completion_tokens=len(r.tokens),
                cached_tokens=r.cached, forwarded=r.forwarded,
            )
            for r in running
        ]  # fmt: skip
