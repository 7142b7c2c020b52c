"""The recurrences: the fast ones equal the reference, whole and cut anywhere; padding and pieces change nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from exactkv.ops import REFERENCE, TORCH

BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
B = 2


def drawn(length, dtype, seed=0):
    """Name -> arguments by token (axis 1), the others by position, and the first state."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.empty(shape, dtype=torch.float64).normal_(generator=g)

    def unit(*shape):
        x = normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)

    t = length
    softplus, sigmoid = torch.nn.functional.softplus, torch.sigmoid
    found = {
        "selective_scan": (
            [normal(B, t, 6), softplus(normal(B, t, 6) - 1), -normal(6, 4).exp(), normal(B, t, 4), normal(B, t, 4),
             normal(6)],
            (0, 1, 3, 4), normal(B, 6, 4),
        ),
        "ssd_scan": (
            [normal(B, t, 4, 3), softplus(3 * normal(B, t, 4)), -normal(4).exp() * 4, normal(B, t, 2, 5),
             normal(B, t, 2, 5), normal(4)],
            (0, 1, 3, 4), normal(B, 4, 3, 5),
        ),
        "gated_delta_rule": (
            [unit(B, t, 3, 5), unit(B, t, 3, 5), normal(B, t, 3, 4), -softplus(3 * normal(B, t, 3)),
             sigmoid(2 * normal(B, t, 3))],
            (0, 1, 2, 3, 4), normal(B, 3, 5, 4),
        ),
        "rg_lru": (
            [normal(B, t, 6), normal(B, t, 6), normal(B, t, 6), normal(6) - 3, torch.zeros(B, t, dtype=torch.bool)],
            (0, 1, 2, 4), normal(B, 6),
        ),
    }  # fmt: skip
    for arguments, _, _ in found.values():
        arguments[:] = [x if x.dtype == torch.bool else x.to(dtype) for x in arguments]
    return {name: (args, by_token, state.to(dtype)) for name, (args, by_token, state) in found.items()}


def in_pieces(op, arguments, by_token, state, pieces):
    at, out = 0, []
    for n in pieces:
        part = [x[:, at : at + n] if i in by_token else x for i, x in enumerate(arguments)]
        given = state.clone()
        y, after = op(*part, state)
        assert torch.equal(state, given), "a state that is given is not written to"
        out.append(y)
        state, at = after, at + n
    return torch.cat(out, dim=1), state


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() if a.numel() else 0.0


NAMES = list(drawn(1, torch.float64))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [0, 1, 2, 5, 31, 33, 64, 65, 150])
def test_fast_equals_reference(name, length, dtype):
    arguments, _, state = drawn(length, dtype)[name]
    expected = getattr(REFERENCE, name)(*arguments, state)
    found = getattr(TORCH, name)(*arguments, state)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert difference(a, b) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_pieces_equal_the_whole(name, dtype):
    arguments, by_token, state = drawn(80, dtype)[name]
    expected = getattr(REFERENCE, name)(*arguments, state)
    cuts = [[1] * 80, [2] * 40, [3] * 26 + [2], [79, 1], [1, 79], [64, 16], [5, 60, 15], [33, 0, 47]]
    for pieces, ops in itertools.product(cuts, (REFERENCE, TORCH)):
        found = in_pieces(getattr(ops, name), arguments, by_token, state, pieces)
        for a, b in zip(found, expected, strict=True):
            assert difference(a, b) <= BOUND[dtype], pieces


@pytest.mark.parametrize("name", NAMES)
def test_a_long_strong_decay_keeps_its_digits(name):
    """Sums of decays over a chunk are large where single differences matter."""
    arguments, _, state = drawn(150, torch.float32)[name]
    if name in ("ssd_scan", "selective_scan"):
        arguments[1][:, :40] = 8.0
        arguments[1][:, 40:] *= 0.01
    elif name == "gated_delta_rule":
        arguments[3][:, :40] = -20.0
        arguments[3][:, 40:] *= 0.01
    wide = [x.double() if x.is_floating_point() else x for x in arguments]
    expected = getattr(REFERENCE, name)(*wide, state.double())
    found = getattr(TORCH, name)(*arguments, state)
    for a, b in zip(found, expected, strict=True):
        assert difference(a[:, 40:] if a.shape[1] == 150 else a, b[:, 40:] if b.shape[1] == 150 else b) <= 1e-5


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution(width, with_bias, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, 9, 5, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(5, width, generator=g, dtype=torch.float64).to(dtype)
    bias = torch.randn(5, generator=g, dtype=torch.float64).to(dtype) if with_bias else None
    rows = torch.cat((x.new_zeros(B, width - 1, 5), x), dim=1)
    padded = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=5)
    whole = padded[..., :9].transpose(1, 2)
    for ops in (REFERENCE, TORCH):
        assert difference(ops.causal_conv(rows, weight, bias), whole) <= BOUND[dtype]
        assert ops.causal_conv(rows[:, : width - 1], weight, bias).shape == (B, 0, 5)
        for n in (1, 2, 3):
            pieces = [ops.causal_conv(rows[:, t : min(t + n, 9) + width - 1], weight, bias) for t in range(0, 9, n)]
            assert difference(torch.cat(pieces, dim=1), whole) <= BOUND[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_passes_from_row_to_row_or_backwards(name):
    """NaN in one row's later tokens, as padding may hold, stays there."""
    arguments, by_token, state = drawn(70, torch.float64)[name]
    expected, _ = getattr(TORCH, name)(*arguments, state)
    for i in by_token:
        if arguments[i].is_floating_point():
            arguments[i][1, 50:] = torch.nan
    found, after = getattr(TORCH, name)(*arguments, state)
    assert not after[0].isnan().any()
    assert difference(found[0], expected[0]) <= 1e-12
