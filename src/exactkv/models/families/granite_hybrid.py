"""Granite 4: Granite with Mamba-2 on most layers, attention on the others, mostly without rope; a mixture of experts
beside a shared one, or, with no experts, that alone."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import mamba2
from exactkv.models.families.common import activation, decoder, heads
from exactkv.models.families.family import Family, Names
from exactkv.models.families.llama import NAMES as LLAMA
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

_LAYER = "model.layers.{i}"
_MOE, _SHARED = f"{_LAYER}.block_sparse_moe", f"{_LAYER}.shared_mlp"
NAMES: Names = {
    **LLAMA,
    **mamba2.mixer_names(f"{_LAYER}.mamba"),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_SHARED}.input_linear.weight",),
    "layers.{i}.mlp.down.weight": (f"{_SHARED}.output_linear.weight",),
    "layers.{i}.mlp.shared.gate_up.weight": (f"{_SHARED}.input_linear.weight",),
    "layers.{i}.mlp.shared.down.weight": (f"{_SHARED}.output_linear.weight",),
    "layers.{i}.mlp.router.weight": (f"{_MOE}.router.layer.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (f"{_MOE}.input_linear.weight",),
    "layers.{i}.mlp.experts.down.weight": (f"{_MOE}.output_linear.weight",),
}
IN_MEMORY: Names = {
    "layers.{i}.mlp.router.weight": (f"{_MOE}.router.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (f"{_MOE}.experts.gate_up_proj",),
    "layers.{i}.mlp.experts.down.weight": (f"{_MOE}.experts.down_proj",),
}


def spec(config: Config) -> DecoderSpec:
    config.ignore("init_method", "rope_theta", "layers_block_type")
    config.expect("normalization_function", "rmsnorm", default="rmsnorm")
    shape = heads(config) | {"scale": float(config.take("attention_multiplier", 1.0))}
    bias = bool(config.take("attention_bias", False))
    kind = config.expect("position_embedding_type", None, "rope", "nope", default=None)
    turned = rope(config, shape["head_dim"]) if kind == "rope" else None
    config.ignore("rope_scaling", "rope_parameters")
    attention = AttentionSpec(FullAttention(), **shape, rope=turned, bias=bias, output_bias=bias)
    inner = int(config.take("mamba_expand", 2) * config.take("hidden_size"))
    mixer = mamba2.inner_mixer(config, inner, output_bias=bool(config.take("mamba_proj_bias", False)))
    mlp, scale = _mlp(config), float(config.take("residual_multiplier", 1.0))
    layers = [
        LayerSpec(attention, mlp, residual_scale=scale)
        if attends
        else LayerSpec(None, mlp, residual_scale=scale, recurrent=mixer)
        for attends in _attending(config)
    ]
    return decoder(
        config,
        layers,
        embedding_scale=float(config.take("embedding_multiplier", 1.0)),
        logit_scale=1.0 / config.take("logits_scaling", 1.0),
    )


def _mlp(config: Config) -> MlpSpec | MoeSpec:
    experts, shared = config.take("num_local_experts", 8), config.take("shared_intermediate_size", 1024)
    top_k, size, act = config.take("num_experts_per_tok", 2), config.take("intermediate_size"), activation(config)
    return MoeSpec(experts, top_k, size, act, shared, normalized=True) if experts else MlpSpec(shared, act)


def _attending(config: Config) -> list[bool]:
    """Which layers are attention, from "layer_types", whose words have changed."""
    count = config.take("num_hidden_layers")
    attention, recurrent = {"attention", "full_attention"}, {"mamba", "linear_attention"}
    kinds = config.take("layer_types", ["mamba"] * count)
    if len(kinds) != count or set(kinds) - attention - recurrent:
        raise LoadError(
            f"config of a {config.family} model: layer_types = {kinds!r}; expected {count} of 'mamba' and 'attention'"
        )
    return [kind in attention for kind in kinds]


FAMILY = Family(
    "granite_hybrid", ("GraniteMoeHybridForCausalLM", "granitemoehybrid"), spec, NAMES, instead=(IN_MEMORY,)
)
