"""Llama and what is built like it: Mixtral, Llama 4, Mistral 3, SmolLM3, Granite, and others with q and k permuted."""

from __future__ import annotations

from typing import Any

from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import dense, experts, gating
from exactkv.models.gguf.metadata import Metadata
from exactkv.models.gguf.ropes import ROPE_FREQS


def _llama(meta: Metadata) -> dict[str, Any]:
    if meta.peek("expert_count"):
        return dense(meta, "mixtral", bias=None, mixed=True) | experts(meta, "num_local_experts", size=None)
    # Files of models without "rope_theta" in their config do not say it either: those older than scaled rope.
    is_new = ROPE_FREQS in meta.shapes or "rope.scaling.type" in meta
    config = dense(meta, "llama", base=None if is_new else 1e4) | {"hidden_act": "silu"}
    return config | ({"mlp_bias": True} if meta.has("ffn_up.bias") else {})


def _llama4(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "llama4_text", mixed=True)
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config |= experts(meta, "num_local_experts", "intermediate_size")
    gating(meta, "sigmoid")
    # What files do not say is the same in all models, but for the norm, which the one with 128 experts lacks.
    return config | {
        "interleave_moe_layer_step": meta.take("interleave_moe_layer_step"),
        "use_qk_norm": config["num_local_experts"] != 128,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _mistral3(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "mistral", bias=None)
    if "attention.temperature_scale" not in meta:
        if "rope_scaling" in config:
            meta.take("attention.temperature_scale")  # with YaRN, a Ministral 3: it must be there
        return config | {"sliding_window": None}
    yarn = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    beta, everywhere = meta.take("attention.temperature_scale"), meta.take("rope.scaling.yarn_log_multiplier")
    yarn |= {"mscale": 1.0, "mscale_all_dim": everywhere, "llama_4_scaling_beta": beta}
    return config | {"model_type": "ministral3", "rope_parameters": yarn}


def granite_scales(meta: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": meta.take("attention.scale"),
        "embedding_multiplier": meta.take("embedding_scale"),
        "residual_multiplier": meta.take("residual_scale"),
        "logits_scaling": meta.take("logit_scale"),
    }


def _granite(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "granite") | granite_scales(meta)
    meta.check("rope.scaling.finetuned", True)
    meta.ignore("expert_shared_feed_forward_length")  # of a hybrid that has neither recurrent layers nor experts
    return config | ({"mlp_bias": True} if meta.has("ffn_up.bias") else {})


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    config = (
        dense(meta, "granitemoehybrid", mixed=True)
        | granite_scales(meta)
        | experts(meta, "num_local_experts", size=None)
    )
    meta.check("rope.scaling.finetuned", True)
    shared = meta.has("ffn_up_shexp.weight")
    return config | {
        "shared_intermediate_size": meta.take("expert_shared_feed_forward_length") if shared else 0,
        "layer_types": ["attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope",
    }


def _smollm3(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "smollm3") | {"no_rope_layer_interval": 4}


ARCHITECTURES: Table = {
    "llama": Architecture(("llama", "mixtral"), _llama, permuted=True),
    "llama4": Architecture(("llama4_text",), _llama4),
    "mistral3": Architecture(("ministral3", "mistral"), _mistral3, permuted=True),
    "smollm3": Architecture(("smollm3",), _smollm3, permuted=True),
    "granite": Architecture(("granite",), _granite, permuted=True),
    "granitemoe": Architecture(("granitemoehybrid",), _granite_moe, permuted=True),
}
