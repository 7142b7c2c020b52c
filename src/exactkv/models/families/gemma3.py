"""Gemma 3, text: windowed layers with every sixth full, each kind with its own rope base; q/k norm before rope,
norms that multiply by 1 + w, also after attention and MLP; embeddings scaled by sqrt(hidden)."""

from __future__ import annotations

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.family import Family, rope_fields, rope_scaling
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

NAMES = {
    **llama.NAMES,
    "layers.{i}.attention.q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight",),
    "layers.{i}.attention.k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight",),
    "layers.{i}.attention.post_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.norm.weight": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
    "layers.{i}.mlp.post_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight",),
}


def spec(config: Config) -> DecoderSpec:
    hidden = config.take("hidden_size", 2304)
    head_dim = config.take("head_dim", 256)
    config.expect("use_bidirectional_attention", False, default=False)
    config.expect("attn_logit_softcapping", None)
    config.expect("final_logit_softcapping", None)
    bias = bool(config.take("attention_bias", False))
    ropes = _ropes(config, head_dim)
    window = config.take("sliding_window", 4096)
    patterns = {"full_attention": FullAttention(), "sliding_attention": SlidingWindow(window=window)}
    mlp = MlpSpec(
        config.take("intermediate_size", 9216),
        {"gelu_pytorch_tanh": "gelu_tanh"}[
            config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
        ],
    )
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                pattern=patterns[kind],
                num_heads=config.take("num_attention_heads", 8),
                num_kv_heads=config.take("num_key_value_heads", 4),
                head_dim=head_dim,
                scale=config.take("query_pre_attn_scalar", 256) ** -0.5,
                rope=ropes[kind],
                qk_norm="head",
                bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
            post_norms=True,
        )
        for kind in _layer_types(config)
    )
    return DecoderSpec(
        family="gemma3",
        vocab_size=config.take("vocab_size", 262_208),
        hidden_size=hidden,
        layers=layers,
        norm_eps=config.take("rms_norm_eps", 1e-6),
        max_length=config.take("max_position_embeddings", 131_072),
        tied_head=bool(config.take("tie_word_embeddings", True)),
        norm_offset=1.0,
        embedding_scale=hidden**0.5,
    )


def _layer_types(config: Config) -> list[str]:
    count = config.take("num_hidden_layers", 26)
    every = config.take("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    kinds = config.take("layer_types", default)
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise LoadError(
            f"config of a gemma3 model: layer_types = {kinds!r}; expected {count} of "
            "'full_attention' and 'sliding_attention'"
        )
    return list(kinds)


def _ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """Scaling is for full layers only. Newer configs hold a dict a kind of layer in rope_parameters."""
    kinds = config.fields.get("rope_parameters") or {}
    if "full_attention" in kinds:
        config.ignore("rope_parameters", "rope_theta", "rope_local_base_freq", "rope_scaling")
        full, local = dict(kinds["full_attention"]), dict(kinds["sliding_attention"])
        base, local_base = full.pop("rope_theta", 1_000_000.0), local.pop("rope_theta", 10_000.0)
        scaling, local_scaling = rope_scaling(config, full), rope_scaling(config, local)
    else:
        base, scaling = rope_fields(config, default_base=1_000_000.0)
        local_base, local_scaling = config.take("rope_local_base_freq", 10_000.0), None
    return {
        "full_attention": RopeSpec(head_dim, float(base), scaling=scaling),
        "sliding_attention": RopeSpec(head_dim, float(local_base), scaling=local_scaling),
    }


FAMILY = Family(
    "gemma3", ("Gemma3ForCausalLM", "gemma3_text"), spec, NAMES,
)  # fmt: skip
