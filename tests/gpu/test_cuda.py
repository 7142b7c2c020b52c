"""The same engine on a GPU: decoding equals one forward pass there, and what the CPU's reference gives."""

from __future__ import annotations

import pytest
import torch

from exactkv.cache import join
from exactkv.errors import InputError
from exactkv.ops import REFERENCE
from tests.tiny import FULL, chunk, fed_in_pieces, random_tokens, tiny_llama4, tiny_model, window

pytestmark = pytest.mark.gpu

MIXED = [FULL, window(6), chunk(8), window(4, anchors=2)]
MODELS = {
    "mixed": lambda dtype, device: tiny_model(MIXED, dtype, device=device),
    "llama4": lambda dtype, device: tiny_llama4(8, dtype, device=device),
    "full": lambda dtype, device: tiny_model([FULL, FULL], dtype, device=device),
    "window": lambda dtype, device: tiny_model([window(16), FULL, window(300)], dtype, device=device),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("pieces", [[1] * 60, [7] * 8 + [4], [59, 1], [3, 40, 1, 1, 15]])
def test_decode_equals_one_forward_pass(name, dtype, bound, pieces):
    model = MODELS[name](dtype, "cuda")
    tokens = torch.tensor([random_tokens(60, s) for s in range(3)])
    whole = model(tokens)
    assert (fed_in_pieces(model, tokens, pieces) - whole).abs().max() <= bound * whole.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_reference_on_the_cpu(name):
    tokens = torch.tensor([random_tokens(400, s) for s in range(2)])
    model = MODELS[name](torch.float32, "cuda")
    weights = {n: w.cpu() for n, w in model.decoder.weights.items()}
    expected = type(model)(model.spec, weights, ops=REFERENCE)(tokens)
    found = model(tokens).cpu()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_decode_is_as_close_to_float32_as_its_own_forward_pass(name):
    tokens = torch.tensor([random_tokens(60)])
    rough = MODELS[name](torch.bfloat16, "cuda")
    exact = type(rough)(rough.spec, {n: w.float() for n, w in rough.decoder.weights.items()})(tokens)
    whole = (rough(tokens).float() - exact).abs().mean()
    decoded = (fed_in_pieces(rough, tokens, [1] * 60).float() - exact).abs().mean()
    assert decoded <= 1.5 * whole


def test_ragged_rows_join_leave_fork_and_rewind():
    model = tiny_model(MIXED, torch.float64, device="cuda")
    prompts = [random_tokens(n, n) for n in (3, 30, 11)]
    cache = model.new_cache(3, step=4, slack=3)
    padded = torch.tensor([p + [0] * (30 - len(p)) for p in prompts])
    logits = model(padded, cache=cache, lengths=[3, 30, 11])
    assert torch.isnan(logits[0, 3:]).all()
    cache = join([cache.drop([1]), cache.select([1]).fork(2)])
    assert cache.rewind([2, 9, 30, 28]) == [2, 9, 30, 28]
    for i in range(20):
        cache.check_integrity()
        fed = [random_tokens(1, 50 + i + r) for r in range(4)]
        logits = model(torch.tensor(fed), cache=cache, logits="last")
        for r in range(4):
            expected = model([cache.tokens(r)])[0, -1]
            assert (logits[r] - expected).abs().max() <= 1e-11 * expected.abs().max()


def test_a_cpu_cache_is_refused():
    with pytest.raises(InputError, match="device"):
        tiny_model(MIXED, device="cuda")([[1]], cache=tiny_model(MIXED).new_cache())
