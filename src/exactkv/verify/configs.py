"""Bare configs: a config.json, or a directory that holds one and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exactkv.errors import LoadError

MOST_LAYERS = 10_000
_SIZES = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "sliding_window", "attention_chunk_size", "n_embd", "n_layer", "n_head",
    "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank",
}  # fmt: skip
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
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path} holds a {type(config).__name__}; expected a model's config, a JSON object")
    _check(config, path)
    return config


def _check(config: dict[str, Any], path: Path) -> None:
    """Refuse what shrinking would put right in silence: a config that no model could have."""
    text = config.get("text_config")
    texts = [config, *([text] if isinstance(text, dict) else [])]
    if not any(isinstance(t.get("model_type"), str) or t.get("architectures") for t in texts):
        raise LoadError(f"{path} names no model_type and no architectures; expected the config.json of a model")
    for fields in texts:
        for name in _SIZES & fields.keys():
            value = fields[name]
            each = value if isinstance(value, list) and value else [value]  # some models have a size for each layer
            if value is not None and not all(type(v) is int and 0 <= v < 2**31 for v in each):
                raise LoadError(f"{path}: {name} = {value!r:.80}; expected a size, an integer of 0 or more")
        if (fields.get("num_hidden_layers") or 0) > MOST_LAYERS:
            raise LoadError(
                f"{path}: num_hidden_layers = {fields['num_hidden_layers']}; at most {MOST_LAYERS} make sense"
            )
