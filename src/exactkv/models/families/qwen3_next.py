"""Qwen3-Next: gated delta nets, every fourth layer gated attention with norms of q and k and rope on a quarter of
each head; a mixture of many experts beside a shared one with a gate; norms that multiply by 1 + w."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import qwen
from exactkv.models.families.common import FULL, activation, decoder, heads, mlp
from exactkv.models.families.family import Alternating, Family, Names
from exactkv.models.families.mixtures import PER_EXPERT
from exactkv.models.families.ropes import rope
from exactkv.models.recurrent.spec import GatedDeltaSpec
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

_LAYER = "model.layers.{i}"
_ATTENTION, _DELTA, LINEAR = f"{_LAYER}.self_attn", f"{_LAYER}.linear_attn", "linear_attention"


def _gated_qkv(kind: str) -> tuple[Alternating, str, str]:
    """In the files each head's gate follows its queries."""
    q = Alternating(f"{_ATTENTION}.q_proj.{kind}", 2, by_head=True)
    return q, f"{_ATTENTION}.k_proj.{kind}", f"{_ATTENTION}.v_proj.{kind}"


NAMES: Names = {
    **qwen.NAMES,
    "layers.{i}.attention.qkv.weight": _gated_qkv("weight"),
    "layers.{i}.attention.qkv.bias": _gated_qkv("bias"),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.recurrent.qkvz.weight": (f"{_DELTA}.in_proj_qkvz.weight",),
    "layers.{i}.recurrent.ba.weight": (f"{_DELTA}.in_proj_ba.weight",),
    "layers.{i}.recurrent.conv.weight": (f"{_DELTA}.conv1d.weight",),
    "layers.{i}.recurrent.dt_bias": (f"{_DELTA}.dt_bias",),
    "layers.{i}.recurrent.A_log": (f"{_DELTA}.A_log",),
    "layers.{i}.recurrent.gated_norm.weight": (f"{_DELTA}.norm.weight",),
    "layers.{i}.recurrent.out.weight": (f"{_DELTA}.out_proj.weight",),
}


def spec(config: Config) -> DecoderSpec:
    config.expect("use_sliding_window", False, default=False)
    shape, bias = heads(config), bool(config.take("attention_bias", False))
    turned = rope(config, shape["head_dim"], partial=0.25)
    attention = AttentionSpec(
        FullAttention(), **shape, rope=turned, qk_norm="head", bias=bias, output_bias=bias, gated=True
    )
    delta = GatedDeltaSpec(
        num_key_heads=config.take("linear_num_key_heads", 16),
        num_value_heads=config.take("linear_num_value_heads", 32),
        key_dim=config.take("linear_key_head_dim", 128),
        value_dim=config.take("linear_value_head_dim", 128),
        conv_width=config.take("linear_conv_kernel_dim", 4),
        norm_eps=config.take("rms_norm_eps", 1e-6),
        activation=activation(config),
    )
    mixture = MoeSpec(
        num_experts=config.take("num_experts", 512),
        top_k=config.take("num_experts_per_tok", 10),
        intermediate_size=config.take("moe_intermediate_size", 512),
        activation=activation(config),
        shared_intermediate_size=config.take("shared_expert_intermediate_size", 512),
        normalized=bool(config.take("norm_topk_prob", True)),
        shared_gate=True,
    )
    dense, plain, step = mlp(config), config.take("mlp_only_layers", []), config.take("decoder_sparse_step", 1)
    layers = []
    for i, kind in enumerate(_kinds(config)):
        after = mixture if i not in plain and (i + 1) % step == 0 else dense
        layers.append(LayerSpec(attention, after) if kind == FULL else LayerSpec(None, after, recurrent=delta))
    return decoder(config, layers, norm_offset=1.0)


def _kinds(config: Config) -> list[str]:
    """The kind of each layer, from "layer_types", or "full_attention_interval"."""
    count, interval = config.take("num_hidden_layers"), config.take("full_attention_interval", 4)
    default = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    kinds = list(config.take("layer_types", default))
    if len(kinds) != count or set(kinds) - {FULL, LINEAR}:
        raise LoadError(
            f"config of a {config.family} model: layer_types = {kinds!r}; expected {count} of '{FULL}' and '{LINEAR}'"
        )
    return kinds


FAMILY = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM", "qwen3_next"),
    spec,
    NAMES,
    instead=(PER_EXPERT,),
    left_aside=(r".*rotary_emb\.inv_freq", r"mtp\..*"),
)
