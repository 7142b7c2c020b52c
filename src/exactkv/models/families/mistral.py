"""Mistral, a Llama with a window; Ministral, with windows on some layers; Ministral 3, with a query temperature; and
the text model of Mistral 3, which is one of these."""

from __future__ import annotations

from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import SLIDING, decoder, heads, layer_kinds, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, QueryTemperature


def spec(config: Config) -> DecoderSpec:
    is_ministral3 = config.fields.get("model_type") == "ministral3"
    by_kind = patterns(config, None if is_ministral3 else 4096)
    shape, temperature = heads(config), None
    if is_ministral3:
        fields = config.take("rope_parameters")
        if fields.get("llama_4_scaling_beta") is not None:
            temperature = QueryTemperature(
                fields["llama_4_scaling_beta"], fields["original_max_position_embeddings"], first=0
            )
    turned = rope(config, shape["head_dim"], others=("llama_4_scaling_beta",) if is_ministral3 else ())
    dense = mlp(config)
    layers = [
        LayerSpec(AttentionSpec(by_kind[kind], **shape, rope=turned, temperature=temperature), dense)
        for kind in layer_kinds(config, [SLIDING] * config.take("num_hidden_layers"))
    ]
    return decoder(config, layers)


FAMILY = Family(
    "mistral",
    (
        "MistralForCausalLM", "mistral", "MinistralForCausalLM", "ministral", "Ministral3ForCausalLM", "ministral3",
        "Mistral3ForConditionalGeneration", "mistral3",
    ),
    spec,
    llama.NAMES,
    nested="text_config",
    prefixes=("", "language_model.", "model.language_model."),
    left_aside=(r".*rotary_emb\.inv_freq", r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
)  # fmt: skip
