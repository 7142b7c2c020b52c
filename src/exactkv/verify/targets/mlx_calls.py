"""What is asked of mlx-lm, as small plain functions: a model, a pass, one cache, files.

They need mlx, mlx_lm and numpy only and nothing of exactkv, because reproduction scripts print their source.
What mlx-lm does not offer raises NotImplementedError. Batches, stores and generators: `mlx_batches`.
"""

import copy
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as kv
from mlx_lm.utils import _get_classes


def build(config: Any, seed: int = 0, dtype: str = "float32") -> Any:
    """A model of mlx-lm with random weights, on the CPU. Matrices are scaled by what they sum over, a little up,
    so that attention matters; all else is as the library initialises it, with some noise."""
    mx.set_default_device(mx.cpu)
    mx.random.seed(seed)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(copy.deepcopy(config)))
    random = np.random.default_rng(seed)
    embeddings = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        noise = random.standard_normal(value.shape)
        if name in embeddings:
            new = noise
        elif value.ndim > 1 and name.endswith("weight") and "conv" not in name:
            new = 1.5 * noise / value.shape[-1] ** 0.5
        else:
            new = np.array(value.astype(mx.float32)) + 0.1 * noise
        weights.append((name, mx.array(new.astype(np.float32)).astype(getattr(mx, dtype))))
    model.load_weights(weights, strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def numbers(x: Any) -> Any:
    """As numpy float64, at once: nothing lazy is left that a later call could change."""
    if x.dtype != mx.float64:
        x = x.astype(mx.float32)
    return np.array(x).astype(np.float64)


def full(model: Any, rows: Any) -> Any:
    """One pass without a cache: logits [B, T, V]."""
    return numbers(model(mx.array([list(row) for row in rows])))


def full_through_cache(model: Any, rows: Any) -> Any:
    """One pass through an empty cache, for models that mlx-lm cannot run without."""
    logits = [model(mx.array([list(row)]), cache=kv.make_prompt_cache(model)) for row in rows]
    return numbers(mx.concatenate(logits))


def parts(caches: Any) -> Any:
    """All caches of all layers, those inside lists too."""
    for cache in caches:
        yield cache
        yield from parts(getattr(cache, "caches", ()))


def new_cache(model: Any, kind: Any = None, step: Any = None, max_length: Any = None) -> Any:
    """An empty cache: "default", "rotating" (as with max_kv_size), "8 bit", "4 bit" (as with kv_bits)."""
    rotating = kind == "rotating"
    if max_length is not None and not rotating:
        raise NotImplementedError("reserving a length")
    cache = kv.make_prompt_cache(model, (max_length or 4096) if rotating else None)
    if step is not None:
        stepped = [c for c in parts(cache) if hasattr(c, "step")]
        for c in stepped:
            c.step = step
        if not stepped:
            raise NotImplementedError("a step of allocation")
    if kind in ("8 bit", "4 bit"):
        cache = [quantized(c, int(kind[0])) for c in cache]
    return cache


def quantized(cache: Any, bits: int) -> Any:
    """As `mlx_lm.generate.maybe_quantize_kv_cache` does, from the first token on."""
    if not hasattr(cache, "to_quantized"):
        return cache
    new = cache.to_quantized(group_size=32, bits=bits)
    if hasattr(new, "step"):
        new.step = cache.step
    return new


def feed(model: Any, cache: Any, tokens: Any, positions: bool = False) -> Any:
    """Tokens after what the cache holds: logits [n, V]."""
    if positions:
        raise NotImplementedError("explicit positions")
    for c in cache:
        if not hasattr(model, "make_cache") and hasattr(c, "max_size") and c.offset + len(tokens) > c.max_size:
            raise NotImplementedError("more than max_kv_size tokens: older ones are dropped by design")
    logits = model(mx.array([list(tokens)]), cache=cache)
    mx.eval(logits, [c.state for c in cache])
    return numbers(logits[0])


def rewinds(model: Any) -> bool:
    """Whether every layer's cache can be trimmed at least while it is empty."""
    return bool(kv.can_trim_prompt_cache(kv.make_prompt_cache(model)))


def rewind(cache: Any, count: int) -> int:
    """How many tokens mlx-lm says it took back; 0 where it declines."""
    if not kv.can_trim_prompt_cache(cache):
        return 0
    return int(kv.trim_prompt_cache(cache, count))


def fork(cache: Any) -> Any:
    """A copy, made as the library's own prompt store makes it."""
    return copy.deepcopy(cache)


def length(cache: Any) -> int:
    """What the first cache that counts tokens says it holds."""
    for c in parts(cache):
        if hasattr(c, "offset"):
            return int(c.offset)
    raise NotImplementedError("a cache's length: no layer counts tokens")


def nbytes(cache: Any) -> int:
    """What is really allocated: `state` may hide rows that are not used yet."""
    held = [a for c in parts(cache) for _, a in tree_flatten(list(vars(c).values())) if isinstance(a, mx.array)]
    return sum(array.nbytes for array in held)


def reported_nbytes(cache: Any) -> int:
    """What the caches say they hold."""
    if not all(hasattr(c, "nbytes") for c in cache):
        raise NotImplementedError("a cache's own account of its bytes")
    return sum(c.nbytes for c in cache)


def save(cache: Any, path: Any) -> None:
    kv.save_prompt_cache(f"{path}.safetensors", cache)


def load(path: Any) -> Any:
    """Read at once: what is lazy would only notice a damaged file when it is used."""
    cache = kv.load_prompt_cache(f"{path}.safetensors")
    mx.eval([c.state for c in cache])
    return cache


def watched(modules: Any, call: Any) -> Any:
    """Let ``call(module_class, module, *args)`` stand in for the modules' own call; returns what puts it back.

    The class of each is exchanged for a subclass, so that attributes, isinstance and parameters stay as they are."""
    classes = [(module, type(module)) for module in modules]
    for module, own in classes:

        def stand_in(self: Any, *args: Any, own: Any = own, **named: Any) -> Any:
            return call(own, self, *args, **named)

        module.__class__ = type(own.__name__, (own,), {"__call__": stand_in})

    def put_back() -> None:
        for module, own in classes:
            module.__class__ = own

    return put_back


def hidden(model: Any, tokens: Any, cache: Any = None) -> Any:
    """What goes into the first layer, then what comes out of each: L + 1 of [T, D]. With a cache: fed to it."""
    seen: list[Any] = []

    def record(own: Any, layer: Any, x: Any, *args: Any, **named: Any) -> Any:
        out = own.__call__(layer, x, *args, **named)
        states = [x] if not seen else []
        states.append(out[0] if isinstance(out, tuple) else out)
        seen.extend(numbers(s.reshape(-1, s.shape[-2], s.shape[-1])[0]) for s in states)
        return out

    layers = list(getattr(model, "layers", None) or [])
    put_back = watched(layers, record)
    try:
        mx.eval(model(mx.array([list(tokens)]), cache=cache))
    finally:
        put_back()
    if not layers or len(seen) != len(layers) + 1:
        raise NotImplementedError("hidden states: the layers are not called one by one")
    return seen


def jittered(model: Any, rows: Any, scale: float, seed: int, one_pass: Any = full) -> Any:
    """``one_pass`` with each element of the embedded tokens multiplied by 1 + scale * u, u uniform in [-1, 1]."""

    def disturb(own: Any, embedding: Any, x: Any) -> Any:
        out = own.__call__(embedding, x)
        u = np.random.default_rng(seed).uniform(-1, 1, out.shape)
        return out * mx.array((1 + scale * u).astype(np.float32)).astype(out.dtype)

    found = [m for _, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
    if not found:
        raise NotImplementedError("disturbing the embedding: none was found")
    tokens = max(found, key=lambda m: int(m.weight.shape[0]))
    put_back = watched([tokens], disturb)
    try:
        return one_pass(model, rows)
    finally:
        put_back()


def precise(model: Any, rows: Any) -> Any:
    """`full` in float64, which mlx has on the CPU only. The weights are the same. Some operations lack it, and
    older versions then end the whole process instead of raising an error: there it is not tried."""
    if tuple(int(n) for n in version("mlx").split(".")[:2]) < (0, 32):
        raise NotImplementedError("float64 in mlx before 0.32")
    own = dict(tree_flatten(model.parameters()))
    wide = [(n, w.astype(mx.float64)) for n, w in own.items() if mx.issubdtype(w.dtype, mx.floating)]
    try:
        model.load_weights(wide, strict=False)
        logits = model(mx.array([list(row) for row in rows]))
        if logits.dtype != mx.float64:
            raise NotImplementedError("float64: the model computes in float32 somewhere")
        return numbers(logits)
    except (RuntimeError, ValueError) as error:
        raise NotImplementedError(f"float64: {error}") from error
    finally:
        model.load_weights(list(own.items()), strict=False)
