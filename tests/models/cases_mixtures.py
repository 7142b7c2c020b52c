"""The oracle's cases: mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.models.cases import AROUND_8
from tests.models.cases_dense import FULL, SHARED, SLIDING, yarn
from tests.models.oracle import Case

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip


def latent(name: str, kind: str, lengths: tuple[int, ...] = (1, 7, 33), **fields: Any) -> Case:
    return Case(name, kind, {**LATENT, **fields}, lengths, without=("head_dim",))


MIXTURES = (
    Case("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("mixtral-window", "Mixtral", {"num_local_experts": 4, "sliding_window": 8}, AROUND_8),
    Case("qwen2-moe", "Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40}),
    Case("qwen2-moe-some-dense", "Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "norm_topk_prob": True,
         "mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 4, "qkv_bias": False}),
    Case("qwen2-moe-windows", "Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "use_sliding_window": True,
         "sliding_window": 8, "max_window_layers": 3}, AROUND_8),
    Case("qwen3-moe", "Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    Case("qwen3-moe-some-dense", "Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "attention_bias": True}),
    Case("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    Case("gpt-oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, **yarn()},
         AROUND_8),
    Case("gpt-oss-hub-rope", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5,
         "layer_types": [FULL, SLIDING, SLIDING], **yarn(truncate=False, beta_fast=32.0)}, (4, 5, 6, 33, 60)),
    Case("gemma4-mixture", "Gemma4", {**SHARED, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
         "moe_intermediate_size": 24, "global_head_dim": 16}, AROUND_8),
    latent("deepseek-v2", "DeepseekV2", topk_method="group_limited_greedy"),
    latent("deepseek-v2-lite", "DeepseekV2", (1, 31, 32, 33, 60), q_lora_rank=None, topk_method="greedy",
           attention_bias=True, **yarn(mscale=0.7, mscale_all_dim=0.7)),
    latent("deepseek-v3", "DeepseekV3"),
    latent("deepseek-v3-yarn", "DeepseekV3", (1, 31, 32, 33, 60), q_lora_rank=None, norm_topk_prob=False,
           first_k_dense_replace=2, **yarn(mscale=1.0, mscale_all_dim=1.0)),
    latent("deepseek-v3-halves", "DeepseekV3", rope_interleave=False, n_group=1, topk_group=1),
    Case("glm4-moe", "Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True}),
    Case("glm4-moe-plain", "Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "n_shared_experts": 2, "first_k_dense_replace": 2}),
)  # fmt: skip
