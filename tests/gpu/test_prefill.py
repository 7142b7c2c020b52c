"""Pieces of prompts in half precision, by kernels, are as close to float32 as the plain operations are."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from exactkv.models.model import Model
from exactkv.ops import torch as plain
from tests.gpu.decoding import PATTERNS, dense_model, mixture_model
from tests.tiny import FULL, chunk, fed_in_pieces, random_tokens, tiny_llama4, window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
MODELS = {
    "dense": lambda dtype: dense_model(dtype=dtype, device="cuda"),
    "every word": lambda dtype: dense_model(dtype=dtype, device="cuda", every_word=True),
    "wide windows": lambda dtype: dense_model([FULL, window(130), chunk(150)], dtype=dtype, device="cuda"),
    "llama4": lambda dtype: tiny_llama4(48, dtype, device="cuda"),
    "mixture": lambda dtype: mixture_model("cuda", dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pieces", [[400], [1, 2, 3, 130, 64, 200], [255, 145]])
@pytest.mark.parametrize("kind", MODELS)
def test_pieces_are_as_exact_as_the_plain_way(kind, pieces, dtype, monkeypatch):
    rough = MODELS[kind](dtype)
    tokens = torch.tensor([random_tokens(400)])
    exact = Model(rough.spec, {n: w.float() for n, w in rough.decoder.weights.items()})(tokens)
    found = fed_in_pieces(rough, tokens, pieces, step=16).float()
    monkeypatch.setattr(plain, "_has_kernels", lambda x: False)
    other = rough(tokens).float()
    assert not torch.isnan(found).any()
    assert (found - exact).abs().mean() <= 1.25 * (other - exact).abs().mean()


def test_padded_rows_of_several_lengths():
    rough = dense_model(PATTERNS, torch.bfloat16, "cuda")
    rows = [random_tokens(n, n) for n in (200, 3, 77)]
    padded = torch.tensor([r + [0] * (200 - len(r)) for r in rows])
    cache = rough.new_cache(3, step=8)
    found = rough(padded, cache=cache, lengths=[200, 3, 77])
    cache.check_integrity()
    for r, row in enumerate(rows):
        alone = rough([row])
        assert (found[r, : len(row)] - alone[0]).abs().max() <= 0.05 * alone.abs().max()
