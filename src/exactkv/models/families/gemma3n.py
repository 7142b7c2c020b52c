"""Gemma 3n, text: Gemma 3's windows and norms (without the offset), unscaled attention with normed values; the last
layers read the keys and values of earlier ones; four residual streams, a low-rank path beside attention, an input of
its own for every layer, sparse gates in the first layers."""

from __future__ import annotations

from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import gemma3
from exactkv.models.families.common import ACTIVATIONS, FULL, SLIDING, every, heads, layer_kinds, patterns
from exactkv.models.families.common import decoder as make_decoder
from exactkv.models.families.family import Family, Names
from exactkv.models.families.ropes import ropes_of_kinds
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, PerLayerSpec

_LAYER = "model.layers.{i}"
PER_LAYER_NAMES: Names = {
    **gemma3.NAMES,
    "per_layer.embedding.weight": ("model.embed_tokens_per_layer.weight",),
    "per_layer.projection.weight": ("model.per_layer_model_projection.weight",),
    "per_layer.norm.weight": ("model.per_layer_projection_norm.weight",),
    "layers.{i}.per_layer.gate.weight": (f"{_LAYER}.per_layer_input_gate.weight",),
    "layers.{i}.per_layer.out.weight": (f"{_LAYER}.per_layer_projection.weight",),
    "layers.{i}.per_layer.post_norm.weight": (f"{_LAYER}.post_per_layer_input_norm.weight",),
}
NAMES: Names = {
    **PER_LAYER_NAMES,
    "streams.into.weight": tuple(f"model.altup_projections.{s}.weight" for s in range(8)),
    "streams.out.weight": tuple(f"model.altup_unembed_projections.{s}.weight" for s in range(8)),
    "layers.{i}.laurel.norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.laurel.down.weight": (f"{_LAYER}.laurel.linear_left.weight",),
    "layers.{i}.laurel.up.weight": (f"{_LAYER}.laurel.linear_right.weight",),
    "layers.{i}.laurel.post_norm.weight": (f"{_LAYER}.laurel.post_laurel_norm.weight",),
    "layers.{i}.streams.norm.weight": (f"{_LAYER}.altup.router_norm.weight",),
    "layers.{i}.streams.router.weight": (f"{_LAYER}.altup.modality_router.weight",),
    "layers.{i}.streams.predict.weight": (f"{_LAYER}.altup.prediction_coefs.weight",),
    "layers.{i}.streams.correct.weight": (f"{_LAYER}.altup.correction_coefs.weight",),
    "layers.{i}.streams.scale": (f"{_LAYER}.altup.correct_output_scale",),
}
ASIDE = (
    r".*rotary_emb\.inv_freq", r"model\.(vision|audio)_(tower|encoder)\..*", r"model\.embed_(vision|audio)\..*",
    r".*layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight",  # of layers that share another's
)  # fmt: skip


def owners(kinds: list[str], shared: int) -> list[int | None]:
    """For each of the last ``shared`` layers, the last one before them of its kind; None for all others."""
    first = len(kinds) - shared
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    if first < 0 or (lacking := set(kinds[first:]) - last.keys()):
        of = f" of '{min(lacking)}'" if first >= 0 else ""
        raise LoadError(
            f"num_kv_shared_layers is {shared} of {len(kinds)} layers, and no layer{of} before them has keys and "
            "values for them; expected a number that leaves one of each kind"
        )
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def per_layer(config: Config, activation: str) -> PerLayerSpec:
    size = config.take("hidden_size_per_layer_input", 256)
    return PerLayerSpec(size, config.take("vocab_size_per_layer_input", 262_144), activation)


def spec(config: Config) -> DecoderSpec:
    shape, by_kind = heads(config) | {"scale": 1.0}, patterns(config, 512)
    count, bias = config.take("num_hidden_layers"), bool(config.take("attention_bias", False))
    kinds = layer_kinds(config, every(count, 5))
    dims = dict.fromkeys((FULL, SLIDING), shape["head_dim"])
    turned = ropes_of_kinds(config, dims, {FULL: 1_000_000.0, SLIDING: 10_000.0}, "rope_local_base_freq")
    activation = ACTIVATIONS[config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")]
    sizes = config.take("intermediate_size", 16_384)
    sizes = [sizes] * count if isinstance(sizes, int) else sizes
    sparse = 10 if count > 10 else 0
    sparsity = config.take("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (count - sparse))
    sparsity = [sparsity] * count if isinstance(sparsity, float) else sparsity
    config.expect("altup_active_idx", 0, default=0)
    config.expect("altup_correct_scale", True, default=True)
    config.ignore("altup_coef_clip", "altup_lr_multiplier", "use_bidirectional_attention")
    streams = config.take("altup_num_inputs", 4)
    if streams == 1:
        raise LoadError("config of a gemma3n model: altup_num_inputs = 1 is not supported; expected 2 or more streams")
    rank = config.take("laurel_rank", 64)
    layers = [
        LayerSpec(
            AttentionSpec(
                by_kind[kind], **shape, rope=turned[kind], bias=bias, output_bias=bias,
                qk_norm="head", v_norm=True, shares=shares,
            ),
            MlpSpec(size, activation, sparsity=off),
            post_norms=True,
            laurel_rank=rank,
        )
        for kind, shares, size, off in zip(
            kinds, owners(kinds, config.take("num_kv_shared_layers", 15)), sizes, sparsity, strict=True
        )
    ]  # fmt: skip
    return make_decoder(
        config, layers, tied=True,
        embedding_scale=config.take("hidden_size") ** 0.5,
        logit_softcap=config.take("final_logit_softcapping", 30.0, nullable=True),
        per_layer=per_layer(config, activation),
        streams=streams,
    )  # fmt: skip


FAMILY = Family(
    "gemma3n",
    ("Gemma3nForCausalLM", "gemma3n_text", "Gemma3nForConditionalGeneration", "gemma3n"),
    spec, NAMES, nested="text_config", prefixes=("", "model.language_model."), left_aside=ASIDE,
)  # fmt: skip
