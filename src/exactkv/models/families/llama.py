"""Llama 2 and 3.x, SmolLM2: rope on every layer, grouped queries, SiLU gate."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families.common import decoder, heads, mlp
from exactkv.models.families.family import Family, Names
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"

NAMES: Names = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "final_norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
    "layers.{i}.attention.norm.weight": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.attention.qkv.weight": tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
    "layers.{i}.attention.qkv.bias": tuple(f"{_ATTENTION}.{x}_proj.bias" for x in "qkv"),
    "layers.{i}.attention.q_norm.weight": (f"{_ATTENTION}.q_norm.weight",),
    "layers.{i}.attention.k_norm.weight": (f"{_ATTENTION}.k_norm.weight",),
    "layers.{i}.attention.out.weight": (f"{_ATTENTION}.o_proj.weight",),
    "layers.{i}.attention.out.bias": (f"{_ATTENTION}.o_proj.bias",),
    "layers.{i}.mlp.norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{i}.mlp.gate_up.bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "layers.{i}.mlp.down.weight": (f"{_MLP}.down_proj.weight",),
    "layers.{i}.mlp.down.bias": (f"{_MLP}.down_proj.bias",),
}


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.take("attention_bias", False))
    config.expect("pretraining_tp", 1, default=1)
    config.expect("rope_interleaved", False, default=False)
    shape = heads(config)
    turned = rope(config, shape["head_dim"])
    layer = LayerSpec(
        AttentionSpec(FullAttention(), **shape, rope=turned, bias=bias, output_bias=bias),
        mlp(config, bool(config.take("mlp_bias", False))),
    )
    return decoder(config, [layer] * config.take("num_hidden_layers"))


FAMILY = Family("llama", ("LlamaForCausalLM", "llama"), spec, NAMES)
