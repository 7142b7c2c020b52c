"""GPT-OSS: every second layer windowed, a learned sink logit a head, YaRN, biases everywhere; experts whose gate and
up alternate, with a clamped activation."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import decoder, every, heads, layer_kinds, patterns
from exactkv.models.families.family import Alternating, Family, Names, Transposed
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

_MLP = "model.layers.{i}.mlp"
NAMES: Names = {
    **llama.NAMES,
    "layers.{i}.attention.sinks": ("model.layers.{i}.self_attn.sinks",),
    "layers.{i}.mlp.router.weight": (f"{_MLP}.router.weight",),
    "layers.{i}.mlp.router.bias": (f"{_MLP}.router.bias",),
    "layers.{i}.mlp.experts.gate_up.weight": (Alternating(f"{_MLP}.experts.gate_up_proj", 2, transposed=True),),
    "layers.{i}.mlp.experts.gate_up.bias": (Alternating(f"{_MLP}.experts.gate_up_proj_bias", 2),),
    "layers.{i}.mlp.experts.down.weight": (Transposed(f"{_MLP}.experts.down_proj"),),
    "layers.{i}.mlp.experts.down.bias": (f"{_MLP}.experts.down_proj_bias",),
}
_YARN = {  # what a config without rope's fields means
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip


def spec(config: Config) -> DecoderSpec:
    shape, by_kind = heads(config), patterns(config, 128)
    turned = rope(config, shape["head_dim"], 150_000.0, absent=_YARN)
    bias = bool(config.take("attention_bias", True))
    config.expect("hidden_act", "silu", default="silu")
    config.expect("swiglu_limit", 7.0, default=7.0)
    config.ignore("initial_context_length", "experts_per_token")
    mixture = MoeSpec(
        num_experts=config.take("num_local_experts"),
        top_k=config.take("num_experts_per_tok"),
        intermediate_size=config.take("intermediate_size"),
        activation="clamped_swiglu",
        normalized=True,
        router_bias=True,
        bias=True,
    )
    layers = [
        LayerSpec(AttentionSpec(by_kind[kind], **shape, rope=turned, bias=bias, output_bias=bias, sinks=True), mixture)
        for kind in layer_kinds(config, every(config.take("num_hidden_layers"), 2))
    ]
    return decoder(config, layers, default_eps=1e-5)


FAMILY = Family("gpt_oss", ("GptOssForCausalLM", "gpt_oss"), spec, NAMES)
