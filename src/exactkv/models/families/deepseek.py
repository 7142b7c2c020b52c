"""DeepSeek V2 and V3: latent attention; experts in groups beside shared ones; the first layers dense. V3 routes by
sigmoids with a bias that counts for the choice alone."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import activation, decoder, mlp
from exactkv.models.families.family import Family, Names
from exactkv.models.families.mixtures import PER_EXPERT, STACKED
from exactkv.models.families.ropes import rope
from exactkv.models.rope import yarn_amplitude
from exactkv.models.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, MoeSpec

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
MIXTURE_NAMES: Names = {
    **STACKED,
    "layers.{i}.mlp.score_bias": (f"{_MLP}.gate.e_score_correction_bias",),
    "layers.{i}.mlp.shared.gate_up.weight": tuple(f"{_MLP}.shared_experts.{x}_proj.weight" for x in ("gate", "up")),
    "layers.{i}.mlp.shared.down.weight": (f"{_MLP}.shared_experts.down_proj.weight",),
}
NAMES: Names = {
    **llama.NAMES,
    **MIXTURE_NAMES,
    "layers.{i}.attention.q.weight": (f"{_ATTENTION}.q_proj.weight",),
    "layers.{i}.attention.q_down.weight": (f"{_ATTENTION}.q_a_proj.weight",),
    "layers.{i}.attention.q_down.bias": (f"{_ATTENTION}.q_a_proj.bias",),
    "layers.{i}.attention.q_norm.weight": (f"{_ATTENTION}.q_a_layernorm.weight",),
    "layers.{i}.attention.q_up.weight": (f"{_ATTENTION}.q_b_proj.weight",),
    "layers.{i}.attention.kv_down.weight": (f"{_ATTENTION}.kv_a_proj_with_mqa.weight",),
    "layers.{i}.attention.kv_down.bias": (f"{_ATTENTION}.kv_a_proj_with_mqa.bias",),
    "layers.{i}.attention.kv_norm.weight": (f"{_ATTENTION}.kv_a_layernorm.weight",),
    "layers.{i}.attention.kv_up.weight": (f"{_ATTENTION}.kv_b_proj.weight",),
}


def spec(config: Config) -> DecoderSpec:
    rank = config.take("q_lora_rank", None if "q_lora_rank" in config.fields else 1536)
    nope, turned_dim = config.take("qk_nope_head_dim", 128), config.take("qk_rope_head_dim", 64)
    interleaved = bool(config.take("rope_interleave", True))
    turned = rope(config, turned_dim, interleaved=interleaved)
    fields = {**config.take("rope_scaling", {}), **config.take("rope_parameters", {})}
    amplitude = yarn_amplitude(fields.get("factor") or 1.0, fields.get("mscale_all_dim") or 0.0)
    bias = bool(config.take("attention_bias", False))
    attention = LatentAttentionSpec(
        FullAttention(),
        num_heads=config.take("num_attention_heads"),
        q_rank=rank,
        kv_rank=config.take("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=turned_dim,
        v_dim=config.take("v_head_dim", 128),
        scale=(nope + turned_dim) ** -0.5 * (amplitude**2 if turned.scaling else 1.0),
        rope=turned,
        bias=bias,
        output_bias=bias,
    )
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")
    config.expect("mlp_bias", False, default=False)
    config.expect("pretraining_tp", 1, default=1)
    config.expect("moe_layer_freq", 1, default=1)
    dense, experts = mlp(config), mixture(config)
    first = config.take("first_k_dense_replace", 0)
    layers = [LayerSpec(attention, dense if i < first else experts) for i in range(config.take("num_hidden_layers"))]
    return decoder(config, layers)


def mixture(config: Config) -> MoeSpec:
    """DeepSeek's routing, as its config names it; GLM-4.5 has V3's."""
    is_v2 = config.fields.get("model_type") == "deepseek_v2"
    method = config.take("topk_method", "greedy" if is_v2 else "noaux_tc")
    if method not in (("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)):
        raise LoadError(f"config of a {config.family} model: topk_method = {method!r} is not supported")
    config.expect("scoring_func", "softmax" if is_v2 else "sigmoid", default="softmax" if is_v2 else "sigmoid")
    normalized = bool(config.take("norm_topk_prob", not is_v2))
    if is_v2 and normalized:
        raise LoadError("config of a deepseek model: norm_topk_prob = True is not supported in V2")
    config.ignore("num_nextn_predict_layers", "num_mtp_layers")
    groups, best = config.take("n_group", 1), config.take("topk_group", 1)
    if method == "greedy":
        groups = best = 1
    size = config.take("moe_intermediate_size")
    return MoeSpec(
        num_experts=config.take("n_routed_experts", config.take("num_local_experts", 0)),
        top_k=config.take("num_experts_per_tok"),
        intermediate_size=size,
        activation=activation(config),
        shared_intermediate_size=size * config.take("n_shared_experts", 0),
        scores="softmax" if is_v2 else "sigmoid",
        normalized=normalized,
        score_scale=float(config.take("routed_scaling_factor", 1.0)),
        groups=groups,
        top_groups=best,
        group_best=1 if is_v2 else 2,
        score_bias=not is_v2,
    )


FAMILY = Family(
    "deepseek",
    ("DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV3ForCausalLM", "deepseek_v3"),
    spec,
    NAMES,
    instead=(PER_EXPERT,),
    left_aside=(r".*rotary_emb\.inv_freq", r"model\.layers\.{layers}\..*"),
)
