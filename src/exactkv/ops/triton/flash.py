"""Attention for a piece of a prompt: many queries of one row against its contiguous keys (Dao 2023, arXiv 2307.08691).

Work is proportional to what is visible: a block of queries begins at the first key that its first query sees, and only
blocks of keys at an edge of what is visible are masked.
"""

import triton
import triton.language as tl


@triton.jit
def over(
    low, high, q, keys, values, best, total, mixed, at, column, k_row, v_row, first_key, last, scale, softcap,
    reach, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys [low, high) into the running softmax of the queries at ``at`` (indices of keys, as all here)."""
    for first in range(low, high, BLOCK_N):
        step = tl.arange(0, BLOCK_N)
        n = first + step
        key_at = keys + tl.cast(first, tl.int64) * k_row + step[None, :] * k_row + column[:, None]
        value_at = values + tl.cast(first, tl.int64) * v_row + step[:, None] * v_row + column[None, :]
        if MASKED or D != BLOCK_D:
            key = tl.load(key_at, mask=(n[None, :] < last) & (column[:, None] < D), other=0.0)
        else:
            key = tl.load(key_at)
        score = tl.dot(q, key, input_precision=PRECISION) * scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap)))
        score = score * 1.4426950408889634
        if MASKED:
            seen = n[None, :] <= at[:, None]
            if WINDOW:
                seen &= n[None, :] > at[:, None] - reach
            if CHUNK:  # positions, not indices, fall into chunks
                seen &= (n[None, :] + first_key) // reach == (at[:, None] + first_key) // reach
            score = tl.where(seen, score, float("-inf"))
        greater = tl.maximum(best, tl.max(score, axis=1))
        safe = tl.where(greater == float("-inf"), 0.0, greater)
        weights = tl.exp2(score - safe[:, None])
        kept = tl.exp2(best - safe)
        total = total * kept + tl.sum(weights, axis=1)
        if MASKED or D != BLOCK_D:
            value = tl.load(value_at, mask=(n[:, None] < last) & (column[None, :] < D), other=0.0)
        else:
            value = tl.load(value_at)
        mixed = mixed * kept[:, None]
        mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision=PRECISION)
        best = greater
    return best, total, mixed


@triton.jit
def flash(
    q, k, v, sinks, out, scale, softcap, count, start, first_key, reach,
    q_head, q_row, k_head, k_row, v_head, v_row, o_head, o_row,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of queries, Hq]. Query i, of ``count``, stands at ``start`` + i; key j at ``first_key`` + j, up
    to the last query's. ``reach``: the window's or the chunk's size. The heaviest blocks come first."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    m, column = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (m[:, None] < count) & (column[None, :] < D)
    query = tl.load(q + head.to(tl.int64) * q_head + m[:, None].to(tl.int64) * q_row + column[None, :], mask=inside,
                    other=0.0)  # fmt: skip
    keys = k + (head // GROUP).to(tl.int64) * k_head
    values = v + (head // GROUP).to(tl.int64) * v_head
    shift = start - first_key  # index of the key at the first query's position
    at = shift + m
    first = shift + block * BLOCK_M
    final = tl.minimum(first + BLOCK_M, shift + count)  # after the last key that a query of the block sees
    low, clear = 0, 0  # the first key that the first query sees, and the last one
    if WINDOW:
        low = tl.maximum(first - reach + 1, 0)
        clear = tl.maximum(final - reach, 0)
    if CHUNK:
        low = tl.maximum((first + first_key) // reach * reach - first_key, 0)
        clear = tl.maximum((final - 1 + first_key) // reach * reach - first_key, 0)
    low = low // BLOCK_N * BLOCK_N
    # [low, middle) may hold keys that the last queries do not see, [end, final) such as the first do not.
    middle = tl.cdiv(clear, BLOCK_N) * BLOCK_N
    if WINDOW or CHUNK:
        middle = tl.minimum(middle, tl.cdiv(final, BLOCK_N) * BLOCK_N)
    else:
        middle = low
    end = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, middle)
    total = tl.zeros((BLOCK_M,), tl.float32)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if SINKS:
        total += 1.0
        best = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW or CHUNK:
        best, total, mixed = over(
            low, middle, query, keys, values, best, total, mixed, at, column, k_row, v_row, first_key, final, scale,
            softcap, reach, D, BLOCK_D, BLOCK_N, True, WINDOW, CHUNK, SOFTCAP, PRECISION,
        )  # fmt: skip
    best, total, mixed = over(
        middle, end, query, keys, values, best, total, mixed, at, column, k_row, v_row, first_key, final, scale,
        softcap, reach, D, BLOCK_D, BLOCK_N, False, WINDOW, CHUNK, SOFTCAP, PRECISION,
    )  # fmt: skip
    best, total, mixed = over(
        end, final, query, keys, values, best, total, mixed, at, column, k_row, v_row, first_key, final, scale,
        softcap, reach, D, BLOCK_D, BLOCK_N, True, WINDOW, CHUNK, SOFTCAP, PRECISION,
    )  # fmt: skip
    result = mixed / total[:, None]
    tl.store(out + head.to(tl.int64) * o_head + m[:, None].to(tl.int64) * o_row + column[None, :],
             result.to(out.dtype.element_ty), mask=inside)  # fmt: skip
