"""The oracle's cases: dense and windowed families."""

from __future__ import annotations

from typing import Any

from tests.models.cases import AROUND_8, AROUND_16, PLAIN_ROPE, llama3_rope
from tests.models.oracle import Case

SLIDING, FULL = "sliding_attention", "full_attention"


def yarn(**fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 32, **fields}
    return {"rope_parameters": rope, "max_position_embeddings": 256}


def partial(part: float) -> dict[str, Any]:
    return {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": part}}


def base(theta: float) -> dict[str, Any]:
    """Not the default, and one at which 33 tokens are many turns."""
    return {"rope_parameters": {**PLAIN_ROPE, "rope_theta": theta}}


NEOX = ("head_dim", "num_key_value_heads")
SIZED = (*NEOX, "intermediate_size", "max_position_embeddings")
GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
}  # fmt: skip

SHARED = {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 8,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}  # fmt: skip

DENSE = (
    Case("llama-rope-yarn", "Llama", yarn(), (1, 31, 32, 33, 100)),
    Case("llama-rope-yarn-fields", "Llama", yarn(beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.4,
         truncate=False), (1, 31, 32, 33, 100)),
    Case("llama-rope-yarn-factor", "Llama", yarn(attention_factor=1.3), (1, 33)),
    Case("ministral", "Ministral", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}, AROUND_8),
    Case("ministral3", "Ministral3", {"rope_parameters": {**yarn()["rope_parameters"], "llama_4_scaling_beta": 0.4}},
         (1, 31, 32, 33, 70)),
    Case("qwen2", "Qwen2", without=("head_dim",)),
    Case("qwen2-windows", "Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, AROUND_8),
    Case("qwen3", "Qwen3"),
    Case("qwen3-windows-bias", "Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
         "attention_bias": True, "rope_parameters": llama3_rope()}, AROUND_8),
    Case("granite", "Granite", GRANITE),
    Case("granite-bias-tied", "Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True}),
    Case("cohere2", "Cohere2", {"sliding_window": 8, "num_hidden_layers": 5}, AROUND_8),
    Case("cohere2-bias-untied", "Cohere2", {"sliding_window": 5, "attention_bias": True, "logit_scale": 0.3,
         "tie_word_embeddings": False, "layer_types": [FULL, SLIDING, FULL]}, (4, 5, 6, 20)),
    Case("olmo2", "Olmo2"),
    Case("olmo2-bias", "Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    Case("olmo3", "Olmo3", {"sliding_window": 8, "num_hidden_layers": 5}, AROUND_8),
    Case("olmo3-yarn", "Olmo3", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING],
         "rope_parameters": {FULL: yarn()["rope_parameters"], SLIDING: PLAIN_ROPE}}, (7, 8, 9, 33, 60)),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    Case("smollm3-windows", "SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8,
         "attention_bias": True, "mlp_bias": True}, AROUND_8),
    Case("glm", "Glm", {"attention_bias": True}),
    Case("glm-partial", "Glm", {"head_dim": 16, "attention_bias": False, **partial(0.25)}),
    Case("glm4", "Glm4", {"attention_bias": True}),
    Case("exaone4-full", "Exaone4", {"sliding_window": None, "sliding_window_pattern": None,
         "layer_types": [FULL] * 3}),
    Case("exaone4-windows", "Exaone4", {"sliding_window": 8, "sliding_window_pattern": 4, "num_hidden_layers": 5},
         AROUND_8),
    Case("starcoder2", "Starcoder2", {"sliding_window": 8}, AROUND_8),
    Case("starcoder2-no-bias", "Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    Case("gemma", "Gemma"),
    Case("gemma2", "Gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
         "query_pre_attn_scalar": 20}, AROUND_8),
    Case("gemma2-uncapped", "Gemma2", {"sliding_window": 5, "attn_logit_softcapping": None, "num_hidden_layers": 4,
         "final_logit_softcapping": None}, (4, 5, 6, 20)),
    Case("gemma3n", "Gemma3n", {**SHARED, "num_kv_shared_layers": 3, "laurel_rank": 5,
         "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0, 0.3],
         "intermediate_size": [48, 40, 48, 48, 56, 48]}, AROUND_8),
    Case("gemma3n-three-streams", "Gemma3n", {**SHARED, "num_kv_shared_layers": 0, "altup_num_inputs": 3,
         "final_logit_softcapping": 9.0}, AROUND_8),
    Case("gemma4", "Gemma4", {**SHARED, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 16,
         "final_logit_softcapping": 20.0}, AROUND_8),
    Case("gemma4-keys-as-values", "Gemma4", {**SHARED, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "global_head_dim": 16, "hidden_size_per_layer_input": 0}, AROUND_8),
    Case("gpt-neox", "GPTNeoX", partial(0.25), without=NEOX),
    Case("gpt-neox-sequential", "GPTNeoX", {"use_parallel_residual": False, "attention_bias": False,
         **partial(1.0)}, without=NEOX),
    Case("gpt2", "GPT2", {"n_positions": 64}, without=SIZED),
    Case("gpt2-by-layer", "GPT2", {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True}, without=SIZED),
    Case("gpt2-untied", "GPT2", {"tie_word_embeddings": False, "activation_function": "relu"}, without=SIZED),
    Case("seed-oss", "SeedOss", {"attention_out_bias": True, "head_dim": 16, **base(500.0)}),
    Case("seed-oss-no-bias", "SeedOss", {"attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("nemotron", "Nemotron", {"head_dim": 16, **partial(0.5)}),
    Case("nemotron-bias", "Nemotron", {"attention_bias": True, "mlp_bias": True, **partial(0.25)}),
    Case("phi3", "Phi3", {"sliding_window": 8}, AROUND_8, without=("head_dim",)),
    Case("phi3-long", "Phi3", {"original_max_position_embeddings": 16, "max_position_embeddings": 64,
         "rope_parameters": LONG_ROPE}, AROUND_16, without=("head_dim",)),
    Case("phi3-partial", "Phi3", {"num_attention_heads": 2, **partial(0.75)}, without=("head_dim",)),
)  # fmt: skip
