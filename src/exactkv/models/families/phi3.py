"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with q, k, v and gate, up in one tensor each; long rope, on a part
of each head in some."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import SLIDING, decoder, heads, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec

NAMES = {
    **llama.NAMES,
    "layers.{i}.attention.qkv.weight": ("model.layers.{i}.self_attn.qkv_proj.weight",),
    "layers.{i}.mlp.gate_up.weight": ("model.layers.{i}.mlp.gate_up_proj.weight",),
}


def spec(config: Config) -> DecoderSpec:
    shape = heads(config)
    turned = rope(config, shape["head_dim"], partial=1.0)
    config.expect("attention_bias", False, default=False)
    config.expect("mlp_bias", False, default=False)
    config.ignore("original_max_position_embeddings")
    config.expect("interpolate_factor", 1, default=1)
    config.expect("lm_head_bias", False, default=False)
    config.expect("full_attn_mod", 1, default=1)
    layer = LayerSpec(AttentionSpec(patterns(config, None)[SLIDING], **shape, rope=turned), mlp(config))
    return decoder(config, [layer] * config.take("num_hidden_layers"), default_eps=1e-5)


FAMILY = Family("phi3", ("Phi3ForCausalLM", "phi3"), spec, NAMES)
