"""Other mixtures of experts: DeepSeek V2 and V3, GLM-4.5, GPT-OSS, OLMoE."""

from __future__ import annotations

from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import RMS, dense, experts, gating, model, rope
from exactkv.models.gguf.metadata import Metadata
from exactkv.models.gguf.names import NORM_AFTER_ATTENTION

_BIASED_CHOICE = ("exp_probs_b.bias", "exp_probs_b.weight")


def _deepseek2(meta: Metadata) -> dict[str, Any]:
    config = model(meta, "deepseek_v2")
    turned = meta.take("rope.dimension_count")
    key = "attention.key_length_mla" if "attention.key_length_mla" in meta else "attention.key_length"
    value = "attention.value_length_mla" if "attention.value_length_mla" in meta else "attention.value_length"
    rank = meta.take("attention.kv_lora_rank")
    if key.endswith("mla"):  # keys and values as the cache holds them
        meta.check("attention.key_length", rank + turned)
        meta.check("attention.value_length", rank)
    config |= {
        "num_attention_heads": meta.take("attention.head_count"),
        "q_lora_rank": meta.take("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": meta.take(key) - turned,
        "v_head_dim": meta.take(value),
        "rms_norm_eps": meta.take(RMS),
        "intermediate_size": meta.take("feed_forward_length"),
        "first_k_dense_replace": meta.take("leading_dense_block_count"),
        **rope(meta),
    }
    meta.ignore("attention.head_count_kv")
    if "rope_scaling" in config:  # stored is a tenth; all models have one value in both places
        scale = round(10.0 * meta.take("rope.scaling.yarn_log_multiplier"), 6)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    return config | _deepseek_mixture(meta)


def _deepseek_mixture(meta: Metadata) -> dict[str, Any]:
    is_v3 = any(meta.has(part) for part in _BIASED_CHOICE)
    gating(meta, "sigmoid" if is_v3 else "softmax")
    found = experts(meta, "n_routed_experts") | {
        "n_shared_experts": meta.take("expert_shared_count"),
        "routed_scaling_factor": meta.take("expert_weights_scale"),
        "norm_topk_prob": bool(meta.take("expert_weights_norm") if is_v3 else meta.take("expert_weights_norm", False)),
    }
    # Files from before 2025-10 do not speak of groups; of models with a softmax, the one with 64 experts has none.
    if not is_v3 and found["n_routed_experts"] == 64:
        groups, best = meta.take("expert_group_count", 1), meta.take("expert_group_used_count", 1)
    else:
        groups, best = meta.take("expert_group_count"), meta.take("expert_group_used_count")
    found |= {"n_group": groups, "topk_group": best}
    if is_v3:
        return found | {"model_type": "deepseek_v3"}
    return found | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _glm4_moe(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "glm4_moe", partial=True, mixed=True) | experts(meta, "n_routed_experts")
    config["num_hidden_layers"] -= meta.take("nextn_predict_layers", 0)
    gating(meta, "sigmoid")
    return config | {
        "n_shared_experts": meta.take("expert_shared_count"),
        "routed_scaling_factor": meta.take("expert_weights_scale"),
        "norm_topk_prob": bool(meta.take("expert_weights_norm")),
        "first_k_dense_replace": meta.take("leading_dense_block_count"),
        "n_group": meta.take("expert_group_count", 1),  # files from before 2025-10 do not say; all models have one
        "topk_group": meta.take("expert_group_used_count", 1),
        "use_qk_norm": meta.has("attn_q_norm.weight"),
    }


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    # Files do not say that the bounds of YaRN's ramp are not rounded; the models were trained so.
    config = dense(meta, "gpt_oss", mixed=True, truncate=False)
    gating(meta, "softmax")
    config.setdefault("rope_scaling", {"rope_type": "default"})  # without, the config would mean YaRN
    return config | experts(meta, "num_local_experts", "intermediate_size") | {
        "sliding_window": meta.take("attention.sliding_window")
    }  # fmt: skip


def _olmoe(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "olmoe", mixed=True) | experts(meta, "num_experts", size=None)
    if meta.take("expert_feed_forward_length", config["intermediate_size"]) != config["intermediate_size"]:
        raise LoadError("metadata expert_feed_forward_length and feed_forward_length differ, which is not supported.")
    return config | {"norm_topk_prob": False}


ARCHITECTURES: Table = {
    "deepseek2": Architecture(("deepseek_v2", "deepseek_v3"), _deepseek2),
    "glm4moe": Architecture(("glm4_moe",), _glm4_moe, names=NORM_AFTER_ATTENTION),
    "gpt-oss": Architecture(("gpt_oss",), _gpt_oss, names=NORM_AFTER_ATTENTION),
    "olmoe": Architecture(("olmoe",), _olmoe),
}
