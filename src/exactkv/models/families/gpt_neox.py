"""GPT-NeoX and Pythia: LayerNorm, attention and MLP in parallel, rope on a part of each head; q, k and v alternate
head by head in one tensor."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families.common import activation, decoder, heads
from exactkv.models.families.family import Alternating, Family, Names
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "gpt_neox.layers.{i}"


def _both(ours: str, theirs: str) -> Names:
    return {f"{ours}.{part}": (f"{theirs}.{part}",) for part in ("weight", "bias")}


NAMES: Names = {
    "embedding.weight": ("gpt_neox.embed_in.weight",),
    "head.weight": ("embed_out.weight",),
    **_both("final_norm", "gpt_neox.final_layer_norm"),
    **_both("layers.{i}.attention.norm", f"{_LAYER}.input_layernorm"),
    "layers.{i}.attention.qkv.weight": (Alternating(f"{_LAYER}.attention.query_key_value.weight", 3, by_head=True),),
    "layers.{i}.attention.qkv.bias": (Alternating(f"{_LAYER}.attention.query_key_value.bias", 3, by_head=True),),
    **_both("layers.{i}.attention.out", f"{_LAYER}.attention.dense"),
    **_both("layers.{i}.mlp.norm", f"{_LAYER}.post_attention_layernorm"),
    **_both("layers.{i}.mlp.up", f"{_LAYER}.mlp.dense_h_to_4h"),
    **_both("layers.{i}.mlp.down", f"{_LAYER}.mlp.dense_4h_to_h"),
}


def spec(config: Config) -> DecoderSpec:
    shape, bias = heads(config), bool(config.take("attention_bias", True))
    base, partial = config.take("rotary_emb_base", 10_000), config.take("rotary_pct", 0.25)
    config.ignore("hidden_dropout", "classifier_dropout")
    layer = LayerSpec(
        AttentionSpec(
            FullAttention(), **shape, rope=rope(config, shape["head_dim"], base, partial=partial),
            bias=bias, output_bias=bias,
        ),
        MlpSpec(config.take("intermediate_size"), activation(config, default="gelu"), bias=True, gated=False),
        parallel=bool(config.take("use_parallel_residual", True)),
    )  # fmt: skip
    layers = [layer] * config.take("num_hidden_layers")
    return decoder(config, layers, "layer_norm_eps", 1e-5, norm="layer", norm_bias=True)


FAMILY = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM", "gpt_neox"),
    spec,
    NAMES,
    instead=({"head.weight": ("lm_head.weight",)},),
    left_aside=(r".*rotary_emb\.inv_freq", r".*attention\.(masked_)?bias"),
)
