"""The oracle's cases: Llama, Mistral, Gemma 3, Llama 4."""

from __future__ import annotations

from typing import Any

from tests.models.oracle import Case


def llama3_rope(low: float = 1.0, high: float = 4.0, base: float = 500.0) -> dict[str, Any]:
    """Head size 8 and base 500 make wavelengths 6.3, 30, 140 and 664: below, between and above the bounds."""
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": 8.0,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 64,
    }


def gemma_rope(full: dict[str, Any], local_base: float = 100.0) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": local_base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LLAMA4 = {
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "num_hidden_layers": 4,
    "rope_parameters": PLAIN_ROPE,
}
AROUND_16 = (1, 15, 16, 17, 40)
AROUND_8 = (1, 7, 8, 9, 16, 17, 33)


def llama4(name: str, lengths: tuple[int, ...] = AROUND_8, kind: str = "Llama4", **fields: Any) -> Case:
    return Case(name, kind, {**LLAMA4, **fields}, lengths)


def gemma3(name: str, lengths: tuple[int, ...] = AROUND_8, **fields: Any) -> Case:
    pattern = ["sliding_attention", "full_attention", "sliding_attention"]
    return Case(name, "Gemma3", {"layer_types": pattern, "query_pre_attn_scalar": 8, **fields}, lengths)


CASES = (
    Case("llama", "Llama", {"rope_parameters": PLAIN_ROPE}),
    Case("llama-many-heads", "Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    Case("llama-rope-llama3", "Llama", {"rope_parameters": llama3_rope()}, (1, 63, 64, 65, 100)),
    Case("llama-rope-linear", "Llama", {"rope_parameters": LINEAR_ROPE}, (1, 63, 64, 65, 100)),
    Case("llama-rope-dynamic", "Llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC_ROPE}, AROUND_16),
    Case("llama-attention-bias", "Llama", {"attention_bias": True}),
    Case("llama-mlp-bias", "Llama", {"mlp_bias": True}),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("llama-relu", "Llama", {"hidden_act": "relu"}),
    Case("llama-quick-gelu", "Llama", {"hidden_act": "quick_gelu"}),
    Case("mistral-window", "Mistral", {"sliding_window": 8}, AROUND_8),
    Case("mistral-no-window", "Mistral", {"sliding_window": None}),
    gemma3("gemma3", sliding_window=8, **gemma_rope(PLAIN_ROPE)),
    gemma3("gemma3-default-pattern", sliding_window=8, num_hidden_layers=7, layer_types=None),
    gemma3("gemma3-rope-linear", sliding_window=8, **gemma_rope(LINEAR_ROPE)),
    gemma3("gemma3-rope-llama3", (8, 64, 65), sliding_window=8, **gemma_rope(llama3_rope())),
    gemma3("gemma3-scale-bias-untied", (4, 5, 6, 20), query_pre_attn_scalar=20, attention_bias=True,
           tie_word_embeddings=False, sliding_window=5),
    gemma3("gemma3-capped", sliding_window=8, final_logit_softcapping=3.0),
    llama4("llama4"),
    llama4("llama4-chunk-4", (3, 4, 5, 8, 9, 30), attention_chunk_size=4),
    llama4("llama4-chunk-5", (4, 5, 6, 10, 11, 30), attention_chunk_size=5),
    llama4("llama4-chunk-null", (1, 8, 9, 40), attention_chunk_size=None),
    llama4("llama4-no-rope-given", no_rope_layers=[0, 1, 1, 0]),
    llama4("llama4-no-rope-empty", no_rope_layers=[], num_hidden_layers=5),
    llama4("llama4-no-rope-interval", no_rope_layer_interval=2),
    llama4("llama4-no-qk-norm", use_qk_norm=False),
    llama4("llama4-no-temperature", attn_temperature_tuning=False),
    llama4("llama4-temperature", (1, 2, 3, 4, 6, 50), floor_scale=3, attn_scale=0.7),
    llama4("llama4-moe-layers", moe_layers=[0, 3]),
    llama4("llama4-moe-none", (9,), moe_layers=[]),
    llama4("llama4-moe-step-2", interleave_moe_layer_step=2),
    llama4("llama4-moe-top-2", num_experts_per_tok=2),
    llama4("llama4-bias-tied", (9,), attention_bias=True, tie_word_embeddings=True),
    llama4("llama4-rope-llama3", (8, 64, 65), rope_parameters=llama3_rope()),
    llama4("llama4-rope-equal-factors", (8, 64, 65), rope_parameters=llama3_rope(1.0, 1.0)),
    llama4("llama4-with-vision", kind="Llama4Vision"),
)  # fmt: skip
