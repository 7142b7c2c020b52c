"""The formula of what a call must read and multiply, beside what the decoder holds and counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from exactkv.bench.work import Formula, reached
from exactkv.cache import AttentionPattern, visible
from exactkv.models.parameters import parameters
from exactkv.models.shapes import shape_names, shape_spec
from exactkv.ops import REFERENCE
from tests.tiny import FULL, chunk, tiny_llama4, tiny_model, window, with_ops

PATTERNS = [FULL, window(5), chunk(8), window(4, anchors=2), chunk(6, anchors=3)]


def test_the_weights_that_a_step_reads_are_those_that_are_held() -> None:
    model = tiny_model([FULL, window(4)], torch.float32)
    held = model.decoder.weights
    row = held["embedding.weight"][0].nbytes
    expected = sum(w.nbytes for n, w in held.items() if n != "embedding.weight")
    formula = Formula(model.spec, model.dtype)
    for batch in (1, 3):
        assert formula.call(batch, 7, 1, "last").weight_bytes == expected + batch * row
    assert Formula(model.spec, torch.bfloat16).call(1, 7, 1, "last").weight_bytes == (expected + row) / 2


def test_a_tied_head_is_read_whole() -> None:
    spec = shape_spec("smollm2-135m", 2)
    assert spec.tied_head
    expected = sum(prod(p.shape) for p in parameters(spec).values()) * 2
    assert Formula(spec, torch.bfloat16).call(1, 0, 1, "last").weight_bytes == expected


def test_only_the_chosen_experts_are_read() -> None:
    model = tiny_llama4(8)
    experts = {n: w for n, w in model.decoder.weights.items() if ".experts." in n}
    moe = next(layer.mlp for layer in model.spec.layers if layer.mlp.__class__.__name__ == "MoeSpec")
    assert experts and (moe.num_experts, moe.top_k) == (4, 1)  # type: ignore[union-attr]
    rest = sum(w.nbytes for n, w in model.decoder.weights.items() if n not in experts and n != "embedding.weight")
    one = sum(w.nbytes for w in experts.values()) / 4
    row = model.decoder.weights["embedding.weight"][0].nbytes
    formula = Formula(model.spec, model.dtype)
    assert formula.call(1, 0, 1, "last").weight_bytes == pytest.approx(rest + row + one)
    assert formula.call(2, 0, 1, "last").weight_bytes == pytest.approx(rest + 2 * row + one * reached(4, 1, 2))
    assert formula.call(500, 0, 1, "last").weight_bytes == pytest.approx(rest + row * 97 + 4 * one)


def test_the_experts_that_tokens_reach() -> None:
    """By all choices of one of 4 experts that 3 tokens have."""
    choices = [len({a, b, c}) for a in range(4) for b in range(4) for c in range(4)]
    assert reached(4, 1, 3) == pytest.approx(sum(choices) / len(choices))
    assert reached(16, 4, 1) == pytest.approx(4) and reached(8, 2, 0) == 0 and reached(8, 8, 1) == 8


@given(st.sampled_from(PATTERNS), st.integers(0, 30), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=60)
def test_rows_and_pairs_are_those_that_masks_show(pattern: AttentionPattern, start: int, width: int, rows: int) -> None:
    """Of two layers, the first for all queries; the last for the last query, as only its logits are wanted."""
    spec = tiny_model([pattern, pattern]).spec
    mask = visible(pattern, torch.arange(start, start + width), torch.arange(start + width))
    formula = Formula(spec, torch.float32)
    row = 2 * 2 * 8 * 4  # k and v, two heads of 8, float32
    for logits, last in (("last", mask[-1:]), ("none", mask[:0])):
        found = formula._of_cache(rows, start, width, logits)
        assert found.cache_bytes == rows * row * int(mask.any(0).sum() + last.any(0).sum())
        assert found.flops == rows * 2 * 4 * 2 * 8 * int(mask.sum() + last.sum())


def test_decoding_reads_the_rows_that_the_cache_holds() -> None:
    model = tiny_model([FULL, chunk(8), window(5)], torch.float32)
    cache = model.new_cache()
    model([list(range(20))], cache=cache, logits="none")
    step = cache.begin(1, [1], [[3]])
    read = []
    for layer in cache.layers:
        view = layer.extend(step, {n: torch.zeros(1, h, 1, d) for n, (h, d) in layer.parts.items()})
        read += [t.nbytes for segment in view.rows[0].segments for t in segment.parts.values()]
    assert Formula(model.spec, model.dtype).steps(1, 20, 1).cache_bytes == sum(read)


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False) as counter:
        yield counter


@pytest.mark.parametrize(("batch", "start", "width"), [(1, 0, 1), (3, 9, 1), (2, 0, 17), (1, 5, 8)])
def test_torch_counts_the_products_of_a_step(batch: int, start: int, width: int) -> None:
    """All positions at once on layers that see all, so that nothing is masked away; attention is compared apart, as
    the reference multiplies what the mask then hides."""
    model = with_ops(tiny_model([FULL, FULL], torch.float64), REFERENCE)
    cache = model.new_cache(batch)
    if start:
        model([[1] * start] * batch, cache=cache, logits="none")
    with counted() as counter:
        model([[2] * width] * batch, cache=cache, logits="last")
    formula = Formula(model.spec, model.dtype)
    everything = formula.call(batch, start, width, "last").flops
    hidden = batch * 2 * 4 * 2 * 8 * (width * (width - 1) // 2)  # pairs above the diagonal, of the first layer
    projection = parameters(model.spec)["layers.1.attention.qkv.weight"]
    assert projection.parts is not None
    unwanted = 2 * batch * (width - 1) * projection.parts[0] * projection.shape[1]  # queries of the last layer
    assert counter.get_total_flops() == everything + hidden + unwanted


def test_prompts_and_steps_add_up() -> None:
    formula = Formula(tiny_model([FULL, window(4)]).spec, torch.float32)
    calls = [formula.call(2, 0, 6, "none"), formula.call(2, 6, 6, "none"), formula.call(2, 12, 1, "last")]
    whole = formula.prompt(2, [6, 6, 1])
    assert whole.bytes == sum(c.bytes for c in calls) and whole.flops == sum(c.flops for c in calls)
    steps = formula.steps(2, 13, 5)
    assert steps.bytes == sum(formula.call(2, 13 + i, 1, "last").bytes for i in range(5))


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_has_a_formula(name: str) -> None:
    spec = shape_spec(name)
    formula = Formula(spec, torch.bfloat16)
    one, many = formula.call(1, 4, 1, "last"), formula.call(64, 4, 1, "last")
    whole = sum(prod(p.shape) for p in parameters(spec).values()) * 2
    assert 0 < one.weight_bytes < many.weight_bytes or one.weight_bytes == many.weight_bytes <= whole
    assert many.weight_bytes <= whole and many.flops == pytest.approx(64 * one.flops)
    assert many.cache_bytes == 64 * one.cache_bytes > 0


def test_known_figures() -> None:
    """Llama 3.1 8B: 15.0 GB of weights a step without the embedding, and 128 KiB a token of context."""
    formula = Formula(shape_spec("llama-3.1-8b"), torch.bfloat16)
    found = formula.call(1, 511, 1, "last")
    assert found.weight_bytes == pytest.approx(15.01e9, rel=1e-3) and found.cache_bytes == 512 * 128 * 1024
    assert found.flops == pytest.approx(15.01e9, rel=0.02)  # two a weight of two bytes, and some for attention
