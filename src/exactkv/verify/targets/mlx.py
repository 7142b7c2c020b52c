"""mlx-lm as a target. What is asked of the library stands in `mlx_calls`, `mlx_batches` and `mlx_generators`.

The calls hold for every version of mlx-lm from 0.24 on; what a version lacks is not supported there. Models that
are built or loaded here set the default device of mlx to the CPU, for float32 that is float32 and for order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from exactkv.errors import LoadError
from exactkv.verify.configs import read_config
from exactkv.verify.shrink import describe_layers, text_config
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

try:
    from exactkv.verify.targets import mlx_batches as batches
    from exactkv.verify.targets import mlx_calls as calls
    from exactkv.verify.targets import mlx_generators as generators
    from exactkv.verify.targets.mlx_configs import candidates
except ImportError as error:
    raise LoadError(
        f"mlx-lm cannot be imported ({error}); install it with: pip install mlx-lm, and on Linux 'mlx[cpu]' too"
    ) from error

SMALL = 5_000_000
"""Parameters up to which a hundred calls take no time."""
GENERATORS = (
    Generator("generate_step", caches=True, closes=True),
    Generator("generate_step, small prefill steps", caches=True, closes=True),
    Generator("stream_generate", stops=True, caches=True, closes=True),
    Generator("speculative, draft = same model", "speculative", caches=True, closes=True),
    Generator("speculative, draft = noised copy", "speculative", caches=True, closes=True),
    Generator("BatchGenerator", "batch", stops=True, caches=True),
    Generator("batch_generate", "batch", caches=True),
)
QUANTIZED = ("8 bit", "4 bit")


def load(model: str, *, dtype: str = "float32", seed: int = 0) -> MlxTarget:
    """A target of mlx-lm for a directory or hub id, or a tiny random one for a bare config.json.

    Raises LoadError where mlx-lm does not know the model, or it is not there."""
    config = read_config(model)
    if config is None:
        return _loaded(model, dtype)
    reasons: list[str] = []
    for candidate in candidates(config, seed):
        try:
            return from_recipe({"engine": "mlx", "config": candidate, "seed": seed, "dtype": dtype})
        except LoadError as error:
            reasons.append(str(error))
    raise LoadError(reasons[0])


def from_recipe(recipe: dict[str, Any]) -> MlxTarget:
    """Raises LoadError where the model cannot be built or does not run."""
    if "model" in recipe:
        return _loaded(recipe["model"], recipe["dtype"])
    config = recipe["config"]
    try:
        return MlxTarget(calls.build(config, recipe["seed"], recipe["dtype"]), recipe)
    except Exception as error:  # whatever a model's code comes up with, of a config that it does not expect
        kind = config.get("model_type")
        raise LoadError(f"mlx-lm cannot run a small {kind}: {type(error).__name__}: {error}") from error


def _loaded(model: str, dtype: str) -> MlxTarget:
    import mlx.core as mx
    from mlx_lm import utils

    path = Path(model).expanduser()
    if not path.is_dir():
        path = _downloaded(model)
    mx.set_default_device(mx.cpu)
    try:
        made = utils.load_model(path)
    except Exception as error:  # whatever a file or a model's code comes up with
        raise LoadError(f"mlx-lm cannot load {model}: {type(error).__name__}: {error}") from error
    built, config = made if isinstance(made, tuple) else (made, utils.load_config(path))
    if dtype != "auto":
        built.set_dtype(getattr(mx, dtype))
    return MlxTarget(built, {"engine": "mlx", "model": model, "dtype": dtype}, config)


def _downloaded(model: str) -> Path:
    """What mlx-lm itself takes of a repository; without the network only what is cached."""
    if model.count("/") != 1 or Path(model).suffix in (".json", ".gguf", ".safetensors"):
        raise LoadError(f"{model} is no directory, config.json or hub id; give one of them")
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    patterns = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:  # the hub's many kinds of error
        why = "it is not cached, and HF_HUB_OFFLINE is set" if offline else f"{type(error).__name__}: {error}"
        raise LoadError(f"{model} cannot be had from the hub: {why}") from error


def supported(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The call; what mlx-lm does not implement is not supported, every other error is the library's own."""
    try:
        return call(*given, **named)
    except NotImplementedError as error:
        raise NotSupported(str(error) or "mlx-lm does not implement it") from error
    except ValueError as error:
        if "not yet support batching" not in str(error):
            raise
        raise NotSupported(str(error)) from error


class MlxTarget(Target):
    """A model of mlx-lm. ``recipe``: how it was made; ``config``: the model's, to describe its layers."""

    engine = "mlx"
    unbounded_caches = ("rotating",)

    def __init__(self, model: Any, recipe: dict[str, Any] | None = None, config: dict[str, Any] | None = None):
        import mlx.core as mx
        from mlx.utils import tree_flatten

        self.model, self._made = model, recipe
        self.config = recipe.get("config") if recipe else None
        config = config or self.config or {}
        self.versions = {name: metadata.version(name) for name in ("mlx-lm", "mlx")}
        weights = [w for _, w in tree_flatten(model.parameters())]
        self.small = sum(w.size for w in weights) <= SMALL
        floating = [w.dtype for w in weights if mx.issubdtype(w.dtype, mx.floating)]
        self.dtype = str(floating[0]).removeprefix("mlx.core.") if floating else "float32"
        self.name = f"mlx-lm {config.get('model_type') or getattr(model, 'model_type', type(model).__name__)}"
        self.layers: tuple[Layer, ...] = tuple(describe_layers(text_config(config))) if config else ()
        self._full = self._one_pass()
        self.vocab_size = int(self._full(model, [[1, 2]]).shape[-1])
        text = text_config(config)
        self.max_length = text.get("max_position_embeddings") or text.get("n_positions") or 1 << 30
        self.caches = ("default",) if hasattr(model, "make_cache") else ("default", "rotating")
        self.quantized_caches = tuple(kind for kind in QUANTIZED if self._runs(kind))
        self.generators = GENERATORS

    def _one_pass(self) -> Callable[..., Array]:
        """The pass without a cache; a few models of mlx-lm cannot run one, there it goes through an empty cache."""
        try:
            calls.full(self.model, [[1, 2]])
        except Exception as error:  # whatever a model's code comes up with
            calls.full_through_cache(self.model, [[1, 2]])
            self.name += f" (no pass without a cache: {type(error).__name__})"
            return calls.full_through_cache
        return calls.full

    def _runs(self, kind: str) -> bool:
        try:
            cache = calls.new_cache(self.model, kind)
            calls.feed(self.model, cache, [1, 2])
        except Exception:  # heads too narrow, layers that mlx-lm does not quantize, sinks
            return False
        return any(hasattr(c, "bits") for c in calls.parts(cache))

    # Required.

    def forward(self, rows: Sequence[Tokens]) -> Array:
        return self._full(self.model, rows)

    def new_cache(self, kind: str | None = None, step: int | None = None, max_length: int | None = None) -> Any:
        return supported(calls.new_cache, self.model, kind, step, max_length)

    def feed(self, cache: Any, tokens: Tokens, positions: bool = False) -> Array:
        logits: Array = supported(calls.feed, self.model, cache, tokens, positions)
        return logits

    # The numbers of the model itself.

    def precise(self, rows: Sequence[Tokens]) -> Array:
        if self._full is not calls.full:
            raise NotSupported("a wider dtype: the model runs with a cache only")
        logits: Array = supported(calls.precise, self.model, rows)
        return logits

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        logits: Array = supported(calls.jittered, self.model, rows, scale, seed, self._full)
        return logits

    def reseeded(self, seed: int) -> Target:
        if self._made is None or "config" not in self._made:
            raise NotSupported("other weights: the model was not built here")
        return from_recipe({**self._made, "seed": seed})

    def hidden(self, tokens: Tokens) -> list[Array]:
        cache = None if self._full is calls.full else calls.new_cache(self.model)
        return list(supported(calls.hidden, self.model, tokens, cache))

    def feed_hidden(self, cache: Any, tokens: Tokens) -> list[Array]:
        return list(supported(calls.hidden, self.model, tokens, cache))

    # One cache.

    def length(self, cache: Any) -> int:
        return int(supported(calls.length, cache))

    def nbytes(self, cache: Any) -> int:
        return int(calls.nbytes(cache))

    def rewind(self, cache: Any, count: int) -> int:
        if not calls.rewinds(self.model):
            raise NotSupported("rewind: a layer's cache cannot be trimmed")
        reported = calls.rewind(cache, count)
        if count > 0 and reported == 0:
            raise Refused(f"mlx-lm does not trim {count} tokens")
        return reported

    def fork(self, cache: Any) -> Any:
        return calls.fork(cache)

    def save(self, cache: Any, path: Path) -> None:
        supported(calls.save, cache, path)

    def load(self, path: Path) -> Any:
        return supported(calls.load, path)

    def load_batch(self, path: Path, rows: int) -> Any:
        return supported(batches.load_batch, path, rows)

    def reported_nbytes(self, cache: Any) -> int:
        return int(supported(calls.reported_nbytes, cache))

    def recipe(self) -> dict[str, Any]:
        if self._made is None:
            raise NotSupported("a second process: the model was given as an object")
        return self._made

    # Batches.

    def new_batch(self, rows: int, kind: str | None = None) -> Any:
        return supported(batches.new_batch, self.model, rows, kind)

    def feed_batch(self, batch: Any, rows: Sequence[Tokens]) -> list[Array]:
        return list(supported(batches.feed_batch, self.model, batch, rows))

    def lengths(self, batch: Any) -> list[int]:
        return list(supported(batches.lengths, batch))

    def select(self, batch: Any, rows: Sequence[int]) -> Any:
        return supported(batches.select, batch, rows)

    def join(self, caches: Sequence[Any]) -> Any:
        return supported(batches.join, caches)

    def extract(self, batch: Any, row: int) -> Any:
        return supported(batches.extract, batch, row)

    def rewind_batch(self, batch: Any, counts: Sequence[int]) -> list[int]:
        reported = list(supported(batches.rewind_batch, batch, counts))
        if any(counts) and not any(reported):
            raise Refused("mlx-lm does not trim this batch")
        return reported

    # A store of prefixes.

    def new_store(self, entries: int | None = None) -> Any:
        return supported(batches.new_store, entries)

    def put(self, store: Any, tokens: Tokens, cache: Any, salt: str = "") -> None:
        batches.put(store, tokens, cache, salt)

    def get(self, store: Any, tokens: Tokens, salt: str = "") -> Hit:
        return Hit(*batches.get(store, tokens, salt))

    def store_nbytes(self, store: Any) -> tuple[int, int]:
        said, held = supported(batches.store_nbytes, store)
        return int(said), int(held)

    # Generation.

    def generate(self, generator: str, requests: Sequence[Request], close_after: int | None = None) -> list[Completion]:
        done = supported(generators.generate, self.model, generator, requests, close_after)
        return [Completion(**completion._asdict()) for completion in done]

    # For reports.

    def preamble(self, functions: frozenset[str]) -> str:
        from exactkv.verify.targets.mlx_script import preamble

        if self._made is None:
            raise NotSupported("a script: the model was given as an object")
        return preamble(self._made, self._full.__name__, functions)
