"""GLM-4: interleaved rope on half of each head, q, k and v with biases, gate and up in one tensor; the "0414" models
with norms after attention and MLP, too. The mixtures (GLM-4.5 and later): rope by halves, DeepSeek's routing."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families import deepseek, llama
from exactkv.models.families.common import decoder, heads, mlp
from exactkv.models.families.family import Family
from exactkv.models.families.mixtures import PER_EXPERT
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec

NAMES = {
    **llama.NAMES,
    **deepseek.MIXTURE_NAMES,
    "layers.{i}.attention.post_norm.weight": ("model.layers.{i}.post_self_attn_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": ("model.layers.{i}.mlp.gate_up_proj.weight",),
    "layers.{i}.mlp.post_norm.weight": ("model.layers.{i}.post_mlp_layernorm.weight",),
}
INSTEAD = {**PER_EXPERT, "layers.{i}.mlp.gate_up.weight": llama.NAMES["layers.{i}.mlp.gate_up.weight"]}


def spec(config: Config) -> DecoderSpec:
    kind, shape = config.fields.get("model_type"), heads(config)
    is_mixture = kind == "glm4_moe"
    turned = rope(config, shape["head_dim"], interleaved=not is_mixture, partial=0.5)
    attention = AttentionSpec(
        FullAttention(), **shape, rope=turned,
        bias=bool(config.take("attention_bias", not is_mixture)),
        qk_norm="head" if is_mixture and config.take("use_qk_norm", False) else None,
    )  # fmt: skip
    dense = mlp(config)
    count, first = config.take("num_hidden_layers"), config.take("first_k_dense_replace", 1) if is_mixture else None
    mixture = deepseek.mixture(config) if is_mixture else dense
    layers = [
        LayerSpec(attention, dense if first is None or i < first else mixture, post_norms=kind == "glm4")
        for i in range(count)
    ]
    return decoder(config, layers, default_eps=1.5625e-7)


FAMILY = Family(
    "glm",
    ("GlmForCausalLM", "glm", "Glm4ForCausalLM", "glm4", "Glm4MoeForCausalLM", "glm4_moe"),
    spec,
    NAMES,
    instead=(INSTEAD,),
    left_aside=(r".*rotary_emb\.inv_freq", r"model\.layers\.{layers}\..*"),
)
