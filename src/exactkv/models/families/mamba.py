"""Mamba: selective state spaces alone, without attention and MLP."""

from __future__ import annotations

from math import ceil
from typing import Any

from exactkv.models.config import Config
from exactkv.models.families.common import activation
from exactkv.models.families.family import Family, Names
from exactkv.models.recurrent.spec import MambaSpec, RecurrentSpec
from exactkv.models.spec import DecoderSpec, LayerSpec

_LAYER = "backbone.layers.{i}"
_MIXER = f"{_LAYER}.mixer"
ANY_LENGTH = 1 << 20
"""The maximum length where nothing in the model sets one."""

SKELETON: Names = {
    "embedding.weight": ("backbone.embeddings.weight",),
    "final_norm.weight": ("backbone.norm_f.weight",),
    "head.weight": ("lm_head.weight",),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.norm.weight",),
}
OLD_EMBEDDING: Names = {"embedding.weight": ("backbone.embedding.weight",)}


def mixer_names(mixer: str) -> Names:
    """What all files of Mamba mixers call their tensors."""
    ours = "layers.{i}.recurrent"
    return {
        f"{ours}.in.weight": (f"{mixer}.in_proj.weight",),
        f"{ours}.in.bias": (f"{mixer}.in_proj.bias",),
        f"{ours}.conv.weight": (f"{mixer}.conv1d.weight",),
        f"{ours}.conv.bias": (f"{mixer}.conv1d.bias",),
        f"{ours}.A_log": (f"{mixer}.A_log",),
        f"{ours}.D": (f"{mixer}.D",),
        f"{ours}.out.weight": (f"{mixer}.out_proj.weight",),
        f"{ours}.out.bias": (f"{mixer}.out_proj.bias",),
    }


def selection_names(mixer: str) -> Names:
    """What is Mamba's own, and not Mamba-2's."""
    return {
        "layers.{i}.recurrent.select.weight": (f"{mixer}.x_proj.weight",),
        "layers.{i}.recurrent.dt.weight": (f"{mixer}.dt_proj.weight",),
        "layers.{i}.recurrent.dt_bias": (f"{mixer}.dt_proj.bias",),
    }


def spec(config: Config) -> DecoderSpec:
    hidden, expand = config.take("hidden_size"), config.take("expand", 2)
    rank = config.take("time_step_rank", "auto")
    mixer = MambaSpec(
        inner_size=config.take("intermediate_size", int(expand * hidden)),
        state_size=config.take("state_size", 16),
        conv_width=config.take("conv_kernel", 4),
        dt_rank=ceil(hidden / 16) if rank == "auto" else rank,
        activation=activation(config),
        bias=bool(config.take("use_bias", False)),
        conv_bias=bool(config.take("use_conv_bias", True)),
    )
    return stack(config, mixer, tied=True)


def stack(config: Config, mixer: RecurrentSpec, tied: bool, **words: Any) -> DecoderSpec:
    """Layers of nothing but this mixer. ``tied``: what no "tie_word_embeddings" means."""
    # How weights were first drawn, and which kernel computes; and residuals kept in float32, which for weights in
    # less only changes roundings.
    config.ignore(
        "time_step_scale", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme",
        "rescale_prenorm_residual", "use_mambapy", "use_associative_scan", "residual_in_fp32", "ssm_cfg", "d_inner",
        "d_model", "fused_add_norm", "n_layer", "vocab_size_multiple", "pad_vocab_size_multiple",
        "layer_types",
    )  # fmt: skip
    config.expect("rms_norm", True, default=True)
    return DecoderSpec(
        family=config.family,
        vocab_size=config.take("vocab_size"),
        hidden_size=config.take("hidden_size"),
        layers=(LayerSpec(None, None, recurrent=mixer),) * config.take("num_hidden_layers"),
        norm_eps=config.take("layer_norm_epsilon", 1e-5),
        max_length=ANY_LENGTH,
        tied_head=bool(config.take("tie_word_embeddings", tied)),
        **words,
    )


FAMILY = Family(
    "mamba",
    ("MambaForCausalLM", "mamba"),
    spec,
    {**SKELETON, **mixer_names(_MIXER), **selection_names(_MIXER)},
    instead=(OLD_EMBEDDING,),
)
