"""Llama 4, text: chunked attention where there is rope, full attention with a query temperature where there
is not; a mixture of experts on some layers."""

from __future__ import annotations

from exactkv.cache import ChunkedAttention, FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import max_length
from exactkv.models.families.family import Family, Names, Transposed
from exactkv.models.families.ropes import rope
from exactkv.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QueryTemperature,
)

_FF = "model.layers.{i}.feed_forward"

NAMES: Names = {
    **llama.NAMES,
    "layers.{i}.mlp.gate_up.weight": (f"{_FF}.gate_proj.weight", f"{_FF}.up_proj.weight"),
    "layers.{i}.mlp.down.weight": (f"{_FF}.down_proj.weight",),
    "layers.{i}.mlp.router.weight": (f"{_FF}.router.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (Transposed(f"{_FF}.experts.gate_up_proj"),),
    "layers.{i}.mlp.experts.down.weight": (Transposed(f"{_FF}.experts.down_proj"),),
    "layers.{i}.mlp.shared.gate_up.weight": (
        f"{_FF}.shared_expert.gate_proj.weight",
        f"{_FF}.shared_expert.up_proj.weight",
    ),
    "layers.{i}.mlp.shared.down.weight": (f"{_FF}.shared_expert.down_proj.weight",),
}


def spec(config: Config) -> DecoderSpec:
    hidden, count = config.take("hidden_size"), config.take("num_hidden_layers")
    heads = config.take("num_attention_heads")
    head_dim = config.take("head_dim", hidden // heads)
    turned = rope(config, head_dim, 500_000.0, interleaved=True)
    chunk = config.take("attention_chunk_size", 8192, nullable=True)
    chunked = FullAttention() if chunk is None else ChunkedAttention(chunk_size=chunk)
    temperature = QueryTemperature(config.take("attn_scale", 0.1), config.take("floor_scale", 8192))
    tuned = bool(config.take("attn_temperature_tuning", True))
    qk_norm = "unit" if config.take("use_qk_norm", True) else None
    bias = bool(config.take("attention_bias", False))
    kv_heads = config.take("num_key_value_heads", heads)
    activation = config.expect("hidden_act", "silu", default="silu")
    inner = config.take("intermediate_size")
    dense = MlpSpec(config.take("intermediate_size_mlp"), activation)
    moe = MoeSpec(
        config.take("num_local_experts"), config.take("num_experts_per_tok", 1), inner, activation, inner,
        scores="sigmoid", scores_input=True,
    )  # fmt: skip
    step = config.take("interleave_moe_layer_step", 1)
    mixtures = config.take("moe_layers", list(range(step - 1, count, step)))
    layers = []
    for i, has_rope in enumerate(_rope_layers(config, count)):
        attention = AttentionSpec(
            pattern=chunked if has_rope else FullAttention(),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=turned if has_rope else None,
            qk_norm=qk_norm if has_rope else None,
            temperature=temperature if tuned and not has_rope else None,
            bias=bias,
            output_bias=bias,
        )
        layers.append(LayerSpec(attention, moe if i in mixtures else dense))
    return DecoderSpec(
        family="llama4",
        vocab_size=config.take("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layers),
        norm_eps=config.take("rms_norm_eps", 1e-5),
        max_length=max_length(config, layers, 131_072),
        tied_head=bool(config.take("tie_word_embeddings", False)),
    )


def _rope_layers(config: Config, count: int) -> list[bool]:
    """1 in ``no_rope_layers`` means that the layer *has* rope; no list, that every fourth has none."""
    every = config.take("no_rope_layer_interval", 4)
    given = config.take("no_rope_layers", []) or [int((i + 1) % every != 0) for i in range(count)]
    if len(given) != count:
        raise LoadError(f"config of a llama4 model: no_rope_layers has {len(given)} entries for {count} layers")
    has_rope = [bool(x) for x in given]
    kinds = config.take("layer_types", None)
    expected = ["chunked_attention" if x else "full_attention" for x in has_rope]
    if kinds is not None and list(kinds) != expected:
        raise LoadError("config of a llama4 model: layer_types does not agree with no_rope_layers")
    return has_rope


FAMILY = Family(
    "llama4",
    ("Llama4ForCausalLM", "llama4_text", "Llama4ForConditionalGeneration", "llama4"),
    spec,
    NAMES,
    nested="text_config",
    prefixes=("", "language_model."),
    left_aside=(r".*rotary_emb\.inv_freq", r"vision_model\..*", r"multi_modal_projector\..*"),
)
