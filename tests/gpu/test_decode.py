"""Decoding by captured steps equals the reference: over growth, windows, chunks, rewinds, forks and ragged batches.

Dead memory is NaN before every step (tests/conftest.py), so that a stale address or a row too many shows.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from exactkv.cache import join
from exactkv.models.decode import greedy
from exactkv.models.model import Model
from exactkv.ops import REFERENCE
from tests.gpu.decoding import PATTERNS, dense_model, mixture_model
from tests.tiny import FULL, random_tokens, tiny_llama4, tiny_model, with_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 5e-6) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


def decoded(model: Model, tokens: list[list[int]], prompt: int, **options: int) -> torch.Tensor:
    """Logits of ``tokens`` after the first ``prompt``, a token a row at a time: [B, T - prompt, V]."""
    cache = model.new_cache(len(tokens), **options)
    given = torch.tensor(tokens)
    if prompt:
        model(given[:, :prompt], cache=cache, logits="none")
    found = []
    for i in range(prompt, given.shape[1]):
        found.append(model(given[:, i : i + 1], cache=cache, logits="last"))
        assert model.decode_path.declined is None
        cache.check_integrity()
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("every_word", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", [0, 7])
def test_steps_equal_one_pass_of_the_reference(every_word, rows, prompt):
    model = dense_model(device="cuda", every_word=every_word)
    tokens = [random_tokens(70, r) for r in range(rows)]
    expected = with_ops(model, REFERENCE)(torch.tensor(tokens))[:, prompt:]
    assert close(decoded(model, tokens, prompt, step=4), expected)
    assert model.decode_path.captures == [1 << (rows - 1).bit_length()]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", ["llama4", "mixture", "mixture with norms after"])
def test_mixtures_equal_one_pass_of_the_reference(kind, rows):
    model = tiny_llama4(8, device="cuda") if kind == "llama4" else mixture_model("cuda", post_norms="norms" in kind)
    tokens = [random_tokens(70, r) for r in range(rows)]
    expected = with_ops(model, REFERENCE)(torch.tensor(tokens))[:, 3:]
    assert close(decoded(model, tokens, 3, step=4), expected, 2e-5)


def test_long_rows_are_shared_out_among_programs():
    model = dense_model(device="cuda", every_word=True)
    tokens = [random_tokens(1500, 1)]
    expected = with_ops(model, REFERENCE)(torch.tensor(tokens))[:, 1490:]
    assert close(decoded(model, tokens, 1490), expected)
    assert close(
        decoded(dense_model([FULL], device="cuda"), tokens, 1490), dense_model([FULL])(tokens)[:, 1490:].cuda()
    )


def test_what_was_captured_equals_what_is_launched():
    from exactkv.models.captured import CapturedStep
    from tests.gpu.decoding import fed_uncaptured

    model = dense_model(device="cuda", every_word=True)
    caches = [model.new_cache(2, step=4), model.new_cache(2, step=4)]
    eager = CapturedStep(model.decoder, caches[0].spec, 2, capture=False)
    for i in range(60):
        fed = [random_tokens(1, 7 * i + r) for r in range(2)]
        found = model(torch.tensor(fed), cache=caches[0], logits="last")
        assert torch.equal(found, fed_uncaptured(model, caches[1], [f[0] for f in fed], eager))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_half_precision_is_as_close_to_float32_as_the_plain_path(dtype, rows):
    rough = dense_model(device="cuda", dtype=dtype, every_word=True)
    tokens = [random_tokens(100, r) for r in range(rows)]
    exact = Model(rough.spec, {n: w.float() for n, w in rough.decoder.weights.items()})(torch.tensor(tokens))[:, 1:]
    found = decoded(rough, tokens, 1).float()
    plain = rough(torch.tensor(tokens))[:, 1:].float()
    assert (found - exact).abs().mean() <= 1.2 * (plain - exact).abs().mean()


def test_ragged_rows_join_leave_fork_and_rewind_between_replays():
    model = dense_model(device="cuda")
    reference = with_ops(model, REFERENCE)
    prompts = [random_tokens(n, n) for n in (3, 30, 11)]
    cache = model.new_cache(3, step=4, slack=3)
    padded = torch.tensor([p + [0] * (30 - len(p)) for p in prompts])
    model(padded, cache=cache, lengths=[3, 30, 11], logits="none")
    cache = join([cache.drop([1]), cache.select([1]).fork(2)])
    assert cache.rewind([2, 11, 30, 28]) == [2, 11, 30, 28]
    for i in range(60):
        if i == 20:
            cache.rewind([n - 2 for n in cache.lengths])
        if i == 30:
            cache = cache.select([3, 0, 0, 2])
        counts = [int((i + r) % 5 != 0) for r in range(4)]
        fed = torch.tensor([random_tokens(1, 50 * i + r) for r in range(4)])
        logits = model(fed, cache=cache, lengths=counts, logits="last")
        cache.check_integrity()
        for r in range(4):
            if not counts[r]:
                assert torch.isnan(logits[r]).all()
            else:
                assert close(logits[r], reference([cache.tokens(r)])[0, -1])
        if i % 7 == 0:  # a piece of prompt between steps, by the plain path
            model(torch.tensor([random_tokens(3, i + r) for r in range(4)]), cache=cache, logits="none")
    assert model.decode_path.captures == [4]


def test_two_caches_in_turn_and_one_that_is_given_up():
    model = dense_model(device="cuda")
    reference = with_ops(model, REFERENCE)
    caches = [model.new_cache(1, step=4), model.new_cache(1, step=8, slack=5)]
    for i in range(80):
        cache = caches[i % 2]
        logits = model([random_tokens(1, i)], cache=cache, logits="last")
        assert close(logits[0], reference([cache.tokens(0)])[0, -1])
        if i == 41:
            caches[1] = model.new_cache(1, step=4)  # may be given the memory of the old one
    assert model.decode_path.captures == [1]


def test_segments_are_read_where_they_lie():
    model = dense_model([FULL], device="cuda")
    cache = model.new_cache(1, step=4)
    kept = []
    for i in range(12):
        model([random_tokens(6, i)], cache=cache, logits="none")
        kept.append(cache.fork(1))  # each freezes what the row has: a further segment
        logits = model([random_tokens(1, 100 + i)], cache=cache, logits="last")
        assert model.decode_path.declined is None
        assert close(logits[0], with_ops(model, REFERENCE)([cache.tokens(0)])[0, -1])
    for other in kept:
        logits = model([[5]], cache=other, logits="last")
        assert close(logits[0], with_ops(model, REFERENCE)([other.tokens(0)])[0, -1])
    for i in range(12, 20):
        model([random_tokens(6, i)], cache=cache, logits="none")
        kept.append(cache.fork(1))
        logits = model([random_tokens(1, 100 + i)], cache=cache, logits="last")
        assert close(logits[0], with_ops(model, REFERENCE)([cache.tokens(0)])[0, -1])
    assert "segments" in model.decode_path.declined  # and went the plain way


def test_greedy_ahead_of_the_host_is_what_a_token_at_a_time_gives():
    model = dense_model(device="cuda")
    prompt = random_tokens(9)
    caches = [model.new_cache(step=4), model.new_cache(step=4)]
    for cache in caches:
        model([prompt[:-1]], cache=cache, logits="none")
    token, expected = prompt[-1], []
    for _ in range(50):
        token = int(model([[token]], cache=caches[0], logits="last").argmax())
        expected.append(token)
    assert list(greedy(model.decode_path, caches[1], prompt[-1], 50, 4096)) == expected
    assert caches[1].tokens(0) == [*prompt, *expected[:-1]] == caches[0].tokens(0)
    started = greedy(model.decode_path, caches[0], expected[-1], 50, 4096)
    heard = [next(started) for _ in range(3)]
    started.close()  # a step is on its way, and is not committed
    assert caches[0].tokens(0) == [*prompt, *expected, *heard[:-1]]
    caches[0].check_integrity()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: dense_model(dtype=torch.float64, device="cuda"), "float64"),
        (lambda: dense_model(), "CUDA"),
        (lambda: with_ops(dense_model(device="cuda")), "reference"),
    ],
)
def test_what_is_not_captured_says_why_and_goes_the_plain_way(model, why):
    model = model()
    assert why in model.decode_path.unsupported
    cache = model.new_cache()
    logits = model([[3]], cache=cache, logits="last")
    assert why in model.decode_path.declined
    assert close(logits, model([[3]])[:, -1])


def test_heads_of_eight():
    model = tiny_model(PATTERNS, torch.float32, device="cuda")
    tokens = [random_tokens(40)]
    assert close(decoded(model, tokens, 0), with_ops(model, REFERENCE)(torch.tensor(tokens)))
