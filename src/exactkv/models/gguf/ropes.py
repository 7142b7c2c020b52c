"""Rope scaling in GGUF metadata -> what config.json's "rope_scaling" would say."""

from __future__ import annotations

import math
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.metadata import Metadata

ROPE_FREQS = "rope_freqs.weight"
_SCALING = "rope.scaling."
_OF_YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")
_SCALED = tuple(_SCALING + key for key in ("factor", "original_context_length", "attn_factor", *_OF_YARN))


def scaling(meta: Metadata, **of_yarn: Any) -> dict[str, Any] | None:
    """None if rope is not scaled. ``of_yarn``: fields that the architecture implies with YaRN. Each rotary frequency
    is divided by its factor in the tensor `rope_freqs.weight`, if there is one."""
    kind, factor = _kind(meta)
    attention = meta.take(f"{_SCALING}attn_factor", 1.0)
    meta.ignore(*_SCALED)
    amplitude = 0.1 * math.log(max(factor, 1.0)) + 1.0
    for key, neutral in (("yarn_ext_factor", (1.0, -1.0)), ("yarn_attn_factor", (1.0, amplitude))):
        value = meta.take(_SCALING + key, 1.0)
        if not any(math.isclose(value, n, rel_tol=1e-6) for n in (neutral if kind == "yarn" else (1.0,))):
            raise LoadError(f"metadata {_SCALING}{key} = {value} with {kind} rope is not supported.")
    if attention != 1.0 and kind != "yarn":
        raise LoadError(f"metadata {_SCALING}attn_factor = {attention} with {kind} rope is not supported.")
    if ROPE_FREQS in meta.shapes:
        if kind != "none":
            raise LoadError(f"both {ROPE_FREQS} and {kind} rope scaling are in the file; not supported.")
        return {"rope_type": "llama3_factors", "factors": meta.floats(ROPE_FREQS)}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return None if kind == "none" else _yarn(meta, factor, attention, amplitude, of_yarn)


def _kind(meta: Metadata) -> tuple[str, float]:
    """The kind of scaling and its factor; "none" where the factor changes nothing."""
    old, given = "rope.scale_linear" in meta, f"{_SCALING}factor" in meta
    kind = meta.take(f"{_SCALING}type", "linear" if old else "none")
    if f"{_SCALING}type" not in meta and (
        stray := [key for key in _SCALED if key in meta and not key.endswith(".attn_factor")]
    ):
        raise LoadError(
            f"metadata {_SCALING}type is missing, but {stray[0]} = {meta.take(stray[0])} is there; the file is damaged "
            "or incomplete. Convert the model again with a current llama.cpp."
        )
    if kind not in ("none", "linear", "yarn"):
        raise LoadError(
            f"metadata {_SCALING}type = {kind!r} is not supported; supported are none, linear, yarn, and llama 3's "
            f"factors in the tensor {ROPE_FREQS}."
        )
    if kind == "none":
        meta.ignore("rope.scale_linear")
        return kind, 1.0
    factor = meta.take(f"{_SCALING}factor", meta.take("rope.scale_linear")) if old and not given else None
    meta.ignore("rope.scale_linear")
    factor = float(meta.take(f"{_SCALING}factor") if factor is None else factor)
    return ("none" if factor == 0.0 or (kind == "linear" and factor == 1.0) else kind), factor


def _yarn(meta: Metadata, factor: float, attention: float, amplitude: float, of_yarn: dict[str, Any]) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.take(f"{_SCALING}original_context_length"),
        **of_yarn,
    }
    if attention != 1.0:
        # GGUF's factor multiplies YaRN's own (arXiv 2309.00071, eq. 22); Hugging Face's field replaces it.
        found["attention_factor"] = attention * amplitude
    for key in ("beta_fast", "beta_slow"):
        if f"{_SCALING}yarn_{key}" in meta:
            found[key] = meta.take(f"{_SCALING}yarn_{key}")
    return found
