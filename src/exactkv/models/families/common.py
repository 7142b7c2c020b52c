"""What many families' configs have in common, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exactkv.cache import AttentionPattern, FullAttention, SlidingWindow
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.spec import DecoderSpec, DynamicNtk, LayerSpec, LinearScaling, MlpSpec, YarnScaling

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
UNWINDOWED: Mapping[str, AttentionPattern] = {FULL: FullAttention(), SLIDING: FullAttention()}


def heads(config: Config) -> dict[str, Any]:
    """AttentionSpec's numbers of heads, their size, and the usual scale."""
    count = config.take("num_attention_heads")
    head_dim = config.take("head_dim", config.take("hidden_size") // count)
    return {
        "num_heads": count,
        "num_kv_heads": config.take("num_key_value_heads", count),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }


def activation(config: Config, field: str = "hidden_act", default: str = "silu") -> str:
    return ACTIVATIONS[config.expect(field, *ACTIVATIONS, default=default)]


def mlp(config: Config, bias: bool = False, **words: Any) -> MlpSpec:
    """The gated MLP of most families."""
    return MlpSpec(config.take("intermediate_size"), activation(config), bias, **words)


def layer_kinds(config: Config, default: Sequence[str]) -> list[str]:
    """The kind of each layer, from "layer_types"; as many as the config has layers."""
    count = config.take("num_hidden_layers")
    kinds = config.take("layer_types", list(default))
    if len(kinds) != count or set(kinds) - {FULL, SLIDING}:
        raise LoadError(
            f"config of a {config.family} model: layer_types = {kinds!r}; expected {count} of '{FULL}' and '{SLIDING}'"
        )
    return list(kinds)


def every(count: int, step: int) -> list[str]:
    """Windowed layers, every ``step``-th one full."""
    return [FULL if (i + 1) % step == 0 else SLIDING for i in range(count)]


def patterns(config: Config, default_window: int | None = 4096) -> Mapping[str, AttentionPattern]:
    """The pattern of each kind of layer."""
    window = config.take("sliding_window", default_window, nullable=True)
    return UNWINDOWED if window is None else {FULL: FullAttention(), SLIDING: SlidingWindow(window=window)}


def max_length(config: Config, layers: Sequence[LayerSpec], default: int = 2048, linear: bool = True) -> int:
    """The maximum length: what the factor of a scaled rope makes of the length before it. Many configs say that already
    (DeepSeek's, GPT-OSS's: 4096 times 40, 4096 times 32), others the length before (Qwen's with the YaRN of their
    cards; linear scaling and dynamic NTK nearly always, but for ``linear``). Never less than the config says."""
    length: int = config.take("max_position_embeddings", default)
    if not isinstance(length, int):
        return length  # check_spec says what is wrong
    found = [length]
    for scaling in {layer.rope.scaling for layer in layers if layer.rope is not None}:
        match scaling:
            case YarnScaling() | DynamicNtk():
                found.append(int(scaling.factor * scaling.original_max_position))
            case LinearScaling() if linear:
                found.append(int(scaling.factor * (_before_scaling(config) or length)))
    return max(found)


def _before_scaling(config: Config) -> int | None:
    """The length before linear scaling, if the config says it."""
    ropes = [config.fields.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    name = "original_max_position_embeddings"
    given = config.take(name, None)
    return next((int(rope[name]) for rope in ropes if rope.get(name)), given)


def decoder(
    config: Config,
    layers: Sequence[LayerSpec],
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    tied: bool = False,
    **words: Any,
) -> DecoderSpec:
    """The decoder of these layers, with the fields that every config has. ``eps`` names the field, ``tied`` is what
    no "tie_word_embeddings" means."""
    return DecoderSpec(
        family=config.family,
        vocab_size=config.take("vocab_size"),
        hidden_size=config.take("hidden_size"),
        layers=tuple(layers),
        norm_eps=config.take(eps, default_eps),
        max_length=max_length(config, layers),
        tied_head=bool(config.take("tie_word_embeddings", tied)),
        **words,
    )
