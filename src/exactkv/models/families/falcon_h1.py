"""Falcon-H1: attention and Mamba-2 beside each other in every layer, on one norm of its input; what goes into them
and comes out is multiplied by numbers of the config (arXiv 2507.22448)."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import mamba2
from exactkv.models.families.common import activation, decoder, heads
from exactkv.models.families.family import Family, Names
from exactkv.models.families.llama import NAMES as LLAMA
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "model.layers.{i}"
_MLP = f"{_LAYER}.feed_forward"
NAMES: Names = {
    **LLAMA,
    **mamba2.mixer_names(f"{_LAYER}.mamba"),
    "final_norm.weight": ("model.final_layernorm.weight",),
    "layers.{i}.recurrent.norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.mlp.norm.weight": (f"{_LAYER}.pre_ff_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{i}.mlp.gate_up.bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "layers.{i}.mlp.down.weight": (f"{_MLP}.down_proj.weight",),
    "layers.{i}.mlp.down.bias": (f"{_MLP}.down_proj.bias",),
}


def spec(config: Config) -> DecoderSpec:
    config.ignore(
        "num_logits_to_keep", "layers_block_type", "layer_types", "mlp_expansion_factor", "time_step_floor",
        "time_step_max", "time_step_min", "time_step_rank",
    )  # fmt: skip
    config.expect("mamba_use_mlp", True, default=True)
    config.expect("attn_layer_indices", None)  # all layers have both
    shape = heads(config)
    bias = bool(config.take("attention_bias", False))
    turned = rope(config, shape["head_dim"])
    # Queries, keys and values each carry the factor of attention's input, keys one of their own: together they
    # multiply scores and what is attended. With biases, which no factor multiplies, they would not.
    into, of_keys = (float(config.take(f"{name}_multiplier", 1.0)) for name in ("attention_in", "key"))
    if bias and (into, of_keys) != (1.0, 1.0):
        raise _only_without_factor("attention_bias", f"attention_in_multiplier = {into}, key_multiplier = {of_keys}")
    attention = AttentionSpec(
        FullAttention(), **shape | {"scale": shape["scale"] * into * into * of_keys}, rope=turned, bias=bias,
        output_bias=bias,
    )  # fmt: skip
    into_gate, out_of_mlp = config.take("mlp_multipliers", (1.0, 1.0))
    mlp = MlpSpec(
        config.take("intermediate_size"), activation(config), bool(config.take("mlp_bias", False)),
        gate_scale=float(into_gate),
    )  # fmt: skip
    inner = config.take("mamba_d_ssm", int(config.take("mamba_expand", 2) * config.take("hidden_size")))
    groups = config.take("mamba_n_groups", 1)
    normed = bool(config.take("mamba_rms_norm", False))
    before = bool(config.take("mamba_norm_before_gate", True))
    into_mamba = float(config.take("ssm_in_multiplier", 1.0))
    if into_mamba != 1.0 and config.take("mamba_proj_bias", False):
        raise _only_without_factor("mamba_proj_bias", f"ssm_in_multiplier = {into_mamba}")
    mixer = mamba2.inner_mixer(
        config,
        inner,
        gated_norm=("before" if before else "after") if normed else None,
        norm_groups=groups,
        output_bias=bool(config.take("projectors_bias", False)),
        scales=tuple(into_mamba * float(x) for x in config.take("ssm_multipliers", (1.0,) * 5)),
    )
    layer = LayerSpec(
        attention,
        mlp,
        recurrent=mixer,
        attention_scale=into * float(config.take("attention_out_multiplier", 1.0)),
        recurrent_scale=float(config.take("ssm_out_multiplier", 1.0)),
        mlp_scale=float(out_of_mlp),
    )
    return decoder(
        config,
        [layer] * config.take("num_hidden_layers"),
        default_eps=1e-5,
        embedding_scale=float(config.take("embedding_multiplier", 1.0)),
        logit_scale=float(config.take("lm_head_multiplier", 1.0)),
    )


def _only_without_factor(bias: str, factors: str) -> LoadError:
    return LoadError(
        f"config of a falcon_h1 model: {bias} = True with {factors} is not supported; expected multipliers of 1 with "
        "it, or no bias."
    )


FAMILY = Family("falcon_h1", ("FalconH1ForCausalLM", "falcon_h1"), spec, NAMES)
