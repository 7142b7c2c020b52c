"""A tiny model of the same architecture: from a real Hugging Face config to one of few layers and small widths.

Everything that happens at a length happens within 64 tokens: windows and chunks end, rope switches, temperatures
step. Plain dict in, plain dict out: the result is for any engine that reads such configs.
"""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

from exactkv.verify.layout import Config, describe_layers, thin

__all__ = ["describe_layers", "shrink", "text_config"]

TEXT = ("text_config", "llm_config", "language_config")
TEXT_TYPES = {
    "llama4": "llama4_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "mistral3": "mistral",
    "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""The text model inside a multimodal one, where the inner config does not name it."""

HEADS, LONG = 4, 1024
ORIGINAL = 16
"""Tokens after which a scaled rope switches."""

DROPPED = (
    "quantization_config", "auto_map", "_name_or_path", "torch_dtype", "dtype", "transformers_version",
    "architectures", "id2label", "label2id", "problem_type", "vision_config", "audio_config",
    "_attn_implementation", "attn_implementation",
)  # fmt: skip

SIZES: dict[str, int] = {
    # widths
    "intermediate_size": 64, "intermediate_size_mlp": 64, "ffn_hidden_size": 64, "n_inner": 64,
    "moe_intermediate_size": 32, "shared_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "block_ff_dim": 64, "block_multiple_of": 8,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    # state spaces
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_ssm": 64,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    # others
    "laurel_rank": 8, "hidden_size_per_layer_input": 8, "floor_scale": 4, "num_nextn_predict_layers": 0,
    "global_head_dim": 16, "num_global_key_value_heads": 2, "mtp_num_layers": 0,
}  # fmt: skip
"""What a field becomes, where the config has it and it is not null or 0."""

WINDOWS = ("sliding_window", "attention_window_size", "sliding_window_size", "window_size")
CHUNKS = ("attention_chunk_size", "chunk_size", "mamba_chunk_size")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k")
WIDTHS = ("hidden_size", "n_embd", "d_model", "lru_width", "block_dim", "dim")


def text_config(config: Config) -> Config:
    """The config of the text model: the config itself, or what a multimodal one has inside."""
    for name in TEXT:
        inner = config.get(name)
        if isinstance(inner, dict) and inner:
            outer = str(config.get("model_type"))
            return text_config({"model_type": TEXT_TYPES.get(outer, outer), **inner})
    return config


def shrink(config: Config, seed: int = 0, layers: int | None = None) -> Config:
    """The config of a tiny model of the same architecture. Seed 0 has windows and chunks of 8; others vary them,
    so that no result hangs on one number. ``layers``: so many, at the price of kinds that do not fit in."""
    original = deepcopy(text_config(config))
    random = Random(seed)
    small = thin({k: v for k, v in original.items() if k not in DROPPED}, layers)
    window = 8 if seed == 0 else random.randint(5, 9)
    chunk = 8 if seed == 0 else random.randint(4, 8)
    small |= {name: window for name in WINDOWS if small.get(name)}
    small |= {name: chunk for name in CHUNKS if small.get(name)}
    for name, size in SIZES.items():
        if small.get(name):
            small[name] = [size] * len(small[name]) if isinstance(small[name], list) else size
    if small.get("model_type") == "llama4_text":
        small["floor_scale"] = SIZES["floor_scale"]  # published configs leave it to the default
    small |= vocabulary(small, 97 + 2 * (seed % 8))
    small |= heads(original)
    small |= experts(small)
    small |= numbers(small)
    small |= state_spaces(small)
    small |= ropes(original, small)
    return small


def vocabulary(config: Config, size: int) -> Config:
    """A small vocabulary without special tokens: generation then ends where it is told to."""
    changes: Config = {"vocab_size": size}
    if config.get("vocab_size_per_layer_input"):
        changes["vocab_size_per_layer_input"] = size
    specials = [name for name in config if name.endswith(("_token_id", "_token_index", "_token_ids"))]
    return changes | dict.fromkeys(specials)


def heads(config: Config) -> Config:
    """Widths and heads: whether keys are shared by all, some or no queries stays; so does whether heads are
    wider than the model's width would give."""
    changes: Config = {}
    names = ("n_head", "n_embd") if config.get("n_embd") else ("num_attention_heads", "hidden_size")
    count, width = config.get(names[0]) or 0, config.get(names[1]) or 0
    partial = (config.get("partial_rotary_factor") or rope_of(config).get("partial_rotary_factor") or 1) < 1
    head_dim = config.get("head_dim")
    named = "head_dim" in config or config.get("model_type") in WIDE_HEADS
    wide = partial or bool(head_dim and count and width and head_dim * count != width)
    size = 16 if wide or config.get("model_type") in WIDE_HEADS else 8
    hidden = HEADS * size if not named else 32
    changes |= {name: hidden for name in WIDTHS if config.get(name) or name == names[1]}
    changes[names[0]] = HEADS
    kv = config.get("num_key_value_heads")
    if kv:
        changes["num_key_value_heads"] = HEADS if kv == count else 1 if kv == 1 else 2
    elif config.get("model_type") in WIDE_HEADS:
        changes["num_key_value_heads"] = 1 if config.get("model_type") == "gemma3_text" else 2
    if named:
        changes["head_dim"] = 8 if config.get("qk_rope_head_dim") else size
    if config.get("query_pre_attn_scalar") or config.get("model_type") in WIDE_HEADS:
        changes["query_pre_attn_scalar"] = size
    if config.get("n_inner"):
        changes["n_inner"] = 64
    return changes | {"intermediate_size": 64} if "intermediate_size" not in config and width else changes


WIDE_HEADS = ("gemma2", "gemma3_text", "gemma3n_text")
"""Families whose published configs leave the head's width and the number of heads to defaults."""


def experts(config: Config) -> Config:
    """At most two experts a token, in at most two groups."""
    changes: Config = {}
    many = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    for name in TOP_K:
        if name in config and many:
            changes[name] = min(config[name] or 2, 2)
    if config.get("n_shared_experts"):
        changes["n_shared_experts"] = 1
    if (config.get("n_group") or 0) > 1:
        changes |= {"n_group": 2, "topk_group": 1}
    return changes


def numbers(config: Config) -> Config:
    """Multipliers that would hide attention behind the embedding, and dropout."""
    changes: Config = {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, int | float)}
    if config.get("attention_multiplier"):
        changes["attention_multiplier"] = 8**-0.5
    for name, low, high in (
        ("embedding_multiplier", 0.5, 2.0), ("residual_multiplier", 0.5, 1.0), ("logits_scaling", 0.5, 2.0),
        ("logit_scale", 1.0, 1.0), ("lm_head_multiplier", 0.25, 2.0), ("key_multiplier", 0.5, 2.0),
        ("attention_out_multiplier", 0.5, 2.0), ("attention_in_multiplier", 0.5, 2.0),
        ("ssm_in_multiplier", 0.5, 2.0), ("ssm_out_multiplier", 0.5, 2.0),
    ):  # fmt: skip
        if config.get(name):
            changes[name] = min(max(config[name], low), high)
    return changes


def state_spaces(config: Config) -> Config:
    """Sizes of state-space layers, which must divide one another."""
    changes: Config = {}
    if "state_size" in config:
        changes["intermediate_size"] = config["hidden_size"] * int(config.get("expand") or 2)
    if config.get("model_type") == "mamba2":
        changes |= {"num_heads": 4, "head_dim": config["hidden_size"] * int(config.get("expand") or 2) // 4}
    for name in ("n_groups", "mamba_n_groups"):
        if config.get(name):
            changes[name] = min(config[name], 2)
    inner = config["hidden_size"] * int(config.get("mamba_expand") or 2) if "hidden_size" in config else 0
    for name in ("mamba_d_head", "mamba_head_dim"):
        if name in config:
            changes[name] = inner // 4
    if config.get("mamba_d_ssm"):
        changes["mamba_d_ssm"] = inner
    return changes


# Rope


def rope_of(config: Config) -> Config:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def ropes(original: Config, small: Config) -> Config:
    """Positions: room for long runs, except where the arithmetic depends on the room."""
    changes: Config = {}
    limit = "n_positions" if original.get("n_positions") else "max_position_embeddings"
    if original.get(limit) or limit == "n_positions":
        changes[limit] = LONG
    if original.get("n_ctx"):
        changes["n_ctx"] = LONG
    if original.get("original_max_position_embeddings"):
        changes["original_max_position_embeddings"] = ORIGINAL
    for name in ("rope_parameters", "rope_scaling"):
        rope = original.get(name)
        if not isinstance(rope, dict):
            continue
        parts = {k: v for k, v in rope.items() if isinstance(v, dict)}
        if parts:  # one for each kind of layer
            changes[name] = {k: {**v, **scaled(v, original, small, changes)} for k, v in parts.items()}
        else:
            changes[name] = {**rope, **scaled(rope, original, small, changes)}
    return changes


def scaled(rope: Config, original: Config, small: Config, changes: Config) -> Config:
    """What changes of a rope; the model's own limit is put into ``changes``."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    room = original.get("max_position_embeddings") or ORIGINAL
    first = rope.get("original_max_position_embeddings") or original.get("original_max_position_embeddings")
    part: Config = {"original_max_position_embeddings": ORIGINAL} if first else {}
    if kind == "dynamic":
        changes["max_position_embeddings"] = ORIGINAL
    elif kind in ("longrope", "su", "yarn"):
        ratio = room / first if first else float(rope.get("factor") or 1)
        changes["max_position_embeddings"] = max(64, int(ORIGINAL * ratio))
        if "max_position_embeddings" in rope:
            part["max_position_embeddings"] = changes["max_position_embeddings"]
    if kind in ("longrope", "su"):
        part |= {name: sampled(rope[name], rotary_dim(small) // 2) for name in ("short_factor", "long_factor")}
        if part["short_factor"] == part["long_factor"]:
            part["long_factor"] = [2 * x for x in part["long_factor"]]
    return part


def rotary_dim(config: Config) -> int:
    partial = config.get("partial_rotary_factor") or rope_of(config).get("partial_rotary_factor") or 1
    return int((config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) * partial)


def sampled(values: list[Any], count: int) -> list[Any]:
    """``count`` of the values, evenly spread, the last among them."""
    return [values[(i + 1) * len(values) // count - 1] for i in range(count)]
