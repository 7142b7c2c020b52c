"""Granite 3: a Llama whose embeddings, attention scores, residuals and logits are multiplied by numbers."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import decoder, heads, mlp
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.take("attention_bias", False))
    shape = heads(config) | {"scale": float(config.take("attention_multiplier", 1.0))}
    turned = rope(config, shape["head_dim"])
    layer = LayerSpec(
        AttentionSpec(FullAttention(), **shape, rope=turned, bias=bias, output_bias=bias),
        mlp(config, bool(config.take("mlp_bias", False))),
        residual_scale=float(config.take("residual_multiplier", 1.0)),
    )
    return decoder(
        config,
        [layer] * config.take("num_hidden_layers"),
        embedding_scale=float(config.take("embedding_multiplier", 1.0)),
        logit_scale=1.0 / config.take("logits_scaling", 1.0),
    )


FAMILY = Family("granite", ("GraniteForCausalLM", "granite"), spec, llama.NAMES)
