"""Cohere 2 (Command R7B, Command A): attention and MLP in parallel after one LayerNorm without bias; three of four
layers windowed with interleaved rope, the fourth full without; logits scaled."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import SLIDING, decoder, every, heads, layer_kinds, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec

NAMES = {**llama.NAMES, "layers.{i}.mlp.norm.weight": ("model.layers.{i}.input_layernorm.weight",)}


def spec(config: Config) -> DecoderSpec:
    shape, by_kind = heads(config), patterns(config)
    bias = bool(config.take("attention_bias", False))
    config.expect("use_qk_norm", False, default=False)
    config.expect("use_parallel_block", True, default=True)
    config.expect("use_gated_activation", True, default=True)
    config.expect("use_parallel_embedding", True, default=True)
    config.expect("position_embedding_type", "rope_gptj", default="rope_gptj")
    config.expect("rotary_pct", 1.0, default=1.0)
    config.ignore("layer_switch", "order_of_interleaved_layers", "use_embedding_sharing")
    turned = rope(config, shape["head_dim"], interleaved=True)
    dense = mlp(config)
    default = every(config.take("num_hidden_layers"), config.take("sliding_window_pattern", 4))
    layers = [
        LayerSpec(
            AttentionSpec(
                by_kind[kind], **shape, rope=turned if kind == SLIDING else None, bias=bias, output_bias=bias
            ),
            dense,
            parallel=True,
        )
        for kind in layer_kinds(config, default)
    ]
    return decoder(
        config, layers, "layer_norm_eps", 1e-5, tied=True,
        norm="layer", logit_scale=float(config.take("logit_scale", 0.0625)),
    )  # fmt: skip


FAMILY = Family("cohere2", ("Cohere2ForCausalLM", "cohere2"), spec, NAMES)
