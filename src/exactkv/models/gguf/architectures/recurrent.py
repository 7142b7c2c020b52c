"""Decoders with recurrent layers: Mamba, Mamba-2, LFM2, Falcon-H1, Jamba, Granite 4."""

from __future__ import annotations

from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import RMS, biased, dense, experts, model, no_experts, rope
from exactkv.models.gguf.architectures.llama import granite_scales
from exactkv.models.gguf.metadata import Metadata

_UNUSED = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")


def _mixer(meta: Metadata) -> dict[str, int]:
    """The sizes of state spaces; "time_step_rank" is Mamba-2's number of heads."""
    return {key: meta.take(f"ssm.{key}") for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank")}


def _mamba(meta: Metadata) -> dict[str, Any]:
    sizes = _mixer(meta)
    meta.check("ssm.dt_b_c_rms", False)
    return _alone(meta, "mamba") | {
        "intermediate_size": sizes["inner_size"],
        "state_size": sizes["state_size"],
        "conv_kernel": sizes["conv_kernel"],
        "time_step_rank": sizes["time_step_rank"],
    }


def _mamba2(meta: Metadata) -> dict[str, Any]:
    sizes = _mixer(meta)
    return _alone(meta, "mamba2") | {
        "num_heads": sizes["time_step_rank"],
        "head_dim": _head_dim(sizes),
        "n_groups": meta.take("ssm.group_count"),
        "state_size": sizes["state_size"],
        "conv_kernel": sizes["conv_kernel"],
    }


def _alone(meta: Metadata, model_type: str) -> dict[str, Any]:
    config = model(meta, model_type)
    del config["max_position_embeddings"]  # nothing in these models sets one
    meta.ignore(*_UNUSED)
    bias, conv_bias = meta.has("ssm_in.bias"), meta.has("ssm_conv1d.bias")
    return config | {"layer_norm_epsilon": meta.take(RMS), "use_bias": bias, "use_conv_bias": conv_bias}


def _head_dim(sizes: dict[str, int]) -> int:
    size, heads = sizes["inner_size"], sizes["time_step_rank"]
    if size % heads:
        raise LoadError(f"metadata ssm.inner_size = {size} is no multiple of ssm.time_step_rank = {heads}.")
    return size // heads


def _in_hybrid(meta: Metadata) -> dict[str, Any]:
    """Mamba-2 as the configs of hybrids describe it, but for its size."""
    sizes = _mixer(meta)
    return {
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_d_state": sizes["state_size"],
        "mamba_n_heads": sizes["time_step_rank"],
        "mamba_d_head": _head_dim(sizes),
        "mamba_n_groups": meta.take("ssm.group_count"),
        "mamba_proj_bias": meta.has("ssm_in.bias"),
        "mamba_conv_bias": meta.has("ssm_conv1d.bias"),
    }


def _lfm2(meta: Metadata) -> dict[str, Any]:
    config = _some_attention(meta, model(meta, "lfm2"))
    attends = config.pop("attends")
    no_experts(meta)
    return config | {
        "layer_types": ["full_attention" if a else "conv" for a in attends],
        "norm_eps": meta.take(RMS),
        "intermediate_size": meta.take("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # stored is the size that the MLPs have
        "conv_L_cache": meta.take("shortconv.l_cache"),
        "conv_bias": meta.has("shortconv.in_proj.bias"),
        **rope(meta),
    }


def _some_attention(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The heads of models in which layers without attention have 0 keys and values; "attends": which have some."""
    by_layer = meta.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    counts = {count for count in by_layer if count}
    if len(counts) != 1:
        raise LoadError(f"metadata attention.head_count_kv = {str(by_layer)[:60]}; expected one number, and zeros.")
    heads = meta.take("attention.head_count")
    head_dim = meta.take("attention.key_length", config["hidden_size"] // heads)
    meta.check("attention.value_length", head_dim)
    meta.check("rope.dimension_count", head_dim)
    found = {"num_attention_heads": heads, "num_key_value_heads": counts.pop(), "head_dim": head_dim}
    return config | found | {"attends": [bool(count) for count in by_layer]}


def _falcon_h1(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "falcon_h1") | _in_hybrid(meta)
    if config["tie_word_embeddings"]:
        raise LoadError(
            "the file holds no tensor output.weight. The factors of the embedding and of the head are folded into the "
            "weights, so that one tensor cannot be both. Load the model from its original directory."
        )
    return config | {
        "mamba_d_ssm": meta.take("ssm.inner_size"),
        "mamba_rms_norm": meta.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # in all models; files do not say
        "projectors_bias": meta.has("ssm_out.bias"),
        "mlp_bias": meta.has("ffn_up.bias"),
    }


def _jamba(meta: Metadata) -> dict[str, Any]:
    config = _some_attention(meta, model(meta, "jamba"))
    hidden, sizes, attends = config["hidden_size"], _mixer(meta), config.pop("attends")
    if sizes["inner_size"] % hidden:
        raise LoadError(f"metadata ssm.inner_size = {sizes['inner_size']} is no multiple of the hidden size {hidden}.")
    mixed = [f"blk.{i}.ffn_gate_inp.weight" in meta.shapes for i in range(len(attends))]
    config |= {
        "rms_norm_eps": meta.take(RMS),
        "intermediate_size": meta.take("feed_forward_length"),
        "mamba_expand": sizes["inner_size"] // hidden,
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_dt_rank": sizes["time_step_rank"],
        "mamba_proj_bias": meta.has("ssm_in.bias"),
        "mamba_conv_bias": meta.has("ssm_conv1d.bias"),
        **_every("attn", attends),
        **_every("expert", mixed),
    }
    if any(mixed):
        return config | experts(meta, "num_experts", size=None)
    meta.check("expert_count", 0, 1)
    meta.ignore("expert_used_count")
    return config | {"num_experts": 1}


def _every(name: str, layers: list[bool]) -> dict[str, int]:
    """The period and the offset of the layers that are so."""
    found = [i for i, is_so in enumerate(layers) if is_so] or [len(layers)]
    period = found[1] - found[0] if len(found) > 1 else len(layers)
    if found != list(range(found[0], max(len(layers), found[0] + 1), period)):
        raise LoadError(f"the layers {found} ({name}) do not follow each other at one distance; not supported.")
    return {f"{name}_layer_period": period, f"{name}_layer_offset": found[0]}


def _granite_hybrid(meta: Metadata) -> dict[str, Any]:
    turns = bool(meta.take("rope.scaling.finetuned"))
    mixed = bool(meta.peek("expert_count"))
    config = _some_attention(meta, model(meta, "granitemoehybrid"))
    attends = config.pop("attends")
    inner = meta.take("ssm.inner_size")
    config |= granite_scales(meta) | _in_hybrid(meta) | rope(meta) | {
        "layer_types": ["attention" if a else "mamba" for a in attends],
        "position_embedding_type": "rope" if turns else "nope",
        "rms_norm_eps": meta.take(RMS),
        "intermediate_size": meta.take("feed_forward_length"),
        "shared_intermediate_size": meta.take("expert_shared_feed_forward_length"),
        "mamba_expand": inner / config["hidden_size"],
        "attention_bias": biased(meta),
    }  # fmt: skip
    if mixed:
        return config | experts(meta, "num_local_experts", size=None)
    no_experts(meta)
    return config | {"num_local_experts": 0}


ARCHITECTURES: Table = {
    "mamba": Architecture(("mamba",), _mamba),
    "mamba2": Architecture(("mamba2",), _mamba2),
    "lfm2": Architecture(("lfm2",), _lfm2),
    "falcon-h1": Architecture(("falcon_h1",), _falcon_h1),
    "jamba": Architecture(("jamba",), _jamba),
    "granitehybrid": Architecture(("granitemoehybrid",), _granite_hybrid, permuted=True),
}
