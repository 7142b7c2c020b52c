"""SmolLM3: a Llama without rope on every fourth layer."""

from __future__ import annotations

from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import llama
from exactkv.models.families.common import FULL, SLIDING, UNWINDOWED, decoder, heads, layer_kinds, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    count, step = config.take("num_hidden_layers"), config.take("no_rope_layer_interval", 4)
    has_rope = config.take("no_rope_layers", [int((i + 1) % step != 0) for i in range(count)])
    if len(has_rope) < count:
        raise LoadError(f"config of a smollm3 model: no_rope_layers has {len(has_rope)} entries for {count} layers")
    windowed = bool(config.take("use_sliding_window", False))
    by_kind = patterns(config, None) if windowed else UNWINDOWED
    default = [SLIDING if windowed and not turns else FULL for turns in has_rope[:count]]
    config.ignore("sliding_window", "max_window_layers")
    bias, shape = bool(config.take("attention_bias", False)), heads(config)
    turned = rope(config, shape["head_dim"], 2_000_000.0)
    dense = mlp(config, bool(config.take("mlp_bias", False)))
    config.expect("pretraining_tp", 1, 2, default=1)
    layers = [
        LayerSpec(
            AttentionSpec(by_kind[kind], **shape, rope=turned if turns else None, bias=bias, output_bias=bias), dense
        )
        for kind, turns in zip(layer_kinds(config, default), has_rope, strict=False)
    ]
    return decoder(config, layers, tied=True)


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM", "smollm3"), spec, llama.NAMES)
