"""From a real config to tiny ones that mlx-lm can build."""

from __future__ import annotations

import inspect
from typing import Any

from mlx_lm.utils import _get_classes

from exactkv.verify.shrink import TEXT, shrink, text_config

Config = dict[str, Any]

ALIASES = {
    "num_experts": "num_local_experts", "block_dim": "hidden_size", "n_ctx": "n_positions",
    "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
}  # fmt: skip
"""Fields by the name that mlx-lm reads, and by the one that newer configs use."""


def candidates(config: Config, seed: int) -> list[Config]:
    """Configs to try, the best first. mlx-lm's class of a multimodal model wants the outer config, with its own
    caches; and heads of 32 let keys and values be quantized, in groups of 32."""
    inner = next((name for name in TEXT if isinstance(config.get(name), dict)), "")
    text = shrink(spelled(text_config(config)), seed)
    shapes = [{**text, **widened(text)}, text] if widens(text) else [text]
    if not inner:
        return shapes
    outer = {"model_type": config.get("model_type"), "vocab_size": text["vocab_size"]}
    return [{**outer, inner: shape} for shape in shapes] + shapes


def spelled(config: Config) -> Config:
    """In the words that mlx-lm reads, which are those of configs as published, before rope had a section of its
    own and layers a list of types."""
    config = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        parts = {k: v for k, v in rope.items() if isinstance(v, dict)}
        whole = parts.get("full_attention", {}) if parts else rope
        default = whole.get("rope_type", "default") == "default"
        config.setdefault("rope_scaling", None if default else whole)
        for name, given in (("rope_theta", whole), ("partial_rotary_factor", whole)):
            if name in given:
                config.setdefault(name, given[name])
        if "rope_theta" in parts.get("sliding_attention", {}):
            config.setdefault("rope_local_base_freq", parts["sliding_attention"]["rope_theta"])
    fields = known_fields(config)
    for name, other in ALIASES.items():
        if name in fields and name not in config and config.get(other) is not None:
            config[name] = config[other]
    types = config.get("layer_types")
    if types and "full_attention" in types and "sliding_window_pattern" in fields and "layer_types" not in fields:
        config.setdefault("sliding_window_pattern", types.index("full_attention") + 1)
        config = {k: v for k, v in config.items() if k not in ("layer_types", "_sliding_window_pattern")}
    return config


def known_fields(config: Config) -> set[str]:
    """What mlx-lm's class reads of such a config; nothing where it has no class for it."""
    try:
        return set(inspect.signature(_get_classes(config)[1]).parameters)
    except Exception:  # no such model, or one that cannot be imported: building it will say so
        return set()


def widens(text: Config) -> bool:
    """Whether another head_dim is nothing else but that: not latent, no state space, no factor by dimension."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    other = ("qk_rope_head_dim", "state_size", "hybrid_override_pattern", "global_head_dim")
    factors = ("short_factor", "long_factor", "mrope_section")
    return not any(text.get(name) for name in other) and not any(name in rope for name in factors)


def widened(text: Config) -> Config:
    """Heads of 32, by their own field or by the model's width."""
    known = known_fields(text)
    if "head_dim" in known or not known:
        return {"head_dim": 32}
    return {"hidden_size": 32 * text["num_attention_heads"]} if text.get("num_attention_heads") else {}
