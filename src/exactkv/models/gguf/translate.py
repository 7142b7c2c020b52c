"""GGUF metadata -> what config.json and generation_config.json of the same model would say.

Every metadata key of the architecture is looked at: one that is translated, one that must have the only value
the architecture is defined for here, one that changes nothing, or else LoadError. Key names and meanings:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's llama_hparams.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exactkv.errors import LoadError

# Keys (without the architecture's prefix) that change nothing. The vocabulary's size is that of the
# embedding.
_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})

# GGUF key -> config.json key, for values that are taken as they are.
_COMMON_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_ROPE_SCALING = frozenset(
    "rope." + key
    for key in (
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.original_context_length",
        "scaling.attn_factor",
        "scaling.yarn_ext_factor",
        "scaling.yarn_attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
    )
)
_MUST_BE_ONE = ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture is read.

    keys: GGUF key -> config key, besides the common ones. fixed: config fields that the architecture implies.
    blocks: GGUF name of a part of a layer -> its Hugging Face name. permuted: parts whose rows GGUF reorders
    for its rope; norm_offset: what GGUF adds to norm weights. finish: adds the fields that are derived from
    several keys, among them `derived_keys`.
    """

    fixed: Mapping[str, Any]
    blocks: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    permuted: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    derived_keys: frozenset[str] = frozenset()
    finish: Callable[[dict[str, Any], Mapping[str, Any]], None] = lambda config, values: None


def architecture_of(metadata: Mapping[str, Any], path: object) -> tuple[str, Architecture]:
    """The name and description of the file's architecture. Raises LoadError naming those supported."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise LoadError(f"{path} holds a GGUF {kind!r}, expected a model. Give the file of the model itself.")
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise LoadError(
            f"{path}: GGUF architecture {name!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. Load the model from its safetensors "
            "directory instead, if its family is supported there."
        )
    return name, ARCHITECTURES[name]


def translate_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None,
    path: object,
) -> dict[str, Any]:
    """The model's config in Hugging Face terms.

    metadata: of the file. shapes: GGUF tensor name -> shape in torch order. rope_factors: the values of
    `rope_freqs.weight` (each rotary frequency is divided by its factor), if the file has that tensor. path:
    for error messages. Raises LoadError for missing, unknown or contradictory keys.
    """
    name, arch = architecture_of(metadata, path)
    prefix = name + "."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        return _translate(values, arch, shapes, rope_factors)
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from None


def translate_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`eos_token_id` (a list: end of sequence, of turn, of message), `bos_token_id`, `pad_token_id`; fields
    the file does not name are absent.
    """
    generation: dict[str, Any] = {"eos_token_id": end_token_ids(metadata)}
    for key, kind in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token := token_id(metadata, kind)) is not None:
            generation[key] = token
    return generation


def token_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    """The id of the token with a role ("bos", "eos", "eot", "eom", "padding", "unknown"). Ids outside the
    vocabulary mean none: some writers use -1 or 2**32 - 1."""
    token = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    return token if token is not None and 0 <= token < count else None


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text, a turn or a message, in this order, each once."""
    ids = (token_id(metadata, kind) for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if token is not None))


def _translate(
    values: dict[str, Any],
    arch: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    keys = {**_COMMON_KEYS, **arch.keys}
    known = keys.keys() | _CHECKS.keys() | _ROPE_SCALING | arch.derived_keys | _HARMLESS
    if unknown := sorted(values.keys() - known):
        raise LoadError(
            f"metadata {', '.join(f'{key} = {str(values[key])[:60]}' for key in unknown)} is not known for "
            "this architecture and may change what the model computes, so the file is refused."
        )
    if missing := [key for key in _REQUIRED if key not in values]:
        raise LoadError(f"metadata {', '.join(missing)} is missing; the file is damaged or incomplete.")
    config: dict[str, Any] = dict(arch.fixed)
    for key, config_key in keys.items():
        if key in values:
            config[config_key] = _uniform(key, values[key])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key, check in _CHECKS.items():
        if key in values and not check(_uniform(key, values[key]), config):
            raise LoadError(f"metadata {key} = {values[key]} is not supported for this architecture.")
    if "token_embd.weight" not in shapes:
        raise LoadError("the file holds no tensor token_embd.weight; it is damaged or holds a vocabulary only.")
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if "blk.0.ffn_up.bias" in shapes:
        config["mlp_bias"] = True
    if scaling := _rope_scaling(values, rope_factors):
        config["rope_scaling"] = scaling
    arch.finish(config, values)
    return config


def _uniform(key: str, value: Any) -> Any:
    """A value that may be stored once or once a layer; layers that differ are refused. Floats are turned from
    float32 to the shortest decimal that means the same float32, as config.json has it (1e-05)."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise LoadError(f"metadata {key} differs between layers ({str(value)[:60]}), which is not supported.")
        value = value[0]
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    if not math.isfinite(value):
        return value
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


# Keys whose only accepted value follows from the config, or that ask for something not supported here.
_CHECKS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "attention.value_length": lambda value, config: value == config["head_dim"],
    "attention.key_length_swa": lambda value, config: value == config["head_dim"],
    "attention.value_length_swa": lambda value, config: value == config["head_dim"],
    "rope.dimension_count": lambda value, config: value == config["head_dim"],
    "rope.dimension_count_swa": lambda value, config: value == config["head_dim"],
    "attention.causal": lambda value, config: value is True,
    "expert_count": lambda value, config: value == 0,
    "expert_used_count": lambda value, config: value == 0,
    "use_parallel_residual": lambda value, config: value is False,
}


def _rope_scaling(values: Mapping[str, Any], factors: list[float] | None) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = _uniform("factor", values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    attention = _uniform("attn_factor", values.get("rope.scaling.attn_factor", 1.0))
    if factor == 0.0 or (kind == "linear" and factor == 1.0):
        kind = "none"
    unusual = [key for key in _MUST_BE_ONE if values.get(key, 1.0) != 1.0]
    if attention != 1.0 and kind != "yarn":
        unusual.append("rope.scaling.attn_factor")
    if unusual:
        raise LoadError(f"metadata {unusual[0]} = {values[unusual[0]]} with {kind} rope is not supported.")
    if factors is not None and kind == "none":
        return {"rope_type": "llama3_factors", "factors": factors}
    if factors is not None:
        raise LoadError(f"both rope_freqs.weight and {kind} rope scaling are in the file; not supported.")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(values, factor, attention)
    if kind == "none":
        return None
    raise LoadError(
        f"metadata rope.scaling.type = {kind!r} is not supported; supported are none, linear, yarn, and "
        "llama 3's factors in the tensor rope_freqs.weight."
    )


def _yarn(values: Mapping[str, Any], factor: float, attention: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if "rope.scaling.original_context_length" in values:
        scaling["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
    if attention != 1.0:
        # GGUF's factor multiplies YaRN's own (arXiv 2309.00071, eq. 22); Hugging Face's field replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in values:
            scaling[key] = _uniform(key, values[f"rope.scaling.yarn_{key}"])
    return scaling


def _finish_gemma3(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    # The 27B model alone scales by its width a head; GGUF files do not say so, llama.cpp goes by the layer
    # count.
    is_27b = config["num_hidden_layers"] == 62
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    config["query_pre_attn_scalar"] = width
    pattern, num_layers = values.get("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if isinstance(pattern, int):  # every pattern-th layer is full
        pattern = [bool((layer + 1) % pattern) if pattern else False for layer in range(num_layers)]
    if pattern is not None:
        if len(pattern) < num_layers:
            raise LoadError(f"attention.sliding_window_pattern is shorter than the {num_layers} layers.")
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(local)] for local in pattern[:num_layers]]


_LLAMA_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _without(part: str) -> dict[str, str]:
    return {name: theirs for name, theirs in _LLAMA_BLOCKS.items() if name != part}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        fixed={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "rope_theta": 1e4,
        },
        blocks=_LLAMA_BLOCKS,
        permuted=frozenset({"attn_q", "attn_k"}),
    ),
    "seed_oss": Architecture(
        fixed={
            "model_type": "seed_oss",
            "architectures": ["SeedOssForCausalLM"],
            "hidden_act": "silu",
            "rope_theta": 1e4,
        },
        blocks={**_without("ffn_norm"), "post_attention_norm": "post_attention_layernorm"},
    ),
    "gemma3": Architecture(
        fixed={
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
        },
        blocks={
            **_LLAMA_BLOCKS,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
            "attn_logit_softcapping": "attn_logit_softcapping",
        },
        norm_offset=1.0,
        derived_keys=frozenset({"attention.sliding_window_pattern"}),
        finish=_finish_gemma3,
    ),
}
