"""Small models for tests: any mix of attention patterns, random weights, float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exactkv.cache import AttentionPattern, ChunkedAttention, FullAttention, SlidingWindow
from exactkv.models.config import Config
from exactkv.models.families import llama4
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from exactkv.ops import REFERENCE, TORCH, Ops

VOCAB = 97

FULL = FullAttention()


def window(size: int, anchors: int = 0) -> SlidingWindow:
    return SlidingWindow(anchors=anchors, window=size)


def chunk(size: int, anchors: int = 0) -> ChunkedAttention:
    return ChunkedAttention(anchors=anchors, chunk_size=size)


def tiny_model(
    patterns: Sequence[AttentionPattern],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    ops: Ops = TORCH,
    max_length: int = 4096,
    device: str = "cpu",
) -> Model:
    """A decoder of one layer a pattern: width 32, 4 heads, 2 KV heads of size 8, two rope bases."""
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                pattern=pattern,
                num_heads=4,
                num_kv_heads=2,
                head_dim=8,
                scale=8**-0.5,
                rope=RopeSpec(8, 10_000.0 if i % 2 else 500.0, interleaved=bool(i % 2)),
            ),
            mlp=MlpSpec(48, "silu"),
        )
        for i, pattern in enumerate(patterns)
    )
    spec = DecoderSpec("tiny", VOCAB, 32, layers, 1e-6, max_length, tied_head=False)
    return Model(spec, on(device, random_weights(spec, seed, dtype, gain=1.5)), ops=ops)


def on(device: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights on a device (drawn on the CPU, so that they are the same everywhere)."""
    return {name: w.to(device) for name, w in weights.items()}


def with_ops(model: Model, ops: Ops = REFERENCE) -> Model:
    """The same model computed by another implementation."""
    return Model(model.spec, model.decoder.weights, ops=ops)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def tiny_llama4(
    chunk_size: int | None, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu", **changes: object
) -> Model:
    """A tiny random Llama 4: 4 layers, the last without rope and with a query temperature, experts on two."""
    fields = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "attention_chunk_size": chunk_size, "num_local_experts": 4, "interleave_moe_layer_step": 2,
        "floor_scale": 8, "max_position_embeddings": 4096, **changes,
    }  # fmt: skip
    config = Config(fields, "llama4")
    spec = llama4.spec(config)
    config.finish()
    return Model(spec, on(device, random_weights(spec, seed, dtype)))


def fed_in_pieces(model: Model, tokens: torch.Tensor, pieces: Sequence[int], **cache_options: int) -> torch.Tensor:
    """Logits of ``tokens`` [B, T] fed through a new cache in pieces of these sizes."""
    cache = model.new_cache(tokens.shape[0], **cache_options)
    logits, at = [], 0
    for n in pieces:
        logits.append(model(tokens[:, at : at + n], cache=cache))
        cache.check_integrity()
        at += n
    assert at == tokens.shape[1]
    return torch.cat(logits, dim=1)
