"""StarCoder2: LayerNorm, a plain MLP, biases everywhere, windows on some models."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import SLIDING, activation, decoder, heads, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "model.layers.{i}"
NAMES = {
    **llama.NAMES,
    "final_norm.bias": ("model.norm.bias",),
    "layers.{i}.attention.norm.bias": (f"{_LAYER}.input_layernorm.bias",),
    "layers.{i}.mlp.norm.bias": (f"{_LAYER}.post_attention_layernorm.bias",),
    "layers.{i}.mlp.up.weight": (f"{_LAYER}.mlp.c_fc.weight",),
    "layers.{i}.mlp.up.bias": (f"{_LAYER}.mlp.c_fc.bias",),
    "layers.{i}.mlp.down.weight": (f"{_LAYER}.mlp.c_proj.weight",),
    "layers.{i}.mlp.down.bias": (f"{_LAYER}.mlp.c_proj.bias",),
}


def spec(config: Config) -> DecoderSpec:
    shape, bias = heads(config), bool(config.take("use_bias", True))
    config.expect("norm_type", "layer_norm", default="layer_norm")
    config.expect("mlp_type", "default", default="default")
    config.ignore("residual_dropout", "embedding_dropout", "activation_function")
    turned = rope(config, shape["head_dim"])
    layer = LayerSpec(
        AttentionSpec(patterns(config, None)[SLIDING], **shape, rope=turned, bias=bias, output_bias=bias),
        MlpSpec(
            config.take("intermediate_size"), activation(config, default="gelu_pytorch_tanh"), bias=bias, gated=False
        ),
    )
    layers = [layer] * config.take("num_hidden_layers")
    return decoder(config, layers, "norm_epsilon", 1e-5, tied=True, norm="layer", norm_bias=True)


FAMILY = Family("starcoder2", ("Starcoder2ForCausalLM", "starcoder2"), spec, NAMES)
