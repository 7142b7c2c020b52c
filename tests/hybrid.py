"""Small models with recurrent layers: every kind of mixer, alone, beside attention and among attention layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exactkv.cache import AttentionPattern
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.recurrent.spec import (
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from exactkv.ops import TORCH, Ops
from tests.tiny import FULL, VOCAB, chunk, window

MAMBA = MambaSpec(inner_size=24, state_size=5, conv_width=4, dt_rank=3)
MAMBA2 = Mamba2Spec(num_heads=4, head_dim=6, num_groups=2, state_size=5, conv_width=4, norm_eps=1e-6)
SHORT_CONV = ShortConvSpec(size=24, conv_width=3)
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, norm_eps=1e-6)
RG_LRU = RgLruSpec(size=24, num_blocks=3, conv_width=2, activation="gelu_tanh")
MIXERS = {"mamba": MAMBA, "mamba2": MAMBA2, "short_conv": SHORT_CONV, "delta": DELTA, "rg_lru": RG_LRU}

Mixer = AttentionPattern | RecurrentSpec | tuple[AttentionPattern, RecurrentSpec]
MIXED: tuple[Mixer, ...] = (MAMBA, window(5), (FULL, MAMBA2), SHORT_CONV, chunk(8), DELTA, RG_LRU)
"""Every kind of layer, Falcon-H1's two beside each other among them."""


def hybrid_model(
    mixers: Sequence[Mixer] = MIXED, dtype: torch.dtype = torch.float64, seed: int = 0, ops: Ops = TORCH
) -> Model:
    """A decoder of one layer a mixer, width 32; the recurrent layers without MLP but those beside attention."""
    layers = []
    for mixer in mixers:
        pattern, recurrent = mixer if isinstance(mixer, tuple) else (mixer, None)
        if not isinstance(pattern, AttentionPattern):
            layers.append(LayerSpec(None, None, recurrent=pattern))
            continue
        attention = AttentionSpec(pattern, 4, 2, 8, 8**-0.5, RopeSpec(8, 10_000.0))
        layers.append(LayerSpec(attention, MlpSpec(48, "silu"), recurrent=recurrent))
    spec = DecoderSpec("hybrid", VOCAB, 32, tuple(layers), 1e-6, 1 << 20, tied_head=False)
    return Model(spec, random_weights(spec, seed, dtype), ops=ops)
