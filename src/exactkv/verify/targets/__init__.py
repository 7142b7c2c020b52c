"""The engines that can be verified: an adapter each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from exactkv.errors import InputError
from exactkv.verify.target import Target

ENGINES = ("exactkv", "transformers", "mlx")


def load(engine: str, model: str, *, dtype: str = "float32", seed: int = 0) -> Target:
    """A target of ``engine`` for a model: a directory, file, hub id, or config.json (then a tiny random one).

    Raises InputError for another engine, LoadError where the model or the engine's library is not there."""
    target: Target = _module(engine).load(model, dtype=dtype, seed=seed)
    return target


def from_recipe(recipe: dict[str, Any]) -> Target:
    """The target whose `Target.recipe` this is. Its "engine" is one of ours, or "package.module:function" of a
    function that takes the recipe and returns a target."""
    module, colon, function = recipe["engine"].partition(":")
    if colon:
        made: Target = getattr(import_module(module), function)(recipe)
        return made
    target: Target = _module(recipe["engine"]).from_recipe(recipe)
    return target


def as_target(given: Any) -> Target:
    """A target of a model object: a Target, an exactkv Model, a transformers or an mlx model."""
    if isinstance(given, Target):
        return given
    homes = {base.__module__.split(".")[0] for base in type(given).__mro__}
    for home, engine, name in (
        ("exactkv", "exactkv", "ExactKVTarget"),
        ("transformers", "transformers", "TransformersTarget"),
        ("mlx", "mlx", "MlxTarget"),
    ):
        if home in homes:
            target: Target = getattr(_module(engine), name)(given)
            return target
    raise InputError(
        f"cannot verify a {type(given).__name__}; expected a Target, a path, or a model of exactkv, transformers or "
        "mlx-lm. For another engine subclass exactkv.verify.Target (docs/verify.md shows how)."
    )


def _module(engine: str) -> Any:
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; expected one of {', '.join(ENGINES)}")
    return import_module(f"exactkv.verify.targets.{engine}")
