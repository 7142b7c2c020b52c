"""What GGUF files call the decoder's parameters: one table for all architectures, as llama.cpp has one."""

from __future__ import annotations

from collections.abc import Iterator

from exactkv.models.families.family import Alternating, Names, Source

LEFT_ASIDE = (r"blk\.\d+\.attn_rot_embd\..*", r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight")
"""Tensors that the decoder does not need: constants, and rope factors, which go into the config."""

SHARED_KEYS = r"blk\.\d+\.attn_(k|v|k_norm)\.weight"
"""Where the last layers read the keys and values of others, files hold projections for them all the same."""

# Our name -> the GGUF names of what is stacked in it, of the whole model and of a layer ("blk.N."), without the ending.
_TOP = {
    "embedding": "token_embd", "positions": "position_embd", "head": "output", "final_norm": "output_norm",
    "per_layer.embedding": "per_layer_token_embd", "per_layer.projection": "per_layer_model_proj",
    "per_layer.norm": "per_layer_proj_norm", "streams.into": "altup_proj", "streams.out": "altup_unembd_proj",
}  # fmt: skip
_LAYER = {
    "attention.norm": "attn_norm", "recurrent.norm": "attn_norm", "laurel.norm": "attn_norm", "mlp.norm": "ffn_norm",
    "attention.post_norm": "post_attention_norm", "mlp.post_norm": "post_ffw_norm",
    "attention.qkv": "attn_q attn_k attn_v", "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
    "attention.q": "attn_q", "attention.q_down": "attn_q_a", "attention.q_up": "attn_q_b",
    "attention.kv_down": "attn_kv_a_mqa", "attention.kv_norm": "attn_kv_a_norm", "attention.kv_up": "attn_kv_b",
    "mlp.gate_up": "ffn_gate ffn_up", "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up": "ffn_gate_exps ffn_up_exps", "mlp.experts.down": "ffn_down_exps",
    "mlp.shared.gate_up": "ffn_gate_shexp ffn_up_shexp", "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    "mlp.own_norm": "post_ffw_norm_1", "beside.norm": "pre_ffw_norm_2", "beside.own_norm": "post_ffw_norm_2",
    "beside.router": "ffn_gate_inp", "beside.experts.gate_up": "ffn_gate_exps ffn_up_exps",
    "beside.experts.down": "ffn_down_exps",
    "recurrent.in": "ssm_in", "recurrent.conv": "ssm_conv1d", "recurrent.select": "ssm_x", "recurrent.dt": "ssm_dt",
    "recurrent.out": "ssm_out", "recurrent.gated_norm": "ssm_norm", "recurrent.dt_norm": "ssm_dt_norm",
    "recurrent.B_norm": "ssm_b_norm", "recurrent.C_norm": "ssm_c_norm",
    "recurrent.qkvz": "ssm_in", "recurrent.ba": "ssm_ba",
    "per_layer.gate": "inp_gate", "per_layer.out": "proj", "per_layer.post_norm": "post_norm",
    "laurel.down": "laurel_l", "laurel.up": "laurel_r", "laurel.post_norm": "laurel_post_norm",
    "streams.norm": "altup_router_norm", "streams.router": "altup_router",
    "streams.predict": "altup_predict_coef", "streams.correct": "altup_correct_coef",
}  # fmt: skip
_INSTEAD = {
    "attention.qkv": "attn_qkv", "mlp.gate_up": "ffn_up", "attention.q_norm": "attn_q_a_norm",
    "mlp.experts.gate_up": "ffn_gate_up_exps", "beside.experts.gate_up": "ffn_gate_up_exps",
    "recurrent.in": "shortconv.in_proj", "recurrent.conv": "shortconv.conv", "recurrent.out": "shortconv.out_proj",
}  # fmt: skip
_WHOLE = {
    "attention.sinks": "attn_sinks.weight", "mlp.score_bias": "exp_probs_b.bias",
    "recurrent.A_log": "ssm_a", "recurrent.D": "ssm_d", "recurrent.dt_bias": "ssm_dt.bias",
    "streams.scale": "altup_correct_scale.weight", "scale": "layer_output_scale.weight",
    "beside.router.scale": "ffn_gate_inp.scale", "beside.expert_scale": "ffn_down_exps.scale",
}  # fmt: skip


def _layer_names(table: dict[str, str]) -> Iterator[tuple[str, tuple[Source, ...]]]:
    for ours, theirs in table.items():
        for kind in ("weight", "bias"):
            yield f"layers.{{i}}.{ours}.{kind}", tuple(f"blk.{{i}}.{part}.{kind}" for part in theirs.split())


NAMES: Names = {
    **{f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in _TOP.items() for kind in ("weight", "bias")},
    **dict(_layer_names(_LAYER)),
    **{f"layers.{{i}}.{ours}": (f"blk.{{i}}.{theirs}",) for ours, theirs in _WHOLE.items()},
}
INSTEAD: Names = {
    "final_norm.weight": ("token_embd_norm.weight",),
    "layers.{i}.mlp.score_bias": ("blk.{i}.exp_probs_b.weight",),
    "layers.{i}.mlp.norm.weight": ("blk.{i}.ffn_norm",),
    **dict(_layer_names(_INSTEAD)),
}

# Architectures that use a name otherwise.
PARALLEL: Names = {"layers.{i}.mlp.norm.weight": ("blk.{i}.attn_norm.weight",)}
"""Attention and MLP behind one norm."""

NORM_AFTER_ATTENTION: Names = {"layers.{i}.mlp.norm.weight": ("blk.{i}.post_attention_norm.weight",)}
"""The norm before the MLP is called after what it follows."""

GATED_QUERIES: Names = {
    f"layers.{{i}}.attention.qkv.{kind}": (
        Alternating(f"blk.{{i}}.attn_q.{kind}", 2, by_head=True), f"blk.{{i}}.attn_k.{kind}", f"blk.{{i}}.attn_v.{kind}"
    )
    for kind in ("weight", "bias")
}  # fmt: skip
"""Each head's gate follows its queries."""
