"""A mixture of experts for one token a row: the chosen experts' weights are read, nothing else, and the host is not
asked which they are."""

import triton
import triton.language as tl

from exactkv.ops.triton.kernels import activated


@triton.jit
def route(
    logits, bias, chosen, scores, score_scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The TOP greatest of ``logits`` [B, EXPERTS], the lowest of equals first: ``chosen`` [B, TOP] int32, and their
    ``scores`` [B, TOP]. Grid [rows]."""
    row = tl.program_id(0)
    column, place = tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(TOP))
    inside = column < EXPERTS
    logit = tl.load(logits + row * EXPERTS + column, mask=inside, other=float("-inf"))
    if BIAS:
        logit = (logit.to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)).to(logit.dtype)
    logit = logit.to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)  # NaN chooses something, and shows in what comes of it
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(tl.where(inside, score, 0.0), axis=0)
    left = tl.where(inside, logit, float("-inf"))
    free = inside
    found = tl.zeros((triton.next_power_of_2(TOP),), tl.int32)
    taken = tl.zeros((triton.next_power_of_2(TOP),), tl.float32)
    for j in tl.static_range(TOP):
        best = tl.max(tl.where(free, left, float("-inf")), axis=0)
        at = tl.min(tl.where(free & (left == best), column, BLOCK), axis=0)
        found = tl.where(place == j, at, found)
        taken = tl.where(place == j, tl.sum(tl.where(column == at, score, 0.0), axis=0), taken)
        free = free & (column != at)
    if NORMALIZED:
        taken = taken / tl.sum(taken, axis=0)
    tl.store(chosen + row * TOP + place, found, mask=place < TOP)
    tl.store(scores + row * TOP + place, (taken * score_scale).to(scores.dtype.element_ty), mask=place < TOP)


@triton.jit
def up(
    x, weight, chosen, scores, out, INPUTS: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr,
    SCORED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [B, TOP, INNER] = act(gate) · up of each chosen expert, of ``x`` [B, INPUTS], times the score if SCORED.
    ``weight`` [E, 2 · INNER, INPUTS]. Grid [blocks of INNER, B · TOP]."""
    pair = tl.program_id(1)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    base = weight + tl.load(chosen + pair).to(tl.int64) * (2 * INNER * INPUTS)
    at = n[:, None].to(tl.int64) * INPUTS + k[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    other = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        inside = (n[:, None] < INNER) & (first + k[None, :] < INPUTS)
        value = tl.load(x + (pair // TOP) * INPUTS + first + k, mask=first + k < INPUTS, other=0.0).to(tl.float32)
        if INNER % BLOCK_N == 0 and INPUTS % BLOCK_K == 0:
            w = tl.load(base + at + first, eviction_policy="evict_first")
            w_up = tl.load(base + at + first + INNER * INPUTS, eviction_policy="evict_first")
        else:
            w = tl.load(base + at + first, mask=inside, other=0.0)
            w_up = tl.load(base + at + first + INNER * INPUTS, mask=inside, other=0.0)
        gate += w.to(tl.float32) * value[None, :]
        other += w_up.to(tl.float32) * value[None, :]
    gates, ups = tl.sum(gate, axis=1), tl.sum(other, axis=1)
    if SCORED:
        score = tl.load(scores + pair).to(tl.float32)
        gates, ups = gates * score, ups * score
    result = activated(gates, ACTIVATION) * ups
    tl.store(out + pair * INNER + n, result.to(out.dtype.element_ty), mask=n < INNER)


@triton.jit
def down(
    x, weight, chosen, scores, shared, residual, out, scale, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TOP: tl.constexpr, SCORED: tl.constexpr, SHARED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [B, OUTPUTS] = [residual +] scale · (the sum over the chosen of [score ·] W x [+ shared]), with ``x``
    [B, TOP, INPUTS] and ``weight`` [E, OUTPUTS, INPUTS]. Grid [blocks of OUTPUTS, B]."""
    row = tl.program_id(1)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at = n[:, None].to(tl.int64) * INPUTS + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for j in range(TOP):
        pair = row * TOP + j
        base = weight + tl.load(chosen + pair).to(tl.int64) * (OUTPUTS * INPUTS)
        score = 1.0
        if SCORED:
            score = tl.load(scores + pair).to(tl.float32)
        for first in range(0, INPUTS, BLOCK_K):
            inside = (n[:, None] < OUTPUTS) & (first + k[None, :] < INPUTS)
            value = tl.load(x + pair * INPUTS + first + k, mask=first + k < INPUTS, other=0.0).to(tl.float32)
            if OUTPUTS % BLOCK_N == 0 and INPUTS % BLOCK_K == 0:
                w = tl.load(base + at + first, eviction_policy="evict_first")
            else:
                w = tl.load(base + at + first, mask=inside, other=0.0)
            total += w.to(tl.float32) * (value * score)[None, :]
    result = tl.sum(total, axis=1)
    if SHARED:
        result += tl.load(shared + row * OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
    result = result * scale
    if RESIDUAL:
        result += tl.load(residual + row * OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + n, result.to(out.dtype.element_ty), mask=n < OUTPUTS)
