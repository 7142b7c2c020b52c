"""Nemotron 4, Minitron: LayerNorm whose weights are stored less 1, rope on half of each head, and an MLP
without gate, of squared ReLU."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import activation, decoder, heads
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "model.layers.{i}"
NAMES = {
    **llama.NAMES,
    "final_norm.bias": ("model.norm.bias",),
    "layers.{i}.attention.norm.bias": (f"{_LAYER}.input_layernorm.bias",),
    "layers.{i}.mlp.norm.bias": (f"{_LAYER}.post_attention_layernorm.bias",),
    "layers.{i}.mlp.up.weight": (f"{_LAYER}.mlp.up_proj.weight",),
    "layers.{i}.mlp.up.bias": (f"{_LAYER}.mlp.up_proj.bias",),
}


def spec(config: Config) -> DecoderSpec:
    shape, bias = heads(config), bool(config.take("attention_bias", False))
    config.expect("kv_channels", shape["head_dim"], default=shape["head_dim"])
    attention = AttentionSpec(
        FullAttention(), **shape, rope=rope(config, shape["head_dim"], partial=0.5), bias=bias, output_bias=bias
    )
    inner = MlpSpec(
        config.take("intermediate_size"),
        activation(config, default="relu2"),
        bias=bool(config.take("mlp_bias", False)),
        gated=False,
    )
    layers = [LayerSpec(attention, inner)] * config.take("num_hidden_layers")
    return decoder(config, layers, "norm_eps", 1e-5, norm="layer", norm_bias=True, norm_offset=1.0)


FAMILY = Family("nemotron", ("NemotronForCausalLM", "nemotron"), spec, NAMES)
