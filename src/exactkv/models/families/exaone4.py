"""EXAONE 4: norms after attention and MLP only, q and k normed by head; with windows, rope on windowed layers only."""

from __future__ import annotations

from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.families import olmo
from exactkv.models.families.common import FULL, SLIDING, decoder, every, heads, layer_kinds, mlp, patterns
from exactkv.models.families.family import Family
from exactkv.models.families.ropes import rope
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    shape, by_kind = heads(config), patterns(config)
    windowed = by_kind[SLIDING] != by_kind[FULL]
    step = _step(config)
    turned = rope(config, shape["head_dim"])
    dense = mlp(config)
    count = config.take("num_hidden_layers")
    layers = [
        LayerSpec(
            AttentionSpec(
                by_kind[kind], **shape, rope=turned if kind == SLIDING or not windowed else None, qk_norm="head"
            ),
            dense,
            pre_norms=False,
            post_norms=True,
        )
        for kind in layer_kinds(config, every(count, step) if windowed else [FULL] * count)
    ]
    return decoder(config, layers, default_eps=1e-5)


def _step(config: Config) -> int:
    """Every how many layers one is full: a number, or a pattern such as "LLLG"."""
    pattern = config.take("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if pattern != "L" * (len(pattern) - 1) + "G":
            raise LoadError(f"config of an exaone4 model: sliding_window_pattern = {pattern!r}; expected as in 'LLLG'")
        return len(pattern)
    return int(pattern or 1)


FAMILY = Family("exaone4", ("Exaone4ForCausalLM", "exaone4"), spec, olmo.NAMES)
