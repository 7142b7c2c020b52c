"""OLMo 2 and 3: norms after attention and MLP only, q and k normed over their full width; OLMo 3 with windows on
three of four layers. OLMoE: norms before, a mixture on every layer."""

from __future__ import annotations

from typing import Any

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import FULL, SLIDING, activation, decoder, every, heads, layer_kinds, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.mixtures import PER_EXPERT, STACKED
from exactkv.models.families.ropes import rope, ropes_of_kinds
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

NAMES = {
    **llama.NAMES,
    **STACKED,
    "layers.{i}.attention.post_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.post_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight",),
}


def spec(config: Config) -> DecoderSpec:
    kind, count = config.fields.get("model_type"), config.take("num_hidden_layers")
    shape = heads(config)
    is_mixture = kind == "olmoe"
    config.expect("clip_qkv", None)
    dense: MlpSpec | MoeSpec = _mixture(config) if is_mixture else mlp(config)
    if kind == "olmo3":
        dims = {FULL: shape["head_dim"], SLIDING: shape["head_dim"]}
        turned = ropes_of_kinds(config, dims, {FULL: 500_000.0, SLIDING: 500_000.0})
        kinds, by_kind = layer_kinds(config, every(count, 4)), patterns(config)
    else:
        turned, kinds, by_kind = {FULL: rope(config, shape["head_dim"])}, [FULL] * count, {FULL: FullAttention()}
    bias: dict[str, Any] = dict.fromkeys(("bias", "output_bias"), bool(config.take("attention_bias", False)))
    layers = [
        LayerSpec(
            AttentionSpec(by_kind[k], **shape, rope=turned[k], qk_norm="width", **bias),
            dense,
            pre_norms=is_mixture,
            post_norms=not is_mixture,
        )
        for k in kinds
    ]
    return decoder(config, layers, default_eps=1e-5)


def _mixture(config: Config) -> MoeSpec:
    return MoeSpec(
        num_experts=config.take("num_experts"),
        top_k=config.take("num_experts_per_tok"),
        intermediate_size=config.take("intermediate_size"),
        activation=activation(config),
        normalized=bool(config.take("norm_topk_prob", False)),
    )


FAMILY = Family(
    "olmo",
    ("Olmo2ForCausalLM", "olmo2", "Olmo3ForCausalLM", "olmo3", "OlmoeForCausalLM", "olmoe"),
    spec,
    NAMES,
    instead=(PER_EXPERT,),
)
