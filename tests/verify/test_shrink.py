"""Tiny models of real architectures: every kind of layer is there, and everything happens within 64 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import exactkv
from exactkv.errors import LoadError
from exactkv.models.load import read_spec
from exactkv.models.load import text_config as read_config
from exactkv.models.shapes import shape_config, shape_names, shape_spec
from exactkv.models.spec import DecoderSpec
from exactkv.verify.configs import read_config as read_file
from exactkv.verify.layout import by_rule, layer_count, with_default_rules
from exactkv.verify.shrink import describe_layers, shrink, text_config
from exactkv.verify.targets import transformers_calls as calls
from exactkv.verify.targets.exactkv import from_recipe, tiny


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for one another in models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


DEFAULTS = [
    "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "gemma3", "gemma3n", "phi3", "cohere", "cohere2", "olmo2", "olmo3", "smollm3", "glm4", "glm4_moe",
    "granite", "granitemoehybrid", "exaone4", "starcoder2", "gpt_oss", "gpt2", "gpt_neox", "mixtral", "olmoe",
    "llama4", "deepseek_v2", "deepseek_v3", "mamba", "mamba2", "falcon_h1", "jamba", "lfm2", "qwen3_next",
    "recurrent_gemma",
]  # fmt: skip

REAL = {
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-05,
        "vocab_size": 32000, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 16, "vocab_size": 128256,
        "rms_norm_eps": 1e-05, "max_position_embeddings": 131072, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "llama-dynamic-ntk": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 2048,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000, "sliding_window": 4096,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936,
        "max_position_embeddings": 40960, "max_window_layers": 28, "use_sliding_window": False,
        "sliding_window": None, "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": True,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "qwen2-windowed": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "use_sliding_window": True,
        "sliding_window": 32768, "max_window_layers": 21, "max_position_embeddings": 32768,
    },
    "gemma-3-270m": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "_sliding_window_pattern": 6,
        "hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "num_hidden_layers": 18, "vocab_size": 262144, "sliding_window": 512,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        "max_position_embeddings": 32768, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        "rope_scaling": None, "use_bidirectional_attention": False,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "phi-3.5-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32064, "sliding_window": 262144,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0 + 0.05 * (i // 12) for i in range(48)],
                         "long_factor": [1.08 + 1.3 * i for i in range(48)]},
        "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "initial_context_length": 4096, "swiglu_limit": 7.0, "rope_theta": 150000, "attention_bias": True,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "eos_token_id": 200002, "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "llama-4-scout": {
        "model_type": "llama4", "image_token_index": 200092, "vision_config": {"model_type": "llama4_vision_model"},
        "text_config": {
            "model_type": "llama4_text", "attention_chunk_size": 8192, "hidden_size": 5120, "head_dim": 128,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
            "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 48, "num_local_experts": 16,
            "num_experts_per_tok": 1, "no_rope_layers": [], "vocab_size": 202048, "use_qk_norm": True,
            "max_position_embeddings": 10485760, "rope_theta": 500000.0, "eos_token_id": [200001, 200007, 200008],
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "vocab_size": 129280, "max_position_embeddings": 163840, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
        "quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.Y"},
    },
    "mamba-130m": {
        "model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 24,
        "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 48, "vocab_size": 50280,
        "d_model": 768, "n_layer": 24, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False,
        "block_dim": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "vocab_size": 65536, "max_position_embeddings": 128000,
    },
    "granite-4-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)], "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_chunk_size": 256, "position_embedding_type": "nope", "shared_intermediate_size": 1024,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22,
        "logits_scaling": 6, "vocab_size": 100352, "rope_scaling": None, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Published configs, as far as they matter."""

CONFIGS = {name: CONFIG_MAPPING[name]().to_dict() for name in DEFAULTS} | REAL


def kinds(config: dict) -> set:
    """What the rules tell apart."""
    config = with_default_rules(text_config(config))
    return {by_rule(config, i, layer_count(config)) for i in range(layer_count(config))}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shrunk_config_builds_and_has_every_kind_of_layer(name):
    small = shrink(CONFIGS[name], seed=0)
    assert json.loads(json.dumps(small)) == small or "time_step_limit" in small
    model = calls.build(small)
    assert sum(p.numel() for p in model.parameters()) < 250_000
    logits = calls.full(model, [list(range(1, 40))])
    assert logits.shape == (1, 39, small["vocab_size"])
    assert 0.5 < logits.std() < 5
    assert layer_count(small) <= 6
    assert kinds(small) == kinds(CONFIGS[name])
    before = describe_layers(AutoConfig.for_model(**text_config(CONFIGS[name])).to_dict())
    after = describe_layers(model.config.to_dict())
    assert {layer.kind for layer in after} == {layer.kind for layer in before}
    assert all(layer.size is None or 4 <= layer.size <= 9 for layer in after)
    lists = [k for k in small if isinstance(small[k], list) and k in ("layer_types", "no_rope_layers")]
    assert all(len(small[k]) in (0, layer_count(small)) for k in lists)


def moes(model) -> list[bool]:
    return [any("expert" in n or "router" in n for n, _ in layer.named_modules()) for layer in model.model.layers]


def test_dense_and_expert_layers_both_stay():
    assert moes(calls.build(shrink(CONFIGS["deepseek-v3"])))[:2] == [False, True]
    assert moes(calls.build(shrink(CONFIGS["jamba"]))) == [False, True, False, True]
    maverick = {**CONFIGS["llama-4-scout"]["text_config"], "interleave_moe_layer_step": 2}
    assert moes(calls.build(shrink(maverick))) == [False, True, False, True]


def test_layers_keep_their_order_and_lists_are_cut_alike():
    small = shrink(CONFIGS["gemma3n"])
    assert small["layer_types"] == ["sliding_attention", "full_attention"] * 3
    assert small["activation_sparsity_pattern"] == [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]
    assert (small["num_kv_shared_layers"], small["intermediate_size"]) == (2, [64] * 6)
    assert shrink(CONFIGS["llama-4-scout"])["floor_scale"] == 4
    assert shrink(CONFIGS["lfm2-1.2b"])["full_attn_idxs"] == [2, 3]
    assert describe_layers(shrink(CONFIGS["qwen2-windowed"]))[0].kind == "full"


def test_what_is_shared_by_heads_stays_so():
    def shares(name: str) -> tuple[int, int]:
        small = shrink(CONFIGS[name])
        return small["num_attention_heads"], small["num_key_value_heads"]

    assert shares("llama-2-7b") == (4, 4)
    assert shares("llama-3.2-1b") == (4, 2)
    assert shares("gemma-3-270m") == (4, 1)


def test_the_rope_of_a_long_text_begins_within_64_tokens():
    for name in ("llama-dynamic-ntk", "phi-3.5-mini", "gpt-oss-20b", "llama-3.2-1b"):
        model = calls.build(shrink(CONFIGS[name]))
        rope = model.config.rope_parameters
        switch = rope.get("original_max_position_embeddings") or model.config.max_position_embeddings
        assert switch == 16, name
    small = shrink(CONFIGS["phi-3.5-mini"])
    assert len(small["rope_scaling"]["short_factor"]) == 4
    assert small["rope_scaling"]["short_factor"] != small["rope_scaling"]["long_factor"]
    assert small["max_position_embeddings"] == 16 * 32


def test_nothing_is_special_or_quantized():
    for name, config in CONFIGS.items():
        small = shrink(config)
        assert "quantization_config" not in small and "auto_map" not in small, name
        assert all(small[k] is None for k in small if k.endswith("_token_id")), name
        assert not any(small[k] for k in small if "dropout" in k or k.endswith("pdrop")), name


def test_seeds_vary_windows_and_leave_the_given_config_alone():
    config = json.loads(json.dumps(REAL["gpt-oss-20b"]))
    windows = {shrink(config, seed)["sliding_window"] for seed in range(12)}
    assert len(windows) > 2 and windows <= set(range(5, 10))
    assert config == REAL["gpt-oss-20b"]
    assert shrink(config, 3) == shrink(config, 3)
    assert shrink(config, layers=2)["layer_types"] == ["sliding_attention", "full_attention"]


def test_described_layers():
    def told(name: str) -> list[tuple[str, int | None]]:
        return [(layer.kind, layer.size) for layer in describe_layers(text_config(CONFIGS[name]))]

    assert told("mistral-7b-v0.1") == [("sliding", 4096)] * 32
    assert told("llama-4-scout")[:5] == [("chunked", 8192)] * 3 + [("full", None), ("chunked", 8192)]
    assert told("gemma-3-4b")[4:7] == [("sliding", 1024), ("full", None), ("sliding", 1024)]
    assert told("jamba")[3:6] == [("recurrent", None), ("full", None), ("recurrent", None)]
    assert told("recurrent_gemma")[1:3] == [("recurrent", None), ("sliding", 2048)]
    assert told("qwen2-windowed")[20:22] == [("full", None), ("sliding", 32768)]
    assert describe_layers({"model_type": "unheard_of", "num_hidden_layers": 4}) == ()


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-270m", "llama-4-scout", "gpt-oss-20b", "gpt2", "olmo2"])
def test_attention_matters_in_random_models(name):
    """Another first token moves the rows that can see it, by far more than rounding."""
    model = calls.build(shrink(CONFIGS[name]))
    tokens = torch.randint(1, 97, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    a, b = calls.full(model, [tokens])[0], calls.full(model, [[(tokens[0] + 7) % 97, *tokens[1:]]])[0]
    assert abs(a[5] - b[5]).max() > 0.05


@pytest.mark.parametrize("name", shape_names())
def test_our_engine_reads_every_real_config_made_tiny(name: str, tmp_path: Path) -> None:
    """So `exactkv verify config.json` runs for each; every kind of layer is still there."""
    (tmp_path / "config.json").write_text(json.dumps(shape_config(name)))
    config = read_file(str(tmp_path / "config.json"))
    assert config is not None
    family, fields = read_config(tiny(config))
    small, whole = read_spec(family, fields), shape_spec(name)

    def kinds(spec: DecoderSpec) -> set[tuple[str, bool]]:
        return {
            (type(x.attention.pattern).__name__ if x.attention else "", x.recurrent is not None) for x in spec.layers
        }

    assert kinds(small) == kinds(whole)
    with pytest.raises(LoadError, match="surprise"):
        family, fields = read_config(tiny({**config, "surprise": 3}))
        read_spec(family, fields)


def test_a_maximum_that_settles_another_rope_is_no_violation() -> None:
    """A cache made for fewer tokens has another rope, so it is not to be judged by the one pass of the whole model."""
    config: dict[str, Any] = {
        **shape_config("llama-3.1-8b"),
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
    }
    made = from_recipe({"config": tiny(config), "seed": 0})
    report = exactkv.verify(made, schedules=["steps", "capacity"])
    found = {o.schedule: str(o.status) for o in report.outcomes}
    assert found == {"steps": "exact", "capacity": "not supported"}
