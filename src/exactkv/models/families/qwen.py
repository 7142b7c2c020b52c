"""Qwen2 and 2.5: a Llama with biases on q, k and v; Qwen3: norms of q and k instead. The mixtures: many small
experts, in Qwen2 a shared one with a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping

from exactkv.cache import AttentionPattern
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import (
    FULL,
    SLIDING,
    UNWINDOWED,
    activation,
    decoder,
    heads,
    layer_kinds,
    mlp,
    patterns,
)
from exactkv.models.families.family import Family
from exactkv.models.families.mixtures import PER_EXPERT, STACKED
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

_SHARED = "model.layers.{i}.mlp.shared_expert"
NAMES = {
    **llama.NAMES,
    **STACKED,
    "layers.{i}.mlp.shared.gate_up.weight": (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
    "layers.{i}.mlp.shared.down.weight": (f"{_SHARED}.down_proj.weight",),
    "layers.{i}.mlp.shared_gate.weight": (f"{_SHARED}_gate.weight",),
}


def spec(config: Config) -> DecoderSpec:
    kind = str(config.fields.get("model_type"))
    is_qwen3, is_mixture = kind.startswith("qwen3"), kind.endswith("_moe")
    config.expect("use_mrope", False, default=False)
    shape = heads(config)
    turned = rope(config, shape["head_dim"])
    dense = mlp(config)
    mixture = _mixture(config, shared=not is_qwen3) if is_mixture else dense
    sparse_step, dense_layers = config.take("decoder_sparse_step", 1), config.take("mlp_only_layers", [])
    kinds, by_kind = _windows(config, kind)
    bias = bool(config.take("attention_bias" if is_qwen3 else "qkv_bias", not is_qwen3))
    layers = [
        LayerSpec(
            AttentionSpec(
                by_kind[kinds[i]], **shape, rope=turned, bias=bias, output_bias=bias and is_qwen3,
                qk_norm="head" if is_qwen3 else None,
            ),
            mixture if i not in dense_layers and (i + 1) % sparse_step == 0 else dense,
        )
        for i in range(len(kinds))
    ]  # fmt: skip
    return decoder(config, layers)


def _windows(config: Config, kind: str) -> tuple[list[str], Mapping[str, AttentionPattern]]:
    """Windows, where they are used: on the layers from max_window_layers on; in Qwen2's mixtures on every second
    layer before it; in Qwen3's on all."""
    count, windowed = config.take("num_hidden_layers"), bool(config.take("use_sliding_window", False))
    first = config.take("max_window_layers", 28)
    default = {
        "qwen2_moe": [SLIDING if i % 2 == 0 and i < first else FULL for i in range(count)],
        "qwen3_moe": [SLIDING] * count,
    }.get(kind, [SLIDING if i >= first else FULL for i in range(count)])
    if windowed:
        return layer_kinds(config, default), patterns(config)
    config.ignore("sliding_window")
    return layer_kinds(config, [FULL] * count), UNWINDOWED


def _mixture(config: Config, shared: bool) -> MoeSpec:
    return MoeSpec(
        num_experts=config.take("num_experts", config.take("num_local_experts", 0)),
        top_k=config.take("num_experts_per_tok"),
        intermediate_size=config.take("moe_intermediate_size"),
        activation=activation(config),
        shared_intermediate_size=config.take("shared_expert_intermediate_size") if shared else 0,
        normalized=bool(config.take("norm_topk_prob", False)),
        shared_gate=shared,
    )


FAMILY = Family(
    "qwen",
    (
        "Qwen2ForCausalLM", "qwen2", "Qwen3ForCausalLM", "qwen3",
        "Qwen2MoeForCausalLM", "qwen2_moe", "Qwen3MoeForCausalLM", "qwen3_moe",
    ),
    spec,
    NAMES,
    instead=(PER_EXPERT,),
)  # fmt: skip
