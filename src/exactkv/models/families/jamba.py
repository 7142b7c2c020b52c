"""Jamba: Mamba with norms of Δ, B and C; every eighth layer attention instead, without rope; a mixture of experts on
every second layer (arXiv 2403.19887)."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import mamba
from exactkv.models.families.common import activation, decoder, heads, mlp
from exactkv.models.families.family import Family, Names
from exactkv.models.families.llama import NAMES as LLAMA
from exactkv.models.recurrent.spec import MambaSpec
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

_LAYER = "model.layers.{i}"
_MAMBA, _MLP = f"{_LAYER}.mamba", f"{_LAYER}.feed_forward"
NAMES: Names = {
    **LLAMA,
    **mamba.mixer_names(_MAMBA),
    **mamba.selection_names(_MAMBA),
    **{
        f"layers.{{i}}.recurrent.{x}_norm.weight": (f"{_MAMBA}.{x.lower()}_layernorm.weight",) for x in ("dt", "B", "C")
    },
    "final_norm.weight": ("model.final_layernorm.weight",),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.mlp.norm.weight": (f"{_LAYER}.pre_ff_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{i}.mlp.down.weight": (f"{_MLP}.down_proj.weight",),
    "layers.{i}.mlp.router.weight": (f"{_MLP}.router.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (
        f"{_MLP}.experts.{{e}}.gate_proj.weight",
        f"{_MLP}.experts.{{e}}.up_proj.weight",
    ),
    "layers.{i}.mlp.experts.down.weight": (f"{_MLP}.experts.{{e}}.down_proj.weight",),
}
IN_MEMORY: Names = {
    "layers.{i}.mlp.experts.gate_up.weight": (f"{_MLP}.experts.gate_up_proj",),
    "layers.{i}.mlp.experts.down.weight": (f"{_MLP}.experts.down_proj",),
}


def spec(config: Config) -> DecoderSpec:
    hidden, shape, count = config.take("hidden_size"), heads(config), config.take("num_hidden_layers")
    rank, eps = config.take("mamba_dt_rank", "auto"), config.take("rms_norm_eps", 1e-6)
    config.ignore(
        "use_mamba_kernels",
        "use_mambapy",
        "use_associative_scan",
        "num_logits_to_keep",
        "calc_logits_for_entire_prompt",
    )
    config.ignore("layers_block_type", "layer_types", "layers_num_experts")
    config.expect("mamba_inner_layernorms", True, default=True)
    config.expect("sliding_window", None)
    mixer = MambaSpec(
        inner_size=config.take("mamba_expand", 2) * hidden,
        state_size=config.take("mamba_d_state", 16),
        conv_width=config.take("mamba_d_conv", 4),
        dt_rank=ceil(hidden / 16) if rank == "auto" else rank,
        activation=activation(config),
        bias=bool(config.take("mamba_proj_bias", False)),
        conv_bias=bool(config.take("mamba_conv_bias", True)),
        inner_norm_eps=eps,
    )
    attention = AttentionSpec(FullAttention(), **shape, rope=None)
    attentive, mixed = (_every(config, name, *default) for name, default in (("attn", (8, 4)), ("expert", (2, 1))))
    dense, mixture = mlp(config), _mixture(config)
    layers = [
        LayerSpec(
            attention if i in attentive else None,
            mixture if i in mixed else dense,
            recurrent=None if i in attentive else mixer,
        )
        for i in range(count)
    ]
    length = config.take("max_position_embeddings", config.take("n_ctx", 262_144))
    return replace(decoder(config, layers), max_length=length)


def _every(config: Config, name: str, period: int, offset: int) -> range:
    """The layers that "<name>_layer_offset" and "<name>_layer_period" mean."""
    offset, period = config.take(f"{name}_layer_offset", offset), config.take(f"{name}_layer_period", period)
    return range(offset, config.take("num_hidden_layers"), period)


def _mixture(config: Config) -> MlpSpec | MoeSpec:
    """One expert is no mixture."""
    experts = config.take("num_experts", config.take("num_local_experts", 16))
    top_k, size = config.take("num_experts_per_tok", 2), config.take("intermediate_size")
    return MoeSpec(experts, top_k, size, activation(config)) if experts > 1 else mlp(config)


FAMILY = Family("jamba", ("JambaForCausalLM", "jamba"), spec, NAMES, instead=(IN_MEMORY,))
