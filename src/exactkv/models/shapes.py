"""The shapes of well-known models: their config.json, for tables, tests and benchmarks with random weights.

Of fields, those are left out that say nothing of the decoder. The factor tables of Phi's long rope stand for the real
ones.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from exactkv.errors import InputError
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.spec import DecoderSpec


@cache
def _all() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return found


def shape_names() -> list[str]:
    """The known shapes, such as "llama-3.1-8b"."""
    return list(_all())


def shape_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config of a shape; with ``layers``, of its first so many layers. Raises InputError for an unknown name or
    a number of layers that it has not."""
    if name not in _all():
        raise InputError(f"no shape is called {name!r}; there are {', '.join(shape_names())}")
    config = dict(_all()[name])
    key = "n_layer" if "n_layer" in config and "num_hidden_layers" not in config else "num_hidden_layers"
    if layers is not None:
        if not 1 <= layers <= config[key]:
            raise InputError(f"{name} has 1 to {config[key]} layers, not {layers}")
        for field, value in config.items():
            if isinstance(value, list) and len(value) == config[key]:
                config[field] = value[:layers]
        config[key] = layers
    return config


def shape_spec(name: str, layers: int | None = None) -> DecoderSpec:
    """The decoder of a shape. Raises InputError as ``shape_config``."""
    config = shape_config(name, layers)
    return read_spec(find_family(config), config)
