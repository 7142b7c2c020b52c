"""RecurrentGemma: Griffin's recurrent blocks, every third layer windowed attention with rope on half of each head;
norms that multiply by 1 + w (arXiv 2404.07839)."""

from __future__ import annotations

import torch

from exactkv.cache import SlidingWindow
from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families.common import activation, heads
from exactkv.models.families.family import Family, Names, Source
from exactkv.models.families.mamba import ANY_LENGTH
from exactkv.models.families.ropes import rope
from exactkv.models.recurrent.spec import RgLruSpec
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_LAYER = "model.layers.{i}"
_BLOCK, _MLP = f"{_LAYER}.temporal_block", f"{_LAYER}.mlp_block"
_RECURRENT = {"x": "linear_x", "y": "linear_y", "out": "linear_out", "conv": "conv_1d"}
_GATES = {"input": "input", "recurrence": "recurrent"}
KINDS = ("recurrent", "attention")


def _names() -> Names:
    found: dict[str, tuple[Source, ...]] = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "final_norm.weight": ("model.final_norm.weight",),
        "head.weight": ("lm_head.weight",),
        "layers.{i}.mlp.norm.weight": (f"{_LAYER}.channel_pre_norm.weight",),
        "layers.{i}.recurrent.rate": (f"{_BLOCK}.rg_lru.recurrent_param",),
    }
    for mixer in ("attention", "recurrent"):
        found[f"layers.{{i}}.{mixer}.norm.weight"] = (f"{_LAYER}.temporal_pre_norm.weight",)
    for kind in ("weight", "bias"):
        found[f"layers.{{i}}.attention.qkv.{kind}"] = tuple(f"{_BLOCK}.{x}_proj.{kind}" for x in "qkv")
        found[f"layers.{{i}}.attention.out.{kind}"] = (f"{_BLOCK}.o_proj.{kind}",)
        found[f"layers.{{i}}.mlp.gate_up.{kind}"] = (f"{_MLP}.gate_proj.{kind}", f"{_MLP}.up_proj.{kind}")
        found[f"layers.{{i}}.mlp.down.{kind}"] = (f"{_MLP}.down_proj.{kind}",)
        for ours, theirs in _RECURRENT.items():
            found[f"layers.{{i}}.recurrent.{ours}.{kind}"] = (f"{_BLOCK}.{theirs}.{kind}",)
        for ours, theirs in _GATES.items():
            found[f"layers.{{i}}.recurrent.{ours}_gate.{kind}"] = (f"{_BLOCK}.rg_lru.{theirs}_gate_{kind}",)
    return found


def spec(config: Config) -> DecoderSpec:
    hidden, shape = config.take("hidden_size"), heads(config)
    config.ignore("w_init_variance_scale", "final_w_init_variance_scale")
    config.expect("embeddings_scale_by_sqrt_dim", True, default=True)
    attention = AttentionSpec(
        SlidingWindow(window=config.take("attention_window_size", config.take("sliding_window", 2048))),
        **shape,
        rope=rope(config, shape["head_dim"], partial=0.5),
        bias=bool(config.take("attention_bias", False)),
        output_bias=True,
    )
    act = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    recurrent = RgLruSpec(
        config.take("lru_width", hidden), config.take("num_attention_heads"), config.take("conv1d_width", 4), act
    )
    mlp = MlpSpec(config.take("intermediate_size") // 2, act, bias=True)
    count = config.take("num_hidden_layers")
    cycle = config.take("block_types", ["recurrent", "recurrent", "attention"])
    if not cycle or set(cycle) - set(KINDS):
        raise LoadError(f"config of a {config.family} model: block_types = {cycle!r}; expected some of {KINDS}")
    layers = [
        LayerSpec(attention, mlp) if cycle[i % len(cycle)] == "attention" else LayerSpec(None, mlp, recurrent=recurrent)
        for i in range(count)
    ]
    return DecoderSpec(
        family=config.family,
        vocab_size=config.take("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layers),
        norm_eps=config.take("rms_norm_eps", 1e-6),
        max_length=config.take("max_position_embeddings", ANY_LENGTH),
        tied_head=bool(config.take("tie_word_embeddings", True)),
        norm_offset=1.0,
        embedding_scale=torch.tensor(hidden**0.5, dtype=torch.bfloat16).item(),  # rounded in every model, so trained
        logit_softcap=float(config.take("logits_soft_cap", 30.0)),
    )


FAMILY = Family("recurrent_gemma", ("RecurrentGemmaForCausalLM", "recurrent_gemma"), spec, _names())
