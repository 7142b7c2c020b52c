"""Llama 2 and 3.x, SmolLM2 and Mistral: rope on every layer, grouped queries, SiLU gate; Mistral with a window."""

from __future__ import annotations

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.models.config import Config
from exactkv.models.families.family import Family, rope_fields
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"

NAMES = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "final_norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
    "layers.{i}.attention.norm.weight": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.attention.qkv.weight": tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
    "layers.{i}.attention.qkv.bias": tuple(f"{_ATTENTION}.{x}_proj.bias" for x in "qkv"),
    "layers.{i}.attention.out.weight": (f"{_ATTENTION}.o_proj.weight",),
    "layers.{i}.attention.out.bias": (f"{_ATTENTION}.o_proj.bias",),
    "layers.{i}.mlp.norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{i}.mlp.gate_up.bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "layers.{i}.mlp.down.weight": (f"{_MLP}.down_proj.weight",),
    "layers.{i}.mlp.down.bias": (f"{_MLP}.down_proj.bias",),
}


def spec(config: Config) -> DecoderSpec:
    hidden, heads = config.take("hidden_size"), config.take("num_attention_heads")
    head_dim = config.take("head_dim", hidden // heads)
    base, scaling = rope_fields(config)
    is_mistral = config.fields.get("model_type") == "mistral"
    window = config.take("sliding_window", 4096, nullable=True) if is_mistral else None
    bias = bool(config.take("attention_bias", False))
    config.expect("pretraining_tp", 1, default=1)
    config.expect("rope_interleaved", False, default=False)
    layer = LayerSpec(
        attention=AttentionSpec(
            pattern=FullAttention() if window is None else SlidingWindow(window=window),
            num_heads=heads,
            num_kv_heads=config.take("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=RopeSpec(head_dim, base, scaling=scaling),
            bias=bias,
            output_bias=bias,
        ),
        mlp=MlpSpec(
            config.take("intermediate_size"),
            config.expect("hidden_act", "silu", default="silu"),
            bias=bool(config.take("mlp_bias", False)),
        ),
    )
    return DecoderSpec(
        family="llama",
        vocab_size=config.take("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * config.take("num_hidden_layers"),
        norm_eps=config.take("rms_norm_eps", 1e-6),
        max_length=config.take("max_position_embeddings", 2048),
        tied_head=bool(config.take("tie_word_embeddings", False)),
    )


FAMILY = Family("llama", ("LlamaForCausalLM", "MistralForCausalLM", "llama", "mistral"), spec, NAMES)
