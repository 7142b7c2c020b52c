"""The head of a script that repeats something on mlx-lm without exactkv: the source of the calls that it needs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from exactkv.verify.targets import mlx_batches, mlx_calls, mlx_generators
from exactkv.verify.targets.mlx_configs import known_fields

IMPORTS = {
    "copy": "import copy",
    "importlib": "import importlib",
    "inspect": "import inspect",
    "json": "import json",
    "partial": "from functools import partial",
    "Path": "from pathlib import Path",
    "Any": "from typing import Any",
    "NamedTuple": "from typing import NamedTuple",
    "mx": "import mlx.core as mx",
    "nn": "import mlx.nn as nn",
    "version": "from importlib.metadata import version",
    "np": "import numpy as np",
    "tree_flatten": "from mlx.utils import tree_flatten",
    "load_model": "from mlx_lm.utils import load_model",
    "snapshot_download": "from huggingface_hub import snapshot_download",
    "kv": "from mlx_lm.models import cache as kv",
    "TokenizerWrapper": "from mlx_lm.tokenizer_utils import TokenizerWrapper",
    "_get_classes": "from mlx_lm.utils import _get_classes",
}
"""Each name that a script may use, in the order of the import lines."""
NEEDS: dict[str, tuple[str, ...]] = {
    "full": ("numbers",), "full_through_cache": ("feed",), "feed": ("numbers",), "new_cache": ("parts", "quantized"),
    "length": ("parts",), "nbytes": ("parts",), "hidden": ("watched", "numbers"), "jittered": ("watched", "full"),
    "precise": ("numbers",), "new_batch": ("Batch", "merged", "new_cache"), "merged": ("Batch",), "get": ("Hit",),
    "feed_batch": ("left_padded", "numbers"), "join": ("merged", "Batch"), "lengths": (), "one": ("received",),
    "drafted": ("received",), "streamed": ("received", "Ids"), "batched": ("stopping",), "all_at_once": ("Ids",),
    "generate": (
        "Request", "Completion", "one", "drafted", "streamed", "batched", "all_at_once", "noised",
    ),
}  # fmt: skip
OF_MODEL = ("full", "new_cache", "feed", "new_batch", "feed_batch", "generate", "jittered", "precise", "hidden")
"""Calls whose first argument is the model: in the script it is bound."""
NAMES = {"rewindable": "new_cache", "feed_hidden": "hidden"}
MODULES = (mlx_calls, mlx_batches, mlx_generators)


def preamble(recipe: dict[str, Any], one_pass: str, functions: frozenset[str]) -> str:
    """``recipe``: as of the target. ``one_pass``: the name of the call that is its forward pass."""
    wanted = {NAMES.get(name, name) for name in functions}
    needed: set[str] = set()
    wanted -= {"settle", "full"}
    _collect({one_pass, *wanted, *([] if "model" in recipe else ["build"])}, needed)
    ordered = [source for module in MODULES for name, source in _sources(module) if name in needed]
    body = "\n\n\n".join([*ordered, _model(recipe), _bound(one_pass, wanted, functions)]) + "\n"
    used = [line for name, line in IMPORTS.items() if re.search(rf"(?<![\w.]){name}\b", body)]
    return "\n".join(used) + "\n\n\n" + body


def _collect(names: set[str], found: set[str]) -> None:
    for name in names - found:
        found.add(name)
        _collect(set(NEEDS.get(name, ())), found)


def _sources(module: Any) -> list[tuple[str, str]]:
    """Functions and classes of a module in its order."""
    own = [(n, m) for n, m in vars(module).items() if getattr(m, "__module__", None) == module.__name__]
    return [(n, inspect.getsource(m).rstrip()) for n, m in own if inspect.isfunction(m) or inspect.isclass(m)]


def _model(recipe: dict[str, Any]) -> str:
    """The config with just those fields that mlx-lm's class reads."""
    dtype = recipe["dtype"]
    if "model" not in recipe:
        known = known_fields(recipe["config"]) | {"model_type", "architectures"}
        config = json.dumps({name: value for name, value in recipe["config"].items() if name in known})
        return f"CONFIG = json.loads({config!r})\nmodel = build(CONFIG, seed={recipe['seed']}, dtype={dtype!r})"
    given = recipe["model"]
    path = repr(given) if Path(given).expanduser().is_dir() else f"snapshot_download({given!r})"
    lines = ["mx.set_default_device(mx.cpu)", f"model, _ = load_model(Path({path}))"]
    return "\n".join([*lines, *([] if dtype == "auto" else [f"model.set_dtype(mx.{dtype})"])])


def _bound(one_pass: str, wanted: set[str], functions: frozenset[str]) -> str:
    lines = [f"full = partial({one_pass}, model)"]
    lines += [f"{name} = partial({name}, model)" for name in OF_MODEL if name in wanted and name != "full"]
    if "rewindable" in functions:
        lines += ["", "", "def rewindable(kind=None, count=0):", "    return new_cache(kind)"]
    if "settle" in functions:
        lines += ["", "", "def settle(cache):", "    pass"]
    if "feed_hidden" in functions:
        lines += ["", "", "def feed_hidden(cache, tokens):", "    return hidden(tokens, cache)"]
    return "\n".join(lines)
