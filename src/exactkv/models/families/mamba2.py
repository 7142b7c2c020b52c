"""Mamba-2: state spaces with one decay a head, alone."""

from __future__ import annotations

from math import inf
from typing import Any

from exactkv.models.config import Config
from exactkv.models.families import mamba
from exactkv.models.families.common import activation
from exactkv.models.families.family import Family, Names
from exactkv.models.recurrent.spec import Mamba2Spec
from exactkv.models.spec import DecoderSpec


def mixer_names(mixer: str) -> Names:
    """What all files of Mamba-2 mixers call their tensors."""
    return {
        **mamba.mixer_names(mixer),
        "layers.{i}.recurrent.dt_bias": (f"{mixer}.dt_bias",),
        "layers.{i}.recurrent.gated_norm.weight": (f"{mixer}.norm.weight",),
    }


def dt_limits(config: Config) -> dict[str, Any]:
    """Mamba2Spec's bounds of Δ. Files write infinity as a number or as an object."""
    low, high = (
        float(x["__float__"]) if isinstance(x, dict) else float(x)
        for x in config.take("time_step_limit", (0.0, inf))
    )  # fmt: skip
    return {"dt_min": low, "dt_max": None if high == inf else high}


def inner_mixer(config: Config, inner_size: int, **words: Any) -> Mamba2Spec:
    """The mixer as hybrids describe it, in fields that begin with "mamba_"."""
    config.ignore("mamba_chunk_size", "mamba_expand", "use_mamba_kernels")
    heads, head_dim = config.take("mamba_n_heads", 128), config.take("mamba_d_head", "auto")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=inner_size // heads if head_dim == "auto" else head_dim,
        num_groups=config.take("mamba_n_groups", 1),
        state_size=config.take("mamba_d_state", 256),
        conv_width=config.take("mamba_d_conv", 4),
        norm_eps=config.take("rms_norm_eps", 1e-5),
        activation=activation(config),
        bias=bool(config.take("mamba_proj_bias", False)),
        conv_bias=bool(config.take("mamba_conv_bias", True)),
        **dt_limits(config),
        **words,
    )


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.take("use_bias", False))
    mixer = Mamba2Spec(
        num_heads=config.take("num_heads", 128),
        head_dim=config.take("head_dim", 64),
        num_groups=config.take("n_groups", 8),
        state_size=config.take("state_size", 128),
        conv_width=config.take("conv_kernel", 4),
        norm_eps=config.take("layer_norm_epsilon", 1e-5),
        activation=activation(config),
        bias=bias,
        output_bias=bias,
        conv_bias=bool(config.take("use_conv_bias", True)),
        **dt_limits(config),
    )
    config.ignore("chunk_size", "expand", "time_step_rank", "norm_before_gate", "intermediate_size")
    return mamba.stack(config, mixer, tied=False)


_MIXER = "backbone.layers.{i}.mixer"
FAMILY = Family(
    "mamba2",
    ("Mamba2ForCausalLM", "mamba2"),
    spec,
    {**mamba.SKELETON, **mixer_names(_MIXER)},
    instead=(mamba.OLD_EMBEDDING,),
)
