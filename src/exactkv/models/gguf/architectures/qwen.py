"""Qwen 2, 3 and 3-Next, and their mixtures."""

from __future__ import annotations

from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import dense, experts
from exactkv.models.gguf.metadata import Metadata
from exactkv.models.gguf.names import GATED_QUERIES, NORM_AFTER_ATTENTION


def _qwen2(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "qwen2", bias="qkv_bias")


def _qwen3(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "qwen3")


def _qwen2_moe(meta: Metadata) -> dict[str, Any]:
    return {
        **dense(meta, "qwen2_moe", bias="qkv_bias", mixed=True),
        **experts(meta, "num_experts"),
        "shared_expert_intermediate_size": meta.take("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # in all models; files do not say
    }


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return {**dense(meta, "qwen3_moe", mixed=True), **experts(meta, "num_experts"), "norm_topk_prob": True}


def _qwen3_next(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "qwen3_next", partial=True, mixed=True) | experts(meta, "num_experts")
    heads, inner = meta.take("ssm.time_step_rank"), meta.take("ssm.inner_size")
    if inner % heads:
        raise LoadError(f"metadata ssm.inner_size = {inner} is no multiple of ssm.time_step_rank = {heads}.")
    return config | {
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": meta.take("expert_shared_feed_forward_length"),
        "full_attention_interval": meta.take("full_attention_interval"),
        "linear_conv_kernel_dim": meta.take("ssm.conv_kernel"),
        "linear_key_head_dim": meta.take("ssm.state_size"),
        "linear_num_key_heads": meta.take("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


ARCHITECTURES: Table = {
    "qwen2": Architecture(("qwen2",), _qwen2),
    "qwen2moe": Architecture(("qwen2_moe",), _qwen2_moe),
    "qwen3": Architecture(("qwen3",), _qwen3),
    "qwen3moe": Architecture(("qwen3_moe",), _qwen3_moe),
    "qwen3next": Architecture(
        ("qwen3_next",), _qwen3_next, names={**NORM_AFTER_ATTENTION, **GATED_QUERIES}, norm_offset=1.0
    ),
}
