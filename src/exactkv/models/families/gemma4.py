"""Gemma 4, text: as Gemma 3n without its streams; full layers with heads of another size whose rope turns a part of
the pairs, in some models with keys as values; the last layers may read the keys and values of earlier ones, a mixture
may lie beside every MLP."""

from __future__ import annotations

from typing import Any

from exactkv.models.config import Config
from exactkv.models.families import gemma3n
from exactkv.models.families.common import ACTIVATIONS, FULL, SLIDING, decoder, every, heads, layer_kinds, patterns
from exactkv.models.families.family import Family, Names
from exactkv.models.families.ropes import ropes_of_kinds
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

_LAYER = "model.layers.{i}"
NAMES: Names = {
    **gemma3n.PER_LAYER_NAMES,
    "layers.{i}.scale": (f"{_LAYER}.layer_scalar",),
    "layers.{i}.mlp.own_norm.weight": (f"{_LAYER}.post_feedforward_layernorm_1.weight",),
    "layers.{i}.beside.norm.weight": (f"{_LAYER}.pre_feedforward_layernorm_2.weight",),
    "layers.{i}.beside.own_norm.weight": (f"{_LAYER}.post_feedforward_layernorm_2.weight",),
    "layers.{i}.beside.router.weight": (f"{_LAYER}.router.proj.weight",),
    "layers.{i}.beside.router.scale": (f"{_LAYER}.router.scale",),
    "layers.{i}.beside.expert_scale": (f"{_LAYER}.router.per_expert_scale",),
    "layers.{i}.beside.experts.gate_up.weight": (f"{_LAYER}.experts.gate_up_proj",),
    "layers.{i}.beside.experts.down.weight": (f"{_LAYER}.experts.down_proj",),
}
_ROPES = {  # what a config without rope's fields means
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def spec(config: Config) -> DecoderSpec:
    config.expect("use_bidirectional_attention", None, "vision")
    count, bias = config.take("num_hidden_layers"), bool(config.take("attention_bias", False))
    kinds, by_kind = layer_kinds(config, every(count, 6)), patterns(config, 512)
    kinds[-1] = FULL  # whatever the config says, as transformers has it
    shapes = _shapes(config, kinds)
    dims = {kind: shapes[kind]["head_dim"] for kind in (FULL, SLIDING)}
    turned = ropes_of_kinds(config, dims, {FULL: 1_000_000.0, SLIDING: 10_000.0}, absent=_ROPES)
    activation = ACTIVATIONS[config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")]
    wide = bool(config.take("use_double_wide_mlp", False))
    size = config.take("intermediate_size")
    beside = _mixture(config, activation) if config.take("enable_moe_block", False) else None
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    as_values = bool(config.take("attention_k_eq_v", False))
    layers = [
        LayerSpec(
            AttentionSpec(
                by_kind[kind], **shapes[kind], scale=1.0, rope=turned[kind], bias=bias, output_bias=bias,
                qk_norm="head", v_norm=True, shares=shares, keys_as_values=as_values and kind == FULL,
            ),
            MlpSpec(size * 2 if wide and shares is not None else size, activation),
            post_norms=True,
            beside=beside,
            scaled=True,
        )
        for kind, shares in zip(kinds, gemma3n.owners(kinds, config.take("num_kv_shared_layers", 0)), strict=True)
    ]  # fmt: skip
    has_inputs = bool(config.take("hidden_size_per_layer_input", 256))
    config.ignore("vocab_size_per_layer_input")
    return decoder(
        config, layers, tied=True,
        embedding_scale=config.take("hidden_size") ** 0.5,
        logit_softcap=config.take("final_logit_softcapping", None),
        per_layer=gemma3n.per_layer(config, activation) if has_inputs else None,
    )  # fmt: skip


def _mixture(config: Config, activation: str) -> MoeSpec:
    return MoeSpec(
        num_experts=config.take("num_experts"),
        top_k=config.take("top_k_experts"),
        intermediate_size=config.take("moe_intermediate_size"),
        activation=activation,
        normalized=True,
        router_norm=True,
        expert_scale=True,
    )


def _shapes(config: Config, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """The heads of each kind of layer: those of full layers as "global_…", or, in newer files, by the number of the
    layer where they differ from the local ones."""
    local = {name: value for name, value in heads(config).items() if name != "scale"}
    by_layer = config.take("per_layer_config", {})
    is_new = config.fields.get("per_layer_config") is not None
    wide = by_layer.get(str(kinds.index(FULL)), {}) if FULL in kinds else {}
    kv_heads = wide.get("num_key_value_heads", config.take("num_global_key_value_heads", local["num_kv_heads"]))
    head_dim = wide.get("head_dim", config.take("global_head_dim", local["head_dim"] if is_new else 512))
    return {SLIDING: local, FULL: {**local, "num_kv_heads": kv_heads, "head_dim": head_dim}}


FAMILY = Family(
    "gemma4",
    ("Gemma4ForCausalLM", "gemma4_text", "Gemma4ForConditionalGeneration", "gemma4"),
    spec, NAMES, nested="text_config", prefixes=("", "model.language_model."), left_aside=gemma3n.ASIDE,
)  # fmt: skip
