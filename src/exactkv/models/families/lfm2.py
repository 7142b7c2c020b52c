"""LFM2: short convolutions, on some layers attention instead, with norms of q and k."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families.common import decoder, heads
from exactkv.models.families.family import Family, Names
from exactkv.models.families.ropes import rope
from exactkv.models.recurrent.spec import ShortConvSpec
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "model.layers.{i}"
_ATTENTION, _CONV, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.conv", f"{_LAYER}.feed_forward"
ATTENTION, CONV = "full_attention", "conv"

NAMES: Names = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "final_norm.weight": ("model.embedding_norm.weight",),
    "head.weight": ("lm_head.weight",),
    "layers.{i}.attention.norm.weight": (f"{_LAYER}.operator_norm.weight",),
    "layers.{i}.attention.qkv.weight": tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
    "layers.{i}.attention.q_norm.weight": (f"{_ATTENTION}.q_layernorm.weight",),
    "layers.{i}.attention.k_norm.weight": (f"{_ATTENTION}.k_layernorm.weight",),
    "layers.{i}.attention.out.weight": (f"{_ATTENTION}.out_proj.weight",),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.operator_norm.weight",),
    "layers.{i}.recurrent.in.weight": (f"{_CONV}.in_proj.weight",),
    "layers.{i}.recurrent.in.bias": (f"{_CONV}.in_proj.bias",),
    "layers.{i}.recurrent.conv.weight": (f"{_CONV}.conv.weight",),
    "layers.{i}.recurrent.conv.bias": (f"{_CONV}.conv.bias",),
    "layers.{i}.recurrent.out.weight": (f"{_CONV}.out_proj.weight",),
    "layers.{i}.recurrent.out.bias": (f"{_CONV}.out_proj.bias",),
    "layers.{i}.mlp.norm.weight": (f"{_LAYER}.ffn_norm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_MLP}.w1.weight", f"{_MLP}.w3.weight"),
    "layers.{i}.mlp.down.weight": (f"{_MLP}.w2.weight",),
}


def spec(config: Config) -> DecoderSpec:
    hidden, shape = config.take("hidden_size"), heads(config)
    turned = rope(config, shape["head_dim"], 1_000_000.0)
    config.ignore("theta", "conv_dim", "conv_dim_out", "block_dim", "block_mlp_init_scale", "block_norm_eps")
    config.ignore(
        "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "num_heads", "conv_use_xavier_init"
    )
    config.expect("use_pos_enc", True, default=True)
    mlp = MlpSpec(_mlp_size(config), "silu")
    attention = AttentionSpec(FullAttention(), **shape, rope=turned, qk_norm="head")
    conv = ShortConvSpec(hidden, config.take("conv_L_cache", 3), bool(config.take("conv_bias", False)))
    layers = [
        LayerSpec(attention, mlp) if kind == ATTENTION else LayerSpec(None, mlp, recurrent=conv)
        for kind in _kinds(config)
    ]
    tied = config.take("tie_embedding", True)
    return decoder(config, layers, eps="norm_eps", default_eps=1e-5, tied=bool(tied))


def _kinds(config: Config) -> list[str]:
    """The kind of each layer, from "layer_types", or "full_attn_idxs" in older files."""
    count = config.take("num_hidden_layers")
    attentive = config.take("full_attn_idxs", list(range(count)))
    kinds = config.take("layer_types", [ATTENTION if i in attentive else CONV for i in range(count)])
    if len(kinds) != count or set(kinds) - {ATTENTION, CONV}:
        raise LoadError(
            f"config of a {config.family} model: layer_types = {kinds!r}; "
            f"expected {count} of '{ATTENTION}' and '{CONV}'"
        )
    return list(kinds)


def _mlp_size(config: Config) -> int:
    """Two thirds of what the config says, times a factor, rounded up to a multiple; or left as it is."""
    size: int = config.take("block_ff_dim", config.take("intermediate_size", None))
    factor, multiple = config.take("block_ffn_dim_multiplier", 1.0), config.take("block_multiple_of", 256)
    if config.take("block_auto_adjust_ff_dim", True):
        size = int(factor * int(2 * size / 3))
        size = multiple * ((size + multiple - 1) // multiple)
    return size


FAMILY = Family("lfm2", ("Lfm2ForCausalLM", "lfm2"), spec, NAMES)
