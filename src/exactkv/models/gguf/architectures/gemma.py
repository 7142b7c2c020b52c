"""Gemma 1 to 4."""

from __future__ import annotations

import math
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import KINDS, RMS, dense, experts, model, no_experts, window_kinds
from exactkv.models.gguf.metadata import Metadata
from exactkv.models.gguf.names import SHARED_KEYS
from exactkv.models.gguf.ropes import ROPE_FREQS

FULL, SLIDING = KINDS
_UNTURNED = 1e20  # a rotary frequency divided by more stands still


def _gemma(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "gemma", base=1e4)


def _query_scale(config: dict[str, Any], largest: int) -> int:
    """Of its generation the model with the most layers alone scales by its width a head; files do not say so, llama.cpp
    goes by the layer count."""
    is_largest = config["num_hidden_layers"] == largest
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _gemma2(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "gemma2", base=1e4)
    return config | {
        "query_pre_attn_scalar": _query_scale(config, 46),
        "sliding_window": meta.take("attention.sliding_window"),
        "attn_logit_softcapping": meta.take("attn_logit_softcapping"),
        "final_logit_softcapping": meta.take("final_logit_softcapping"),
    }


def _gemma3(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "gemma3_text") | {"hidden_activation": "gelu_pytorch_tanh"}
    config["query_pre_attn_scalar"] = _query_scale(config, 62)
    config["sliding_window"] = meta.take("attention.sliding_window")
    for key, field in (
        ("rope.freq_base_swa", "rope_local_base_freq"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
    ):
        if key in meta:
            config[field] = meta.take(key)
    if "attention.sliding_window_pattern" in meta:
        config["layer_types"] = window_kinds(meta, config["num_hidden_layers"])
    return config


def _shared(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 have in common."""
    config |= {
        "sliding_window": meta.take("attention.sliding_window"),
        "layer_types": window_kinds(meta, config["num_hidden_layers"]),
        "num_kv_shared_layers": meta.take("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": meta.take("embedding_length_per_layer_input"),
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = meta.size("per_layer_token_embd.weight", 0)
    return config


def _gemma3n(meta: Metadata) -> dict[str, Any]:
    config = _shared(meta, dense(meta, "gemma3n_text", sized=False))
    count = config["num_hidden_layers"]
    meta.check("altup.active_idx", 0)
    scales = meta.by_layer("activation_sparsity_scale", count)
    return config | {
        "intermediate_size": meta.by_layer("feed_forward_length", count),
        "rope_local_base_freq": meta.take("rope.freq_base_swa"),
        "final_logit_softcapping": meta.take("final_logit_softcapping"),
        "altup_num_inputs": meta.take("altup.num_inputs"),
        "laurel_rank": meta.size("blk.0.laurel_l.weight", 0),
        # Stored is how many deviations above the mean a gate must be; the config says which part is below.
        "activation_sparsity_pattern": [round((1.0 + math.erf(s / math.sqrt(2.0))) / 2.0, 6) for s in scales],
    }


def _gemma4(meta: Metadata) -> dict[str, Any]:
    config = model(meta, "gemma4_text")
    count = config["num_hidden_layers"]
    config = _shared(meta, config)
    kinds, heads = config["layer_types"], meta.take("attention.head_count")
    kv = dict(zip(reversed(kinds), reversed(meta.by_layer("attention.head_count_kv", count)), strict=True))
    full, local = meta.take("attention.key_length"), meta.take("attention.key_length_swa")
    meta.check("attention.value_length", full)
    meta.check("attention.value_length_swa", local)
    meta.check("rope.dimension_count", full)
    meta.check("rope.dimension_count_swa", local)
    sizes, first = meta.by_layer("feed_forward_length", count), count - config["num_kv_shared_layers"]
    wide = bool(sizes[first:]) and sizes[-1] == 2 * sizes[0]
    if sizes != [sizes[0] * (2 if wide and i >= first else 1) for i in range(count)]:
        raise LoadError(f"metadata feed_forward_length = {str(sizes)[:60]} is not supported for this architecture.")
    meta.check("rope.scaling.type", "none")
    return config | _beside(meta) | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv.get(SLIDING, kv[FULL]),
        "num_global_key_value_heads": kv.get(FULL, kv[SLIDING]),
        "head_dim": local,
        "global_head_dim": full,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": wide,
        "rms_norm_eps": meta.take(RMS),
        "attention_k_eq_v": _keys_as_values(meta, kinds),
        "final_logit_softcapping": meta.take("final_logit_softcapping"),
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional", "rope_theta": meta.take("rope.freq_base"),
                "partial_rotary_factor": _turned(meta),
            },
            SLIDING: {"rope_type": "default", "rope_theta": meta.take("rope.freq_base_swa")},
        },
    }  # fmt: skip


def _turned(meta: Metadata) -> float:
    """The part of the pairs that full layers turn: the factors of the others are so large that they stand still."""
    factors = meta.floats(ROPE_FREQS) if ROPE_FREQS in meta.shapes else [1.0]
    turned = [factor for factor in factors if factor < _UNTURNED]
    if set(turned) - {1.0} or factors[: len(turned)] != turned:
        raise LoadError(f"the factors in {ROPE_FREQS} are not supported for this architecture.")
    return len(turned) / len(factors)


def _keys_as_values(meta: Metadata, kinds: list[str]) -> bool:
    return FULL in kinds and f"blk.{kinds.index(FULL)}.attn_v.weight" not in meta.shapes


def _beside(meta: Metadata) -> dict[str, Any]:
    """The mixture beside every MLP, if there is one."""
    if not meta.peek("expert_count"):
        no_experts(meta)
        meta.ignore("expert_feed_forward_length")
        return {}
    found = experts(meta, "num_experts")
    return {"top_k_experts": found.pop("num_experts_per_tok"), "enable_moe_block": True, **found}


ARCHITECTURES: Table = {
    "gemma": Architecture(("gemma",), _gemma, norm_offset=1.0),
    "gemma2": Architecture(("gemma2",), _gemma2, norm_offset=1.0),
    "gemma3": Architecture(("gemma3_text",), _gemma3, norm_offset=1.0),
    "gemma3n": Architecture(("gemma3n_text",), _gemma3n, left_aside=(SHARED_KEYS,)),
    "gemma4": Architecture(("gemma4_text",), _gemma4, left_aside=(SHARED_KEYS,)),
}
