"""Configs with the fields that the hub's files have, older and newer forms: each is read, and means what it should."""

from __future__ import annotations

from typing import Any

import pytest

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.spec import DecoderSpec, LongRope, MlpSpec, MoeSpec, YarnScaling

EVERYWHERE = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, length: int, **fields: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": length, **fields,
    }  # fmt: skip


HUB: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 24, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
        "use_sliding_window": False, **sizes(896, 4864, 24, 14, 2, 151936, 32768),
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        **sizes(1024, 3072, 28, 16, 8, 151936, 40960),
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
        "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        **sizes(2048, 6144, 48, 32, 4, 151936, 40960),
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        **sizes(2304, 9216, 26, 8, 4, 256000, 8192, hidden_act="gelu_pytorch_tanh"),
    },
    "Phi-3.5-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0,
        "auto_map": {"AutoConfig": "x"}, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        **sizes(3072, 8192, 32, 32, 32, 32064, 131072),
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0,
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        **sizes(3072, 8192, 32, 24, 8, 200064, 131072),
    },
    "c4ai-command-r7b": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False,
        "cache_implementation": "hybrid", "head_dim": 128, "layer_norm_eps": 1e-5, "layer_switch": 4,
        "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
        **sizes(4096, 14336, 32, 32, 8, 256000, 8192),
    },
    "OLMo-2-1B": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        **sizes(2048, 8192, 16, 16, 16, 100352, 4096),
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pretraining_tp": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        **sizes(2048, 11008, 36, 16, 4, 128256, 65536),
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True, "head_dim": 128,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        **sizes(4096, 13696, 40, 32, 2, 151552, 32768),
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
        **sizes(4096, 10944, 46, 96, 8, 151552, 131072),
    },
    "granite-3.3-2b": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000.0,
        "tie_word_embeddings": True, **sizes(2048, 8192, 40, 32, 8, 49159, 131072),
    },
    "EXAONE-4.0-1.2B": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 64, "sliding_window": None,
        "layer_types": ["full_attention"] * 30, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "sliding_window_pattern": None, "tie_word_embeddings": True, **sizes(2048, 4096, 30, 32, 8, 102400, 65536),
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        **sizes(2880, 2880, 24, 64, 8, 201088, 131072),
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
        "auto_map": {}, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        **sizes(2048, 10944, 27, 16, 16, 102400, 163840),
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "auto_map": {}, "ep_size": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "quantization_config": {"quant_method": "fp8"}, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        **sizes(7168, 18432, 61, 128, 128, 129280, 163840),
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {}, "vocab_size": 50257,
    },
    "pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512,
        "intermediate_size": 2048, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu",
        "embedding_dropout": 0.1, "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
        "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True,
        **sizes(3072, 12288, 30, 24, 2, 49152, 16384, hidden_act="gelu_pytorch_tanh"),
    },
    "Seed-OSS-36B": {
        "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True,
        "attention_out_bias": False, "head_dim": 128, "mlp_bias": False, "residual_dropout": 0.1,
        "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": False, **sizes(5120, 27648, 64, 80, 8, 155136, 524288),
    },
    "Minitron-8B": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "attention_bias": False, "head_dim": 128,
        "mlp_bias": False, "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, **sizes(4096, 16384, 32, 48, 8, 256000, 4096, hidden_act="relu2"),
    },
    "Ministral-8B": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 100000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
        **sizes(4096, 12288, 36, 32, 8, 131072, 32768),
    },
}  # fmt: skip


def spec(name: str) -> DecoderSpec:
    fields = {**EVERYWHERE, **HUB[name]}
    fields.pop("quantization_config", None)
    if name == "gpt2":
        del fields["hidden_act"]
    return read_spec(find_family(fields), fields)


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_configs_are_read(name: str) -> None:
    assert len(spec(name).layers) == HUB[name].get("num_hidden_layers", HUB[name].get("n_layer"))


def test_they_mean_what_they_should() -> None:
    assert spec("Qwen2.5-0.5B").layers[0].attention.bias and not spec("Qwen2.5-0.5B").layers[0].attention.output_bias
    gemma = spec("gemma-2-2b").layers
    assert gemma[0].attention.pattern == SlidingWindow(window=4096) and gemma[1].attention.pattern == FullAttention()
    phi = spec("Phi-4-mini").layers[0].attention
    assert (
        phi.rope.dim == 96
        and isinstance(phi.rope.scaling, LongRope)
        and phi.rope.amplitude == pytest.approx(1.19, abs=0.01)
    )
    command = spec("c4ai-command-r7b")
    assert [layer.attention.rope is None for layer in command.layers[:4]] == [False, False, False, True]
    oss = spec("gpt-oss-20b").layers[0].attention
    assert oss.rope.scaling == YarnScaling(32.0, 4096, truncate=False) and oss.sinks
    v3 = spec("DeepSeek-V3")
    assert [type(layer.mlp) for layer in v3.layers[2:4]] == [MlpSpec, MoeSpec]
    assert v3.layers[0].attention.scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert v3.layers[0].attention.rope.amplitude == 1.0
    assert v3.cache_spec("x").layers[0].parts == {"latent": (1, 576)}
    assert spec("pythia-70m").layers[0].attention.rope.dim == 16
    minitron = spec("Minitron-8B")
    assert minitron.layers[0].attention.rope.dim == 64 and minitron.norm_offset == 1.0
    seed = spec("Seed-OSS-36B").layers[0].attention
    assert (seed.head_dim, seed.rope.base, seed.bias, seed.output_bias) == (128, 1e7, True, False)


NESTED = {
    "gemma-3-4b": ("Gemma3ForConditionalGeneration", "gemma3", {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }),
    "gemma-3n-E2B": ("Gemma3nForConditionalGeneration", "gemma3n", {
        "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4,
        "attention_bias": False, "final_logit_softcapping": 30.0, "head_dim": 256, "laurel_rank": 64,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
        "intermediate_size": [8192] * 30, "max_position_embeddings": 32768, "num_attention_heads": 8,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "num_hidden_layers": 30,
        "num_key_value_heads": 2, "num_kv_shared_layers": 10, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_text_models_within_larger_ones(name: str) -> None:
    architecture, kind, text = NESTED[name]
    config = {"architectures": [architecture], "model_type": kind, "text_config": text, "vision_config": {}}
    family = find_family(config)
    assert family.nested == "text_config"
    found = read_spec(family, config["text_config"])
    assert len(found.layers) == text["num_hidden_layers"]
    if kind == "gemma3n":
        assert [layer.shares for layer in found.layers[18:22]] == [None, None, 18, 18]
        assert found.layers[24].shares == 19 and found.layers[29].shares == 19
