"""Mixtral: a Mistral with a mixture of experts on every layer."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import SLIDING, activation, decoder, heads, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.mixtures import STACKED
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

_MOE = "model.layers.{i}.block_sparse_moe"
AS_ON_THE_HUB = {
    "layers.{i}.mlp.router.weight": (f"{_MOE}.gate.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (f"{_MOE}.experts.{{e}}.w1.weight", f"{_MOE}.experts.{{e}}.w3.weight"),
    "layers.{i}.mlp.experts.down.weight": (f"{_MOE}.experts.{{e}}.w2.weight",),
}


def spec(config: Config) -> DecoderSpec:
    shape = heads(config)
    turned = rope(config, shape["head_dim"], 1_000_000.0)
    mixture = MoeSpec(
        num_experts=config.take("num_local_experts"),
        top_k=config.take("num_experts_per_tok"),
        intermediate_size=config.take("intermediate_size"),
        activation=activation(config),
        normalized=True,
    )
    layer = LayerSpec(AttentionSpec(patterns(config, None)[SLIDING], **shape, rope=turned), mixture)
    return decoder(config, [layer] * config.take("num_hidden_layers"), default_eps=1e-5)


FAMILY = Family(
    "mixtral", ("MixtralForCausalLM", "mixtral"), spec, {**llama.NAMES, **STACKED}, instead=(AS_ON_THE_HUB,)
)
