"""The fast attention against the reference, over random views: any pattern, segments, ragged rows, poison around."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.cache import ChunkedAttention, FullAttention, KVSegment, KVView, RowView, SlidingWindow, make_storage
from exactkv.ops import REFERENCE, TORCH
from exactkv.ops import torch as torch_ops

HEADS, KV_HEADS, SIZE = 6, 2, 8

patterns = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, window=st.integers(1, 40), anchors=st.sampled_from([0, 0, 3])),
    st.builds(ChunkedAttention, chunk_size=st.integers(1, 40), anchors=st.sampled_from([0, 0, 3])),
)


def make_view(pattern, rows, generator, cuts, dtype=torch.float64):
    """A view of rows (start, count): what a query may see, cut into segments, each inside memory full of NaN."""
    views = []
    for start, count in rows:
        first = pattern.first_visible(start)
        spans = [(0, min(pattern.anchors, first)), (first, start + count)] if pattern.bound else [(0, start + count)]
        segments = []
        for low, high in spans:
            edges = sorted({low, high, *(c for c in cuts if low < c < high)})
            for a, b in itertools.pairwise(edges):
                segments.append(KVSegment(a, {p: inside_nan(b - a, generator, dtype) for p in ("k", "v")}))
        views.append(RowView(start, count, tuple(segments) if count else ()))
    return KVView(pattern, tuple(views))


def inside_nan(count, generator, dtype):
    memory = torch.full((KV_HEADS, count + 5, SIZE), torch.nan, dtype=dtype)
    memory[:, 2 : 2 + count] = torch.randn((KV_HEADS, count, SIZE), dtype=dtype, generator=generator)
    return memory[:, 2 : 2 + count]


@settings(max_examples=150, deadline=None)
@given(
    pattern=patterns,
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 150), max_size=3),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(pattern, rows, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    view = make_view(pattern, rows, generator, cuts)
    width = max(max(count for _, count in rows), 1)
    q = torch.randn((len(rows), HEADS, width, SIZE), dtype=torch.float64, generator=generator)
    for r, (_, count) in enumerate(rows):
        q[r, :, count:] = torch.nan  # padding
    expected = REFERENCE.attend(q, view, 0.3)
    found = TORCH.attend(q, view, 0.3)
    assert not expected.isnan().any(), "padding is 0, and nothing dead was read"
    assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("storage", ["int8", "int4:4"])
@pytest.mark.parametrize("rows", [[(700, 1), (3, 1), (0, 0)], [(40, 60)]])
@pytest.mark.parametrize("pattern", [FullAttention(), SlidingWindow(window=100)], ids=str)
def test_quantized_rows_are_read_in_blocks(pattern, rows, storage, monkeypatch):
    """One query reads so many rows at most at once; what comes out is what the reference makes of all."""
    monkeypatch.setattr(torch_ops, "READ_BLOCK", 64)
    kept = make_storage(storage, torch.float64, torch.device("cpu"), False)
    dense = make_view(pattern, rows, torch.Generator().manual_seed(1), cuts={250, 680})
    most = 0

    def read(parts, part):
        nonlocal most
        out = kept.reader(parts, part)
        most = max(most, out.shape[1])
        return out

    def stored(row):
        return row._replace(segments=tuple(s._replace(parts=kept.stored(s.parts), reader=read, copies=True)
                                           for s in row.segments))  # fmt: skip

    view = dense._replace(rows=tuple(map(stored, dense.rows)))
    width = max(count for _, count in rows)
    q = torch.randn((len(rows), HEADS, width, SIZE), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sinks = torch.randn(HEADS, dtype=torch.float64)
    for options in ({}, {"softcap": 3.0, "sink_logits": sinks}):
        most = 0
        found = TORCH.attend(q, view, 0.3, **options)
        assert width > 1 or 0 < most <= 64
        assert (found - REFERENCE.attend(q, view, 0.3, **options)).abs().max() <= 1e-12
        assert (found - TORCH.attend(q, dense, 0.3, **options)).abs().max() > 1e-4


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rows", [[(700, 1)], [(0, 600)], [(300, 300)], [(700, 1), (3, 1), (0, 0)]])
@pytest.mark.parametrize(
    "pattern", [FullAttention(), SlidingWindow(window=100), ChunkedAttention(chunk_size=128)], ids=str
)
def test_lower_precision_is_close_to_the_exact_result(pattern, rows, dtype, bound):
    generator = torch.Generator().manual_seed(1)
    view = make_view(pattern, rows, generator, cuts={250, 680}, dtype=dtype)
    width = max(count for _, count in rows)
    q = torch.randn((len(rows), HEADS, width, SIZE), generator=generator).to(dtype)
    exact = REFERENCE.attend(q.double(), as_double(view), 0.3)
    found = TORCH.attend(q, view, 0.3)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= bound * exact.abs().max()


def as_double(view):
    rows = tuple(
        row._replace(
            segments=tuple(KVSegment(s.position, {n: t.double() for n, t in s.parts.items()}) for s in row.segments)
        )
        for row in view.rows
    )
    return view._replace(rows=rows)


@settings(max_examples=100, deadline=None)
@given(
    pattern=patterns,
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 150), max_size=3),
    softcap=st.sampled_from([None, 0.7]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_softcap_and_sinks_equal_the_reference(pattern, rows, cuts, softcap, with_sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    view = make_view(pattern, rows, generator, cuts)
    width = max(max(count for _, count in rows), 1)
    q = torch.randn((len(rows), HEADS, width, SIZE), dtype=torch.float64, generator=generator)
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=generator) if with_sinks else None
    for r, (_, count) in enumerate(rows):
        q[r, :, count:] = torch.nan  # padding
    expected = REFERENCE.attend(q, view, 0.3, softcap, sinks)
    found = TORCH.attend(q, view, 0.3, softcap, sinks)
    assert not expected.isnan().any() and (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("pattern", [FullAttention(), SlidingWindow(window=100), ChunkedAttention(chunk_size=128)])
def test_softcap_and_sinks_over_several_blocks(pattern):
    generator = torch.Generator().manual_seed(4)
    view = make_view(pattern, [(70, 600)], generator, cuts={250, 480}, dtype=torch.float32)
    q = torch.randn((1, HEADS, 600, SIZE), generator=generator)
    sinks = torch.randn(HEADS, generator=generator)
    exact = REFERENCE.attend(q.double(), as_double(view), 0.3, 2.0, sinks.double())
    assert (TORCH.attend(q, view, 0.3, 2.0, sinks).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_softcap_and_sinks_are_their_formulas():
    generator = torch.Generator().manual_seed(2)
    view = make_view(FullAttention(), [(4, 1)], generator, cuts=set())
    q = torch.randn((1, HEADS, 1, SIZE), dtype=torch.float64, generator=generator)
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=generator)
    keys, values = (view.rows[0].segments[0].parts[p] for p in ("k", "v"))
    for ops in (REFERENCE, TORCH):
        out = ops.attend(q, view, 0.5, softcap=2.0, sink_logits=sinks)
        for h in range(HEADS):
            scores = 2.0 * torch.tanh(0.5 * keys[h // 3] @ q[0, h, 0] / 2.0)
            weights = scores.exp() / (scores.exp().sum() + sinks[h].exp())
            assert (out[0, h, 0] - weights @ values[h // 3]).abs().max() < 1e-12


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    k=st.integers(1, 3),
    seed=st.integers(0, 99),
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu", "clamped_swiglu"]),
    with_bias=st.booleans(),
)
def test_experts_equal_the_reference(tokens, k, seed, activation, with_bias):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x, gate_up, down = draw(tokens, k, 8), draw(5, 12, 8), draw(5, 8, 6)
    _, chosen = REFERENCE.top_experts(draw(tokens, 5), k)
    biases = (draw(5, 12), draw(5, 8)) if with_bias else ()
    expected = REFERENCE.experts(x, chosen, gate_up, down, activation, *biases)
    assert torch.allclose(TORCH.experts(x, chosen, gate_up, down, activation, *biases), expected, rtol=0, atol=1e-12)


def test_ties_of_a_router_go_to_the_lowest_index():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    assert TORCH.top_experts(logits, 2)[1].tolist() == [[1, 2]]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "clamped_swiglu"])
def test_gated_equals_the_reference(activation):
    gate, up = torch.linspace(-6, 6, 40, dtype=torch.float64).reshape(2, 20)
    expected = REFERENCE.gated(gate, up, activation)
    assert torch.allclose(TORCH.gated(gate, up, activation), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"])
def test_activate_equals_the_reference(activation):
    x = torch.linspace(-6, 6, 40, dtype=torch.float64)
    expected = REFERENCE.activate(x, activation)
    assert torch.allclose(TORCH.activate(x, activation), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (5,), (16,), (17,), (3, 40)])
@pytest.mark.parametrize("size", [(6, 4), (7, 32), (48, 33), (96, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_reference(dtype, bound, rows, size, with_bias):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(size, generator=generator).to(dtype)
    bias = torch.randn(size[0], generator=generator).to(dtype) if with_bias else None
    x = torch.randn((*rows, size[1]), generator=generator).to(dtype)
    exact = REFERENCE.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = TORCH.linear(x, weight, bias)
    assert found.shape == (*rows, size[0]) and found.dtype == dtype
    assert (found.double() - exact).abs().max() <= bound * exact.abs().max()
    assert torch.backends.mkldnn.enabled
