"""GPT-2: learned positions, LayerNorm, a plain MLP, matrices stored as [in, out]."""

from __future__ import annotations

from exactkv.cache import FullAttention
from exactkv.models.config import Config
from exactkv.models.families.common import activation
from exactkv.models.families.family import Family, Names, Transposed
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "h.{i}"


def _linear(ours: str, theirs: str) -> Names:
    return {f"{ours}.weight": (Transposed(f"{theirs}.weight"),), f"{ours}.bias": (f"{theirs}.bias",)}


def _norm(ours: str, theirs: str) -> Names:
    return {f"{ours}.weight": (f"{theirs}.weight",), f"{ours}.bias": (f"{theirs}.bias",)}


OLDER: Names = {  # the first files' names
    "embedding.weight": ("wte.weight",),
    "positions.weight": ("wpe.weight",),
    "head.weight": ("lm_head.weight",),
    **_norm("final_norm", "ln_f"),
    **_norm("layers.{i}.attention.norm", f"{_LAYER}.ln_1"),
    **_linear("layers.{i}.attention.qkv", f"{_LAYER}.attn.c_attn"),
    **_linear("layers.{i}.attention.out", f"{_LAYER}.attn.c_proj"),
    **_norm("layers.{i}.mlp.norm", f"{_LAYER}.ln_2"),
    **_linear("layers.{i}.mlp.up", f"{_LAYER}.mlp.c_fc"),
    **_linear("layers.{i}.mlp.down", f"{_LAYER}.mlp.c_proj"),
}
NAMES: Names = {
    ours: tuple(f"transformer.{x}" if isinstance(x, str) else Transposed(f"transformer.{x.name}") for x in theirs)
    for ours, theirs in OLDER.items()
} | {"head.weight": ("lm_head.weight",)}


def spec(config: Config) -> DecoderSpec:
    hidden, heads, length = config.take("n_embd", 768), config.take("n_head", 12), config.take("n_positions", 1024)
    scaled, by_layer = config.take("scale_attn_weights", True), config.take("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False, default=False)
    config.ignore(
        "attn_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    )  # fmt: skip
    scale = (hidden // heads) ** -0.5 if scaled else 1.0
    mlp = MlpSpec(
        config.take("n_inner", 4 * hidden), activation(config, "activation_function", "gelu_new"), True, gated=False
    )
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                FullAttention(), heads, heads, hidden // heads, scale / (i + 1) if by_layer else scale, rope=None,
                bias=True, output_bias=True,
            ),
            mlp,
        )
        for i in range(config.take("n_layer", 12))
    )  # fmt: skip
    return DecoderSpec(
        family="gpt2",
        vocab_size=config.take("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        norm_eps=config.take("layer_norm_epsilon", 1e-5),
        max_length=length,
        tied_head=bool(config.take("tie_word_embeddings", True)),
        norm="layer",
        norm_bias=True,
        learned_positions=True,
    )


FAMILY = Family(
    "gpt2",
    ("GPT2LMHeadModel", "gpt2"),
    spec,
    NAMES,
    instead=(OLDER,),
    left_aside=(r".*attn\.(masked_)?bias",),
)
