"""Gemma 1 and 2: norms that multiply by 1 + w, embeddings scaled by sqrt(hidden); Gemma 2 with norms also after
attention and MLP, every second layer windowed, attention scores and logits capped."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import gemma3, llama
from exactkv.models.families.common import FULL, UNWINDOWED, decoder, every, heads, layer_kinds, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec


def spec(config: Config) -> DecoderSpec:
    shape, is_gemma2 = heads(config), config.fields.get("model_type") == "gemma2"
    config.expect("use_bidirectional_attention", False, default=False)
    turned = rope(config, shape["head_dim"])
    bias = bool(config.take("attention_bias", False))
    # Gemma's GELU has always been the approximate one; the first files call it "gelu", which their code disregards.
    acts = ("gelu_pytorch_tanh", "gelu")
    config.expect("hidden_act", *acts, default=acts[0])
    config.expect("hidden_activation", *acts[:1], default=acts[0])
    mlp = MlpSpec(config.take("intermediate_size"), "gelu_tanh")
    count = config.take("num_hidden_layers")
    by_kind, kinds, cap, words = UNWINDOWED, [FULL] * count, None, {}
    if is_gemma2:
        by_kind, kinds = patterns(config), layer_kinds(config, every(count, 2))
        shape["scale"] = config.take("query_pre_attn_scalar", 256) ** -0.5
        cap = config.take("attn_logit_softcapping", 50.0, nullable=True)
        words = {"logit_softcap": config.take("final_logit_softcapping", 30.0, nullable=True)}
    config.ignore("query_pre_attn_scalar")
    layers = [
        LayerSpec(
            AttentionSpec(by_kind[kind], **shape, rope=turned, bias=bias, output_bias=bias, softcap=cap),
            mlp,
            post_norms=is_gemma2,
        )
        for kind in kinds
    ]
    embedding_scale = config.take("hidden_size") ** 0.5
    return decoder(config, layers, tied=True, norm_offset=1.0, embedding_scale=embedding_scale, **words)


FAMILY_1 = Family("gemma", ("GemmaForCausalLM", "gemma"), spec, llama.NAMES)
FAMILY_2 = Family("gemma2", ("Gemma2ForCausalLM", "gemma2"), spec, gemma3.NAMES)
