"""Other dense decoders: Phi-3, Cohere 2, OLMo 2 and 3, GLM-4, EXAONE 4, StarCoder2, Seed-OSS, Nemotron, GPT-NeoX,
GPT-2."""

from __future__ import annotations

from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures.architecture import Architecture, Table
from exactkv.models.gguf.architectures.common import (
    LAYER,
    RMS,
    attention,
    biased,
    dense,
    model,
    no_experts,
    window_kinds,
)
from exactkv.models.gguf.metadata import Metadata
from exactkv.models.gguf.names import NORM_AFTER_ATTENTION, PARALLEL
from exactkv.models.gguf.ropes import ROPE_FREQS

_WINDOW = "attention.sliding_window"
_FACTORS = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}


def _phi3(meta: Metadata) -> dict[str, Any]:
    meta.check("rope.scaling.type", "none", "longrope")
    amplitude = meta.take("rope.scaling.attn_factor", None)
    original = meta.take("rope.scaling.original_context_length")
    config = model(meta, "phi3")
    config |= attention(meta, config, partial=True)
    config |= {
        "rope_theta": meta.take("rope.freq_base"),
        "intermediate_size": meta.take("feed_forward_length"),
        "rms_norm_eps": meta.take("attention.layer_norm_rms_epsilon"),
        "sliding_window": meta.take(_WINDOW) or None,
        "original_max_position_embeddings": original,
    }
    meta.ignore("rope.scaling.finetuned")
    no_experts(meta)
    has_factors = [name in meta.shapes for name in _FACTORS.values()]
    if all(has_factors) and amplitude is not None:
        factors = {f"{kind}_factor": meta.floats(name) for kind, name in _FACTORS.items()}
        config["rope_scaling"] = {"rope_type": "longrope", "attention_factor": amplitude, **factors}
    elif any(has_factors) or amplitude is not None:
        raise LoadError(
            f"long rope needs the tensors {' and '.join(_FACTORS.values())}, and metadata rope.scaling.attn_factor; "
            "the file has but a part of them. Convert the model again with a current llama.cpp."
        )
    return config


def _cohere2(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "cohere2", eps="layer_norm_eps")
    return config | {"sliding_window": meta.take(_WINDOW), "logit_scale": meta.take("logit_scale")}


def _olmo2(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "olmo2")
    if _WINDOW not in meta and "attention.sliding_window_pattern" not in meta:
        return config
    kinds = window_kinds(meta, config["num_hidden_layers"])
    return config | {"model_type": "olmo3", "sliding_window": meta.take(_WINDOW), "layer_types": kinds}


def _glm(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "glm", partial=True)


def _glm4(meta: Metadata) -> dict[str, Any]:
    meta.check("nextn_predict_layers", 0)
    return dense(meta, "glm4", partial=True)


def _exaone4(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "exaone4", bias=None)
    if _WINDOW not in meta and "attention.sliding_window_pattern" not in meta:
        return config | {"sliding_window": None}
    kinds = window_kinds(meta, config["num_hidden_layers"])
    return config | {"sliding_window": meta.take(_WINDOW), "layer_types": kinds}


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "starcoder2", eps="norm_epsilon", bias="use_bias")
    # Every model was trained with this window; files do not say.
    return config | {"hidden_act": "gelu_pytorch_tanh", "sliding_window": meta.take(_WINDOW, 4096)}


def _seed_oss(meta: Metadata) -> dict[str, Any]:
    return dense(meta, "seed_oss") | {"attention_out_bias": meta.has("attn_output.bias")}


def _nemotron(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "nemotron", eps="norm_eps", partial=True)
    meta.ignore(RMS)  # converters say the same number twice
    heads, head_dim, hidden = (config[name] for name in ("num_attention_heads", "head_dim", "hidden_size"))
    turned = meta.take("rope.dimension_count")
    if turned == hidden // 2 // heads != head_dim // 2:  # llama.cpp's converter counts heads of hidden / heads
        raise LoadError(
            f"metadata rope.dimension_count = {turned} is half of {hidden} / {heads}, but heads are {head_dim} wide: "
            "converters make this mistake where these differ. Load the model from its original directory instead."
        )
    return config | {"hidden_act": "relu2", "mlp_bias": meta.has("ffn_up.bias")}


def _gpt_neox(meta: Metadata) -> dict[str, Any]:
    config = dense(meta, "gpt_neox", eps="layer_norm_eps", partial=True, base=1e4)
    config |= {"rotary_pct": config.pop("partial_rotary_factor"), "rotary_emb_base": config.pop("rope_theta")}
    return config | {"hidden_act": "gelu", "use_parallel_residual": meta.take("use_parallel_residual")}


def _gpt2(meta: Metadata) -> dict[str, Any]:
    config, heads = model(meta, "gpt2"), meta.take("attention.head_count")
    meta.check("attention.head_count_kv", heads)
    no_experts(meta)
    if not biased(meta) or ROPE_FREQS in meta.shapes:
        raise LoadError("the file's tensors are not those of a GPT-2.")
    return {
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "n_positions": config["max_position_embeddings"],
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": heads,
        "n_inner": meta.take("feed_forward_length"),
        "layer_norm_epsilon": meta.take(LAYER),
        "activation_function": "gelu_new",
    }


ARCHITECTURES: Table = {
    "phi3": Architecture(("phi3",), _phi3),
    "cohere2": Architecture(("cohere2",), _cohere2, names=PARALLEL),
    "olmo2": Architecture(("olmo2", "olmo3"), _olmo2),
    "chatglm": Architecture(("glm",), _glm),
    "glm4": Architecture(("glm4",), _glm4),
    "exaone4": Architecture(("exaone4",), _exaone4),
    "starcoder2": Architecture(("starcoder2",), _starcoder2),
    "seed_oss": Architecture(("seed_oss",), _seed_oss, names=NORM_AFTER_ATTENTION),
    "nemotron": Architecture(("nemotron",), _nemotron, norm_offset=1.0),
    "gptneox": Architecture(("gpt_neox",), _gpt_neox),
    "gpt2": Architecture(("gpt2",), _gpt2),
}
