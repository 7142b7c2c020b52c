"""What lies between the matrix products of a decode step. One program a row, numbers computed in float32."""

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """reference.activate, in float32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))  # tanh t = 1 - 2 / (1 + exp 2t)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "quick_gelu":
        return x / (1.0 + tl.exp(-1.702 * x))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def begin(
    tokens, chosen, positions, embedding, x, scale, freqs, amplitudes, cos, sin,
    HIDDEN: tl.constexpr, ROPES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Row b's embedding, and its rotations in each variant. Grid [rows, 1 + ROPES].

    ``tokens`` [B]: below 0 stands for ``chosen`` [B]. ``freqs`` [ROPES, WIDTH]: signed, the sine takes the sign, the
    cosine does not care; 0 for what is not rotated. ``cos``, ``sin`` [ROPES, B, WIDTH].
    """
    row, what = tl.program_id(0), tl.program_id(1)
    if what == 0:
        given = tl.load(tokens + row)
        token = tl.where(given < 0, tl.load(chosen + row), given)
        for first in range(0, HIDDEN, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            value = tl.load(embedding + token * HIDDEN + column, mask=inside, other=0.0)
            if SCALED:
                value = (value.to(tl.float32) * scale).to(value.dtype)
            tl.store(x + row * HIDDEN + column, value, mask=inside)
    else:
        rope = what - 1
        position = tl.maximum(tl.load(positions + row), 0).to(tl.float32)
        column = tl.arange(0, WIDTH)
        frequency = tl.load(freqs + rope * WIDTH + column)
        amplitude = tl.load(amplitudes + rope * WIDTH + column)
        angle = position * frequency
        at = (rope * tl.num_programs(0) + row) * WIDTH + column
        tl.store(cos + at, tl.cos(angle) * amplitude)
        tl.store(sin + at, tl.sin(angle) * amplitude)


@triton.jit
def add_norm(
    x, added, post, norm, out, scale, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x += scale · [norm] added, then out = norm x; each part where it is asked for. Grid [rows]."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    at = row * HIDDEN + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if POST:
            rate = tl.rsqrt(tl.sum(more * more, axis=0) / HIDDEN + eps)
            more = more * rate * tl.load(post + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + scale * more).to(value.dtype)
        tl.store(x + at, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        rate = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
        normed = wide * rate * tl.load(norm + column, mask=inside, other=0.0)
        tl.store(out + at, normed.to(value.dtype), mask=inside)


@triton.jit
def gated(both, out, gate_scale, INNER: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """out = act(gate) · up, of ``both`` [B, 2 · INNER], gate first. Grid [rows, blocks]."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(both + row * 2 * INNER + column, mask=inside, other=0.0).to(tl.float32) * gate_scale
    up = tl.load(both + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + column, (activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def best_of_part(logits, values, places, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The greatest logit of a part of a row and its lowest place; NaN counts as the greatest. Grid [rows, PARTS]."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCABULARY + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    greatest = tl.max(value, axis=0)
    tl.store(values + row * PARTS + part, greatest)
    tl.store(places + row * PARTS + part, tl.min(tl.where(value == greatest, column, VOCABULARY), axis=0))


@triton.jit
def best_of_parts(values, places, chosen, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest place of the greatest value of all parts. Grid [rows]."""
    row = tl.program_id(0)
    part = tl.arange(0, WIDTH)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    place = tl.load(places + row * PARTS + part, mask=part < PARTS, other=2147483647)
    greatest = tl.max(value, axis=0)
    tl.store(chosen + row, tl.min(tl.where(value == greatest, place, 2147483647), axis=0).to(tl.int64))
