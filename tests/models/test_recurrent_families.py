"""What recurrent and hybrid families say: the configs of real models read, their specs whole, their caches' bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactkv.errors import LoadError
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.model import Model
from exactkv.models.parameters import parameters
from exactkv.models.random import random_weights
from exactkv.models.spec import DecoderSpec, check_spec
from exactkv.ops import REFERENCE
from tests.models.oracle import config_of, difference, tokens
from tests.models.test_recurrent_oracle import CASES

COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02, "use_cache": True,
          "torch_dtype": "bfloat16", "transformers_version": "4.55.0"}  # fmt: skip
TIME_STEPS = {"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001}
HUB: dict[str, dict[str, Any]] = {
    "mamba-130m-hf": {
        "architectures": ["MambaForCausalLM"], "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "expand": 2,
        "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768, "intermediate_size": 1536,
        "layer_norm_epsilon": 1e-05, "model_type": "mamba", "n_layer": 24, "num_hidden_layers": 24,
        "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "ssm_cfg": {}, "state_size": 16, **TIME_STEPS, "time_step_init_scheme": "random", "time_step_rank": 48,
        "time_step_scale": 1.0, "use_bias": False, "use_conv_bias": True, "vocab_size": 50280,
    },
    "Mamba-Codestral-7B-v0.1": {
        "architectures": ["Mamba2ForCausalLM"], "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05,
        "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
        "tie_word_embeddings": False, **TIME_STEPS, "time_step_init_scheme": "random",
        "time_step_limit": [0.0, float("inf")], "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": False,
        "use_conv_bias": True, "vocab_size": 32768,
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
        "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048,
        "conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
        "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
        "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0,
        "use_pos_enc": True, "vocab_size": 65536,
    },
    "Falcon-H1-0.5B": {
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
        "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
        "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384,
        "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2,
        "num_logits_to_keep": 1, "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, **TIME_STEPS,
        "time_step_rank": "auto", "vocab_size": 32784,
    },
    "Jamba-v0.1": {
        "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4, "attn_layer_period": 8,
        "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1, "expert_layer_period": 2,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
        "mamba_inner_layernorms": True, "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 262144,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
        "use_mamba_kernels": True, "vocab_size": 65536,
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536,
        "init_method": "mup", "intermediate_size": 512,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 6,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
        "num_local_experts": 64, "position_embedding_type": "nope", "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "shared_intermediate_size": 1024,
        "tie_word_embeddings": True, "vocab_size": 100352,
    },
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "recurrentgemma-2b": {
        "_block_types": ["recurrent", "recurrent", "attention"], "architectures": ["RecurrentGemmaForCausalLM"],
        "attention_bias": False, "attention_window_size": 2048,
        "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4,
        "embeddings_scale_by_sqrt_dim": True, "final_w_init_variance_scale": 0.07692307692307693, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360,
        "logits_soft_cap": 30.0, "lru_width": 2560, "model_type": "recurrent_gemma", "num_attention_heads": 10,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "vocab_size": 256000, "w_init_variance_scale": 0.01,
    },
}  # fmt: skip
PARAMETERS = {  # in millions, as the models' cards say or their names
    "mamba-130m-hf": 129, "Mamba-Codestral-7B-v0.1": 7285, "LFM2-1.2B": 1170, "Falcon-H1-0.5B": 521,
    "Jamba-v0.1": 51570, "granite-4.0-h-tiny": 6939, "Qwen3-Next-80B-A3B": 79674, "recurrentgemma-2b": 2683,
}  # fmt: skip


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    return read_spec(find_family(fields), {**COMMON, **fields})


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read(name: str) -> None:
    """All fields known; as many parameters as the model has."""
    spec = spec_of(HUB[name])
    count = sum(torch.Size(p.shape).numel() for p in parameters(spec).values())
    assert count / 1e6 == pytest.approx(PARAMETERS[name], rel=0.01)
    assert hash(spec) == hash(spec_of(HUB[name]))


def test_what_the_configs_mean() -> None:
    lfm2 = spec_of(HUB["LFM2-1.2B"])
    assert [i for i, layer in enumerate(lfm2.layers) if layer.attention] == [2, 5, 8, 10, 12, 14]
    assert lfm2.layers[0].mlp is not None and lfm2.layers[0].mlp.intermediate_size == 8192
    jamba = spec_of(HUB["Jamba-v0.1"])
    assert [i for i, layer in enumerate(jamba.layers) if layer.attention] == [4, 12, 20, 28]
    assert jamba.max_length == 262144 and not jamba.ropes
    assert spec_of({**HUB["LFM2-1.2B"], "intermediate_size": 12288}) == lfm2
    falcon = spec_of(HUB["Falcon-H1-0.5B"])
    assert all(layer.attention and layer.recurrent for layer in falcon.layers)
    granite = spec_of(HUB["granite-4.0-h-tiny"])
    assert [i for i, layer in enumerate(granite.layers) if layer.attention] == [5, 15, 25, 35] and not granite.ropes
    qwen = spec_of(HUB["Qwen3-Next-80B-A3B"])
    assert [i for i, layer in enumerate(qwen.layers) if layer.attention] == list(range(3, 48, 4))
    assert [rope.dim for rope in qwen.ropes] == [64]


@pytest.mark.parametrize(("name", "state"), [
    ("mamba-130m-hf", 24 * (3 * 1536 + 1536 * 16)),
    ("LFM2-1.2B", 10 * 2 * 2048),
    ("Falcon-H1-0.5B", 36 * (3 * (1536 + 2 * 128) + 24 * 64 * 128)),
    ("Qwen3-Next-80B-A3B", 36 * (3 * 8192 + 32 * 128 * 128)),
    ("recurrentgemma-2b", 18 * (3 * 2560 + 2560)),
])  # fmt: skip
def test_a_state_is_as_large_as_the_formula_says(name: str, state: int) -> None:
    layers = spec_of(HUB[name]).cache_spec("").recurrent
    assert sum(torch.Size(part.shape).numel() for layer in layers for part in layer.parts.values()) == state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_spec_holds_together(case: Any) -> None:
    """Its numbers are sane, it names a tensor of the files for every parameter; random weights run, and fast and
    slow, whole and in pieces, are one."""
    fields = config_of(case).to_dict()
    family, spec = find_family(fields), read_spec(find_family(fields), fields)
    check_spec(spec)
    for ours in parameters(spec):
        assert ours.replace(f"layers.{ours.split('.')[1]}.", "layers.{i}.", 1) in family.names
    weights = random_weights(spec, dtype=torch.float64)
    model, ids = Model(spec, weights), tokens(2, 19)
    expected = Model(spec, weights, ops=REFERENCE)(ids)
    assert expected is not None and expected.isfinite().all() and expected.std() > 0.01
    assert difference(model(ids), expected) < 1e-12
    cache = model.new_cache(2, slack=3)
    parts = [model(part, cache=cache) for part in ids.split((9, 1, 2, 7), dim=1)]
    assert difference(torch.cat([p for p in parts if p is not None], dim=1), expected) < 1e-12
    cache.check_integrity()
    assert cache.rewind(15) == [15, 15]
    again = model(ids[:, 15:], cache=cache)
    assert difference(again, expected[:, 15:]) < 1e-12


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("LFM2-1.2B", {"layer_types": ["conv", "mamba"] * 8}, "layer_types"),
    ("LFM2-1.2B", {"block_ff_dim": None}, "makes no sense"),
    ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 3}, "expected 40"),
    ("Qwen3-Next-80B-A3B", {"layer_types": ["conv"] * 48}, "linear_attention"),
    ("recurrentgemma-2b", {"block_types": ["mamba"]}, "block_types"),
    ("Falcon-H1-0.5B", {"attn_layer_indices": [1, 2]}, "attn_layer_indices"),
    ("Falcon-H1-0.5B", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("mamba-130m-hf", {"rms_norm": False}, "rms_norm"),
    ("mamba-130m-hf", {"state_size": 0}, "state_size"),
    ("Jamba-v0.1", {"sliding_window": 8}, "sliding_window"),
    ("Jamba-v0.1", {"mamba_of_the_future": 8}, "mamba_of_the_future"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        spec_of({**HUB[name], **changes})
