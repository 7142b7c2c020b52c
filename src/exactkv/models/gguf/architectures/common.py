"""Metadata that many architectures have in common."""

from __future__ import annotations

from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf import ropes
from exactkv.models.gguf.metadata import Metadata

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
KINDS = ("full_attention", "sliding_attention")


def model(meta: Metadata, model_type: str) -> dict[str, Any]:
    """What every model has: its sizes, and whether the head is the embedding."""
    meta.check("attention.causal", True)
    return {
        "model_type": model_type,
        "max_position_embeddings": meta.take("context_length"),
        "hidden_size": meta.take("embedding_length"),
        "num_hidden_layers": meta.take("block_count"),
        "vocab_size": meta.size("token_embd.weight", 0),
        "tie_word_embeddings": "output.weight" not in meta.shapes,
    }


def attention(meta: Metadata, config: dict[str, Any], partial: bool = False) -> dict[str, Any]:
    """The heads. ``partial``: rope may turn a part of each head."""
    heads = meta.take("attention.head_count")
    head_dim = meta.take("attention.key_length", config["hidden_size"] // heads)
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        meta.check(f"attention.{key}", head_dim)
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": meta.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }
    if partial:
        return {**found, "partial_rotary_factor": meta.take("rope.dimension_count") / head_dim}
    meta.check("rope.dimension_count", head_dim)
    meta.check("rope.dimension_count_swa", head_dim)
    return found


def rope(meta: Metadata, base: float | None = None, **of_yarn: Any) -> dict[str, Any]:
    """Rope's base and scaling. ``base``: what no "rope.freq_base" means; None where files always have it."""
    meta.ignore("rope.scaling.finetuned")
    found = {"rope_theta": meta.take("rope.freq_base") if base is None else meta.take("rope.freq_base", base)}
    scaling = ropes.scaling(meta, **of_yarn)
    return {**found, "rope_scaling": scaling} if scaling else found


def biased(meta: Metadata) -> bool:
    return meta.has("attn_q.bias") or meta.has("attn_qkv.bias")


def dense(
    meta: Metadata,
    model_type: str,
    *,
    eps: str = "rms_norm_eps",
    bias: str | None = "attention_bias",
    partial: bool = False,
    base: float | None = None,
    sized: bool = True,
    mixed: bool = False,
    **of_yarn: Any,
) -> dict[str, Any]:
    """A decoder with attention and MLP on every layer. ``eps``, ``bias``: what its config calls the norms' epsilon,
    and whether q, k and v have biases. ``sized``: its MLPs are of one size. ``mixed``: some may be
    mixtures, which the caller reads."""
    config = model(meta, model_type)
    config |= attention(meta, config, partial) | rope(meta, base, **of_yarn)
    if sized:
        config["intermediate_size"] = meta.take("feed_forward_length")
    config[eps] = meta.take(RMS if eps == "rms_norm_eps" else LAYER)
    if bias is not None:
        config[bias] = biased(meta)
    if not mixed:
        no_experts(meta)
    return config


def no_experts(meta: Metadata) -> None:
    """For models without mixtures, whose files may say so."""
    meta.check("expert_count", 0)
    meta.ignore("expert_used_count")


def experts(meta: Metadata, count: str, size: str | None = "moe_intermediate_size") -> dict[str, Any]:
    """A mixture. ``count``, ``size``: what its config calls the number of experts and their size, which may be that
    of the MLPs."""
    found = {count: meta.take("expert_count"), "num_experts_per_tok": meta.take("expert_used_count")}
    return {**found, size: meta.take("expert_feed_forward_length")} if size else found


def gating(meta: Metadata, *names: str) -> None:
    """How experts are scored, where the file says it: 1 is softmax, 2 sigmoid."""
    meta.check("expert_gating_func", *({"softmax": 1, "sigmoid": 2}[name] for name in names))


def window_kinds(meta: Metadata, count: int) -> list[str]:
    """The kind of each layer by "attention.sliding_window_pattern": whether it has a window; or every how many layers
    one has none."""
    pattern = meta.raw("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [bool((layer + 1) % pattern) if pattern else False for layer in range(count)]
    if not isinstance(pattern, list) or len(pattern) < count:
        raise LoadError(
            f"metadata attention.sliding_window_pattern = {str(pattern)[:60]} does not fit the {count} layers."
        )
    return [KINDS[bool(local)] for local in pattern[:count]]
