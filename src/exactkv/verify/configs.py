"""Bare configs: a config.json, or a directory that holds one and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exactkv.errors import LoadError

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.npz", "*.pt")


def read_config(model: str) -> dict[str, Any] | None:
    """The config that ``model`` names if it is a bare one: a .json file, or a directory without weights.
    None for everything else. Raises LoadError where it cannot be read."""
    path = Path(model).expanduser()
    if path.is_dir():
        if any(found for pattern in _WEIGHTS for found in path.glob(pattern)):
            return None
        path = path / "config.json"
        if not path.is_file():
            raise LoadError(f"{model} holds neither weights nor a config.json; give a model's directory or its config")
    elif path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path} holds a {type(config).__name__}; expected a model's config, a JSON object")
    return config
