"""Seed-OSS: a Llama whose biases on q, k, v and on the output of attention are chosen each by a field of its own."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import decoder, heads, mlp
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    shape = heads(config)
    attention = AttentionSpec(
        FullAttention(),
        **shape,
        rope=rope(config, shape["head_dim"]),
        bias=bool(config.take("attention_bias", True)),
        output_bias=bool(config.take("attention_out_bias", False)),
    )
    layer = LayerSpec(attention, mlp(config, bias=bool(config.take("mlp_bias", False))))
    config.ignore("pretraining_tp", "residual_dropout")
    return decoder(config, [layer] * config.take("num_hidden_layers"))


FAMILY = Family("seed_oss", ("SeedOssForCausalLM", "seed_oss"), spec, llama.NAMES)
