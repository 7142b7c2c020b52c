"""Configs with the fields that the hub's files have, older and newer forms: each is read, and means what it should."""

from __future__ import annotations

from typing import Any

import pytest

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.errors import LoadError
from exactkv.models.families import find_family
from exactkv.models.load import read_spec, text_config
from exactkv.models.shapes import shape_config, shape_names
from exactkv.models.spec import DecoderSpec, LongRope, MlpSpec, MoeSpec, Proportion, YarnScaling

EVERYWHERE = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip


def spec(name: str) -> DecoderSpec:
    config = shape_config(name)
    added = {k: v for k, v in EVERYWHERE.items() if k != "hidden_act" or "hidden_act" in config}
    fields = {**added, **config}
    return read_spec(find_family(fields), fields)


@pytest.mark.parametrize("name", shape_names())
def test_the_hubs_configs_are_read(name: str) -> None:
    config = shape_config(name)
    assert len(spec(name).layers) == config.get("num_hidden_layers", config.get("n_layer"))


def test_they_mean_what_they_should() -> None:
    assert spec("qwen2.5-0.5b").layers[0].attention.bias and not spec("qwen2.5-0.5b").layers[0].attention.output_bias
    gemma = spec("gemma-2-2b").layers
    assert gemma[0].attention.pattern == SlidingWindow(window=4096) and gemma[1].attention.pattern == FullAttention()
    phi = spec("phi-4-mini").layers[0].attention
    assert (
        phi.rope.dim == 96
        and isinstance(phi.rope.scaling, LongRope)
        and phi.rope.amplitude == pytest.approx(1.19, abs=0.01)
    )
    command = spec("c4ai-command-r7b")
    assert [layer.attention.rope is None for layer in command.layers[:4]] == [False, False, False, True]
    oss = spec("gpt-oss-20b").layers[0].attention
    assert oss.rope.scaling == YarnScaling(32.0, 4096, truncate=False) and oss.sinks
    v3 = spec("deepseek-v3")
    assert [type(layer.mlp) for layer in v3.layers[2:4]] == [MlpSpec, MoeSpec]
    assert v3.layers[0].attention.scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert v3.layers[0].attention.rope.amplitude == 1.0
    assert v3.cache_spec("x").layers[0].parts == {"latent": (1, 576)}
    assert spec("pythia-70m").layers[0].attention.rope.dim == 16
    minitron = spec("minitron-8b")
    assert minitron.layers[0].attention.rope.dim == 64 and minitron.norm_offset == 1.0
    seed = spec("seed-oss-36b").layers[0].attention
    assert (seed.head_dim, seed.rope.base, seed.bias, seed.output_bias) == (128, 1e7, True, False)
    e2b = spec("gemma-4-e2b").layers
    assert [e2b[i].shares for i in (14, 15, 19, 34)] == [None, 13, 14, 14]
    assert [layer.mlp.intermediate_size for layer in e2b[14:16]] == [6144, 12_288]
    large = spec("gemma-4-31b").layers
    assert [(x.attention.num_kv_heads, x.attention.head_dim, x.attention.keys_as_values) for x in large[4:6]] == [
        (16, 256, False), (4, 512, True),
    ]  # fmt: skip
    assert large[5].attention.rope.scaling == Proportion(64) and large[5].attention.rope.base == 1e6
    assert spec("gemma-4-26b-a4b").layers[0].beside.top_k == 8


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


def test_null_means_the_same_within_a_larger_config() -> None:
    scout = {**shape_config("llama-4-scout", 4), "attention_chunk_size": None}
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": scout}
    for config in (scout, outer):
        family, fields = text_config(config)
        assert {str(x.attention.pattern) for x in read_spec(family, fields).layers if x.attention} == {"full"}


@pytest.mark.parametrize("part", [0.5, 2.0, "x", True])
def test_a_part_of_the_head_that_the_family_does_not_turn_is_refused(part: Any) -> None:
    for name in ("llama-3.1-8b", "qwen3-0.6b", "gemma-2-2b"):
        with pytest.raises(LoadError, match="partial_rotary_factor"):
            config = {**shape_config(name), "partial_rotary_factor": part}
            read_spec(find_family(config), config)
    if part != 0.5:
        with pytest.raises(LoadError, match="partial_rotary_factor"):
            read_spec(find_family(GLM), {**GLM, "partial_rotary_factor": part})


GLM = shape_config("glm-4-9b-0414")


def test_rope_types_that_contradict_each_other_are_refused() -> None:
    scaling = {"type": "linear", "rope_type": "dynamic", "factor": 2.0}
    config = {**shape_config("qwen3-0.6b"), "rope_scaling": scaling}
    with pytest.raises(LoadError, match="dynamic and linear"):
        read_spec(find_family(config), config)
