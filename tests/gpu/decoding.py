"""Models that decode by a captured step, and the step without a capture, for tests with and without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exactkv.cache import AttentionPattern, Cache
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from tests.tiny import FULL, VOCAB, chunk, on, window

PATTERNS = [FULL, window(6), chunk(8), window(40)]


def dense_model(
    patterns: Sequence[AttentionPattern] = PATTERNS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    every_word: bool = False,
    seed: int = 0,
) -> Model:
    """A decoder of one layer a pattern, width 48, 6 heads in groups of 3, of size 16. ``every_word``: with all that a
    captured step can do: q/k norm, biases, part of a head rotated, soft caps, sinks, norms after, scales."""
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                pattern=pattern,
                num_heads=6,
                num_kv_heads=2,
                head_dim=16,
                scale=0.25,
                rope=None if every_word and i == 2 else RopeSpec(8 if every_word and i == 1 else 16,
                                                               10_000.0 if i % 2 else 500.0, interleaved=bool(i % 2)),
                qk_norm="head" if every_word else None,
                bias=every_word,
                output_bias=every_word,
                softcap=5.0 if every_word else None,
                sinks=every_word,
            ),
            mlp=MlpSpec(40, "gelu_tanh" if every_word else "silu", bias=every_word),
            post_norms=every_word and i % 2 == 0,
            residual_scale=0.7 if every_word else 1.0,
        )
        for i, pattern in enumerate(patterns)
    )  # fmt: skip
    extra = {"embedding_scale": 3.0, "norm_offset": 1.0, "logit_scale": 2.0, "logit_softcap": 9.0} if every_word else {}
    spec = DecoderSpec("tiny", VOCAB, 48, layers, 1e-6, 4096, tied_head=every_word, **extra)  # type: ignore[arg-type]
    return Model(spec, on(device, random_weights(spec, seed, dtype, gain=1.5)))


def mixture_model(device: str = "cpu", dtype: torch.dtype = torch.float32, post_norms: bool = False) -> Model:
    """Four layers of five experts, of which two are chosen by softmax, normalized, and multiply the outputs; a shared
    expert in every second layer, an MLP in the last."""
    spec = dense_model(dtype=dtype).spec
    moe = MoeSpec(5, 2, 24, "silu", normalized=True, score_scale=1.5, router_bias=True)
    mixed = [replace(moe, shared_intermediate_size=40 if i % 2 else 0) for i in range(3)]
    layers = tuple(
        replace(layer, mlp=mixed[i] if i < 3 else layer.mlp, post_norms=post_norms, residual_scale=0.7)
        for i, layer in enumerate(spec.layers)
    )
    spec = replace(spec, layers=layers)
    return Model(spec, on(device, random_weights(spec, 3, dtype, gain=1.5)))


def fed_uncaptured(model: Model, cache: Cache, tokens: Sequence[int], captured: object) -> Tensor:
    """One token a row (-1: none) through ``captured``, a CapturedStep made without a capture: logits [B, V]."""
    counts = [int(t >= 0) for t in tokens]
    step = cache.begin(1, counts, [[t] if t >= 0 else [] for t in tokens])
    settled = tuple(rope.settled(model.spec.max_length) for rope in model.decoder.ropes)
    captured.replay(step, [max(t, 0) for t in tokens], settled)  # type: ignore[attr-defined]
    step.extended.update(range(len(cache.layers)))
    cache.commit(step)
    return captured.logits[: len(tokens)].clone()  # type: ignore[attr-defined, no-any-return]
