"""Gemma 3, text: windowed layers with every sixth full, each kind with its own rope base; q/k norm before rope,
norms that multiply by 1 + w, also after attention and MLP; embeddings scaled by sqrt(hidden)."""

from __future__ import annotations

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import FULL, SLIDING, every, layer_kinds, max_length
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import ropes_of_kinds
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

NAMES = {
    **llama.NAMES,
    "layers.{i}.attention.post_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.norm.weight": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
    "layers.{i}.mlp.post_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight",),
}


def spec(config: Config) -> DecoderSpec:
    hidden = config.take("hidden_size", 2304)
    head_dim = config.take("head_dim", 256)
    config.expect("use_bidirectional_attention", False, default=False)
    config.expect("attn_logit_softcapping", None)
    bias = bool(config.take("attention_bias", False))
    bases = {FULL: 1_000_000.0, SLIDING: 10_000.0}
    ropes = ropes_of_kinds(config, dict.fromkeys(bases, head_dim), bases, "rope_local_base_freq")
    window = config.take("sliding_window", 4096)
    patterns = {FULL: FullAttention(), SLIDING: SlidingWindow(window=window)}
    mlp = MlpSpec(
        config.take("intermediate_size", 9216),
        {"gelu_pytorch_tanh": "gelu_tanh"}[
            config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
        ],
    )
    default = every(config.take("num_hidden_layers", 26), config.take("sliding_window_pattern", 6))
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
        for kind in layer_kinds(config, default)
    )
    return DecoderSpec(
        family="gemma3",
        vocab_size=config.take("vocab_size", 262_208),
        hidden_size=hidden,
        layers=layers,
        norm_eps=config.take("rms_norm_eps", 1e-6),
        max_length=max_length(config, layers, 131_072, linear=False),  # theirs counts it
        tied_head=bool(config.take("tie_word_embeddings", True)),
        norm_offset=1.0,
        embedding_scale=hidden**0.5,
        logit_softcap=config.take("final_logit_softcapping", None),
    )


FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "gemma3_text", "Gemma3ForConditionalGeneration", "gemma3"),
    spec,
    NAMES,
    nested="text_config",
    prefixes=("", "language_model.", "model.language_model."),
    left_aside=(r".*rotary_emb\.inv_freq", r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
)
