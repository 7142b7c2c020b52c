"""transformers as a target: its Cache classes, and its ways to generate. What is done is in `transformers_calls`."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from exactkv.errors import InputError, LoadError
from exactkv.verify.configs import read_config
from exactkv.verify.layout import describe_layers
from exactkv.verify.shrink import shrink
from exactkv.verify.target import Array, Completion, Generator, NotSupported, Refused, Request, Target, Tokens, brief
from exactkv.verify.targets import transformers_calls as calls
from exactkv.verify.targets.transformers_script import script

SMALL = 5_000_000
"""Parameters up to which a hundred calls take no time."""
UNKNOWN = 1 << 30


def load(model: str, *, dtype: str = "float32", seed: int = 0, attention: str | None = None) -> TransformersTarget:
    """``model``: a directory with weights, a GGUF file, a hub id; or a config.json (or a directory with nothing
    else): then a tiny random model of its architecture. ``attention``: "sdpa", "eager" or the library's choice."""
    config = read_config(model)
    if config is None:
        return from_recipe({"model": model, "dtype": dtype, "attention": attention})
    small = shrink(config, seed)
    return from_recipe({"config": small, "seed": seed, "dtype": dtype, "attention": attention})


def from_recipe(recipe: dict[str, Any]) -> TransformersTarget:
    quiet()
    dtype, attention = recipe.get("dtype", "float32"), recipe.get("attention")
    if "model" in recipe:
        return TransformersTarget(pretrained(recipe["model"], dtype, attention), recipe=recipe)
    try:
        built = calls.build(recipe["config"], recipe["seed"], dtype, attention)
    except Exception as error:  # whatever a config makes the library stumble over
        kind = recipe["config"].get("model_type")
        raise LoadError(f"transformers cannot build a tiny {kind} model: {brief(error)}") from error
    check_causal(built)
    return TransformersTarget(built, recipe=recipe)


def pretrained(model: str, dtype: str, attention: str | None) -> Any:
    """The real model."""
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attention is not None:
        options["attn_implementation"] = attention
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        model, options["gguf_file"] = str(path.parent), path.name
    try:
        return AutoModelForCausalLM.from_pretrained(model, **options).eval().requires_grad_(False)
    except Exception as error:
        raise LoadError(f"transformers cannot load {model}: {brief(error)}") from error


def check_causal(model: Any) -> None:
    """Raise LoadError for an encoder that the library also makes a language model of, such as BERT."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as masked

    kind = model.config.model_type
    if kind in masked and getattr(model.config, "is_decoder", True) is False and hasattr(model.config, "is_decoder"):
        raise LoadError(f"{kind} as configured sees the tokens after each position; expected a causal decoder")


def quiet() -> None:
    """No warnings and bars of the library on the user's terminal."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def asked(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call whose NotImplementedError means that the library does not offer it."""
    try:
        return call(*args, **options)
    except NotImplementedError as error:
        raise NotSupported(str(error) or f"{call.__name__} in this library") from error


class TransformersTarget(Target):
    """A model of transformers on the CPU. ``recipe``: how it was made; without one there is neither a second
    process nor a script. ``attention``: another implementation than the model's (a copy is taken then)."""

    engine = "transformers"

    def __init__(self, model: Any, attention: str | None = None, recipe: dict[str, Any] | None = None):
        quiet()
        if {p.device.type for p in model.parameters()} - {"cpu"}:
            raise InputError("the model is not on the CPU; move it there (model.cpu()) to verify it")
        if attention is not None or model.training:
            model = copy.deepcopy(model).eval()
        if attention is not None:
            model.set_attn_implementation(attention)
        self.model, self._made, self._wide = model, recipe, None
        text = model.config.get_text_config(decoder=True)
        fields = text.to_dict()
        self.name = f"transformers {text.model_type}"
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.vocab_size = int(text.vocab_size)
        self.layers = describe_layers(fields)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.small = sum(p.numel() for p in model.parameters()) <= SMALL
        self.config = recipe.get("config") if recipe else None
        ropes = rope_types(fields)
        self.length_dependent = bool(ropes & {"longrope", "su", "dynamic"})
        room = fields.get("max_position_embeddings") or fields.get("n_positions") or UNKNOWN
        self.max_length = UNKNOWN if "dynamic" in ropes else int(room)
        self.caches = cache_kinds(model)
        self.unbounded_caches = ("dynamic, no config",)
        self.quantized_caches = quantized_kinds(model)
        self.generators = generators(model)

    # Required.

    def forward(self, rows: Sequence[Tokens]) -> Array:
        return calls.full(self.model, rows)  # type: ignore[no-any-return]

    def new_cache(self, kind: str | None = None, step: int | None = None, max_length: int | None = None) -> Any:
        return asked(calls.new_cache, self.model, kind or self.caches[0], step, max_length)

    def feed(self, cache: Any, tokens: Tokens, positions: bool = False) -> Array:
        if not tokens:
            return np.zeros((0, self.vocab_size))
        return asked(calls.feed, self.model, cache, tokens, positions)  # type: ignore[no-any-return]

    # Numbers.

    def precise(self, rows: Sequence[Tokens]) -> Array:
        if self.dtype == "float64":
            raise NotSupported("a wider dtype than float64")
        if self._wide is None:
            wide = copy.deepcopy(self.model)
            self._wide = wide.double() if self.dtype == "float32" else wide.float()
            if self.dtype == "float32" and hasattr(wide, "set_experts_implementation"):
                wide.set_experts_implementation("eager")  # grouped matrix products are for narrower numbers
        return calls.full(self._wide, rows)  # type: ignore[no-any-return]

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        generator = torch.Generator().manual_seed(seed)

        def disturb(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(out.shape, generator=generator, dtype=torch.float64)
            return (out.double() * (1 + scale * (2 * noise - 1))).to(out.dtype)

        hook = self.model.get_input_embeddings().register_forward_hook(disturb)
        try:
            return calls.full(self.model, rows)  # type: ignore[no-any-return]
        finally:
            hook.remove()

    def reseeded(self, seed: int) -> Target:
        if not self._made or "config" not in self._made:
            raise NotSupported("other weights")
        return from_recipe({**self._made, "seed": seed})

    def hidden(self, tokens: Tokens) -> list[Array]:
        with torch.no_grad():
            out = self.model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
        return [flat(h) for h in out.hidden_states]

    def feed_hidden(self, cache: Any, tokens: Tokens) -> list[Array]:
        out = asked(calls.run, self.model, cache, tokens, output_hidden_states=True)
        return [flat(h) for h in out.hidden_states]

    # What a cache says of itself.

    def length(self, cache: Any) -> int:
        return int(asked(calls.length, self.model, cache))

    def nbytes(self, cache: Any) -> int:
        return int(calls.nbytes(self.model, cache))

    # One cache.

    def rewind(self, cache: Any, count: int) -> int:
        if not count:
            return 0
        croppable(cache["past"])
        try:
            return int(asked(calls.rewind, self.model, cache, count))
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from error

    def rewindable(self, kind: str | None, count: int) -> Any:
        cache = asked(calls.new_cache, self.model, kind or self.caches[0])
        if not hasattr(cache["past"], "activate_past_recording"):
            return cache
        return asked(calls.rewindable, self.model, kind or self.caches[0], count)

    def settle(self, cache: Any) -> None:
        if cache["recording"]:
            croppable(cache["past"])
            calls.settle(self.model, cache)

    def fork(self, cache: Any) -> Any:
        return calls.fork(self.model, cache)

    def reset(self, cache: Any) -> Any:
        if cache["past"] is None or not hasattr(cache["past"], "reset"):
            raise NotSupported("reset")
        return calls.reset(self.model, cache)

    def recipe(self) -> dict[str, Any]:
        if not self._made:
            raise NotSupported("a second process: the model was given as an object")
        return {"engine": self.engine, **self._made}

    # Batches.

    def new_batch(self, rows: int, kind: str | None = None) -> Any:
        return asked(calls.new_batch, self.model, rows, kind)

    def feed_batch(self, batch: Any, rows: Sequence[Tokens]) -> list[Array]:
        if not any(rows):
            return [np.zeros((0, self.vocab_size)) for _ in rows]
        return asked(calls.feed_batch, self.model, batch, rows)  # type: ignore[no-any-return]

    def lengths(self, batch: Any) -> list[int]:
        return [int(n) for n in asked(calls.lengths, self.model, batch)]

    def select(self, batch: Any, rows: Sequence[int]) -> Any:
        if not rows:
            raise NotSupported("a batch of no rows")
        return asked(calls.select, self.model, batch, rows)

    def extract(self, batch: Any, row: int) -> Any:
        return asked(calls.extract, self.model, batch, row)

    def rewind_batch(self, batch: Any, counts: Sequence[int]) -> list[int]:
        if not any(counts):
            return [0 for _ in counts]
        croppable(batch["past"])
        try:
            return [int(n) for n in asked(calls.rewind_batch, self.model, batch, counts)]
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from error

    # Generation and reports.

    def generate(self, generator: str, requests: Sequence[Request], close_after: int | None = None) -> list[Completion]:
        if close_after is not None:
            raise NotSupported("closing a stream early")
        made = []
        for done, request in zip(asked(calls.generate, self.model, generator, requests), requests, strict=True):
            stopped = bool(done.tokens) and done.tokens[-1] in request.stop
            made.append(Completion(done.tokens, "stop" if stopped else None, done.cache))
        return made

    def preamble(self, functions: frozenset[str]) -> str:
        if not self._made:
            raise NotSupported("a script: the model was given as an object")
        return script(self._made, functions)


# What a model offers.


def rope_types(config: dict[str, Any]) -> set[str]:
    """The kinds of rope in a config, which may have one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    return {str(r.get("rope_type") or r.get("type") or "default") for r in ropes}


def cache_kinds(model: Any) -> tuple[str, ...]:
    """The kinds of cache that this model takes by the library's own word. DynamicCache without a config keeps
    everything and leaves windows to the mask: so it is for attention layers only."""
    if not model._supports_default_dynamic_cache():
        return ("made by the model",)
    try:
        kinds = set(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])
    except (KeyError, AttributeError, TypeError):
        return ("made by the model",)
    found = ["dynamic"]
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    recurrent = {"recurrent", "other"} & {layer.kind for layer in describe_layers(model.config.to_dict())}
    if not recurrent and kinds <= attention and kinds != {"full_attention"}:
        found.append("dynamic, no config")
    if kinds & {*attention, "hybrid", "hybrid_sliding"} and kinds <= set(STATIC_LAYER_TYPE_MAPPING):
        found.append("static")
    if made_otherwise(model):
        found.append("made by the model")
    return tuple(found)


def made_otherwise(model: Any) -> bool:
    """Whether the model, left to itself, makes a cache of other layers than DynamicCache of its config."""
    cache = calls.new_cache(model, "made by the model")
    try:
        calls.feed(model, cache, [1])
        own = [type(layer) for layer in cache["past"].layers]
        return own != [type(layer) for layer in DynamicCache(config=model.config).layers]
    except Exception:  # what fails here fails in the schedules, where it is reported
        return False


def quantized_kinds(model: Any) -> tuple[str, ...]:
    """QuantizedCache is for full attention alone, and needs a library that quantizes."""
    backends = {"quanto 4 bit": "optimum.quanto", "hqq 4 bit": "hqq"}
    found = []
    for kind, module in backends.items():
        try:
            if importlib.util.find_spec(module) and calls.new_cache(model, kind):
                found.append(kind)
        except (ImportError, ValueError):
            continue
    return tuple(found)


def generators(model: Any) -> tuple[Generator, ...]:
    """Ways to generate: by the library's own word, drafts are not for models of recurrent state. Continuous
    batching on a CPU needs psutil, and takes windows, but neither chunks nor recurrent state."""
    found = [Generator("generate", stops=True, caches=True), Generator("generate, no cache", stops=True)]
    kinds = cache_kinds(model)
    if "static" in kinds:
        found.append(Generator("generate, static cache", stops=True))
    if "past_key_values" in inspect.signature(model.forward).parameters:
        found.append(Generator("chunked prefill", stops=True, caches=True))
    if not model._is_stateful:
        for name in ("prompt lookup", "assisted, same model", "assisted, other model"):
            found.append(Generator(name, "speculative", stops=True, caches=True))
    found.append(Generator("batch", "batch", stops=True))
    paged = {layer.kind for layer in describe_layers(model.config.to_dict())} <= {"full", "sliding"}
    if importlib.util.find_spec("psutil") and "dynamic" in kinds and paged and not model._is_stateful:
        found.append(Generator("continuous batching", "batch", stops=True))
    return tuple(found)


def croppable(past: Any) -> None:
    """Raises NotSupported where the library does not claim that `crop` takes tokens back."""
    layers = getattr(past, "layers", [])
    if not layers or not all(hasattr(layer, "crop") for layer in layers):
        raise NotSupported("rewinding this kind of cache")
    if not getattr(past, "is_croppable", True):
        raise NotSupported("rewinding recurrent state, or a cache that says it is not croppable")


def flat(states: torch.Tensor) -> Array:
    """Hidden states of one row: [T, D]. Several streams of states (Gemma 3n) lie side by side."""
    if states.ndim == 4:  # [streams, 1, T, D]
        states = states.permute(1, 2, 0, 3).flatten(2)
    return states[0].double().numpy()
