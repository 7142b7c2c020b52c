"""One layer's attention for one token a row: q/k norm, rope, cache write, attention over live rows, in one kernel.

Work is split over the rows that the query sees (flash decoding, Dao et al. 2023): each program takes a share of them,
for all query heads that read one key head, and the last program of a head to be done combines the shares.
"""

import triton
import triton.language as tl


@triton.jit
def turned(
    at, norm, cos, sin, column, inside, EPS, D: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Heads read from the pointers ``at`` (to a head's first number), normed with the weights at ``norm`` and rotated:
    float32 [..., columns]. A pair's partner is read a second time rather than moved between threads."""
    value = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(value * value, axis=1) / D
        rate = tl.rsqrt(mean + EPS)[:, None]
        value = value * rate * tl.load(norm + column, mask=inside, other=0.0)
    if ROPE > 0:
        if INTERLEAVED:
            partner = column ^ 1
        else:
            partner = tl.where(column < ROPE // 2, column + ROPE // 2, column - ROPE // 2)
        partner = tl.where(column < ROPE, partner, column)
        other = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            other = other * rate * tl.load(norm + partner, mask=inside, other=0.0)
        value = value * tl.load(cos + column, mask=column < WIDE, other=1.0)
        value += other * tl.load(sin + column, mask=column < WIDE, other=0.0)
    return value


@triton.jit
def finished(best, total, mixed, sinks, first_head, member, GROUP: tl.constexpr, SINKS: tl.constexpr):
    """The sum over keys divided by that of their weights, a sink's weight among them."""
    if SINKS:
        sink = tl.load(sinks + first_head + member, mask=member < GROUP, other=float("-inf")).to(tl.float32)
        total += tl.exp(sink - best)
    return mixed / total[:, None]


@triton.jit
def attend(
    qkv, norm, cos, sin, positions, counts, spans, addresses, sinks, shares, stats, done, out, scale, softcap, eps,
    heat, floor_scale, first_position,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SEGMENTS: tl.constexpr, ROPE: tl.constexpr, WIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    TEMPERATURE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [rows, HEADS, SPLITS]. ``qkv`` [B, (HEADS · GROUP + 2 · HEADS) · D] before norm and rope; ``out``
    [B, HEADS · GROUP · D]. ``norm`` [HEADS · GROUP + HEADS, D]. ``cos``, ``sin`` [B, WIDE]. Tables: cache/tables.py.
    ``shares`` [B, HEADS, SPLITS, GROUP, D] and ``stats`` [B, HEADS, 2, GROUP, SPLITS]: what programs leave for each
    other; ``done`` [B, HEADS]: how many have, 0 between launches. An idle row's result is 0 and nothing of it is
    written. The new row takes part as it is stored, and is never read from memory. ``heat``, ``floor_scale``,
    ``first_position``: of a query temperature (spec.QueryTemperature).
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = out.dtype.element_ty
    member, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    used_column = column < D
    inside = (member[:, None] < GROUP) & used_column[None, :]
    place = (row * HEADS * GROUP + head * GROUP + member)[:, None] * D + column[None, :]
    span, address = spans + row * SEGMENTS * 3, addresses + row * SEGMENTS * 2
    rows, index, capacity = tl.load(span).to(tl.int32), tl.load(span + 1), tl.load(span + 2)
    key_base, value_base = tl.load(address), tl.load(address + 1)
    segments = tl.where(tl.load(positions + row) >= 0, tl.load(counts + row * 2), 0)
    held = tl.maximum(tl.load(counts + row * 2 + 1).to(tl.int32) - 1, 0)  # without the new row
    share = tl.cdiv(tl.cdiv(held, SPLITS), BLOCK) * BLOCK
    used = tl.maximum(tl.cdiv(held, tl.maximum(share, 1)), 1)
    begin, end, before = split * share, tl.minimum(split * share + share, held), 0
    if segments == 0:
        if split == 0:
            tl.store(out + place, tl.zeros((BLOCK_M, BLOCK_D), dtype), mask=inside)
    elif split < used:
        first = qkv + row * (HEADS * GROUP + 2 * HEADS) * D
        cos_at, sin_at = cos + row * WIDE, sin + row * WIDE
        q_at = first + (head * GROUP + member)[:, None] * D
        q_norm = norm + (head * GROUP + member)[:, None] * D
        q = turned(q_at, q_norm, cos_at, sin_at, column[None, :], inside, eps, D, ROPE, INTERLEAVED, NORM, WIDE)
        if TEMPERATURE:
            steps = tl.floor((tl.load(positions + row).to(tl.float32) + first_position) / floor_scale)
            q = q * (1.0 + heat * tl.log(1.0 + steps))
        q = q.to(dtype)
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if split == 0:
            one = tl.arange(0, 1)[:, None]
            k_at = first + (HEADS * GROUP + head + one) * D
            k_norm = norm + (HEADS * GROUP + head + one) * D
            k = turned(k_at, k_norm, cos_at, sin_at, column[None, :], used_column[None, :], eps, D, ROPE,
                       INTERLEAVED, NORM, WIDE)  # fmt: skip
            k = tl.sum(k, axis=0).to(dtype)
            v = tl.load(first + (HEADS * GROUP + HEADS + head) * D + column, mask=used_column, other=0.0)
            last = spans + (row * SEGMENTS + segments - 1) * 3
            to = (head * tl.load(last + 2) + tl.load(last + 1) + tl.load(last) - 1) * D + column
            run = addresses + (row * SEGMENTS + segments - 1) * 2
            tl.store(tl.load(run).to(tl.pointer_type(dtype)) + to, k, mask=used_column)
            tl.store(tl.load(run + 1).to(tl.pointer_type(dtype)) + to, v, mask=used_column)
            best = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
            if SOFTCAP:
                best = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * best / softcap)))
            total += 1.0
            mixed += v.to(tl.float32)[None, :]
        for s in range(0, segments):
            start = (head * capacity + index) * D
            keys = tl.multiple_of(key_base.to(tl.pointer_type(dtype)), 16) + start
            values = tl.multiple_of(value_base.to(tl.pointer_type(dtype)), 16) + start
            low, high = tl.maximum(begin - before, 0), tl.minimum(end - before, rows)
            for block in range(low, high, BLOCK):
                at = block + tl.arange(0, BLOCK)
                key = tl.load(keys + at[None, :] * D + column[:, None],
                              mask=(at[None, :] < high) & used_column[:, None], other=0.0)  # fmt: skip
                value = tl.load(values + at[:, None] * D + column[None, :],
                                mask=(at[:, None] < high) & used_column[None, :], other=0.0)  # fmt: skip
                score = tl.dot(q, key, input_precision=PRECISION) * scale
                if SOFTCAP:
                    score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap)))
                score = tl.where(at[None, :] < high, score, float("-inf"))
                greater = tl.maximum(best, tl.max(score, axis=1))
                weights = tl.exp(score - greater[:, None])
                kept = tl.exp(best - greater)
                total = total * kept + tl.sum(weights, axis=1)
                mixed = mixed * kept[:, None]
                mixed += tl.dot(weights.to(dtype), value, input_precision=PRECISION)
                best = greater
            before += rows
            span, address, more = span + 3, address + 2, s + 1 < segments
            rows = tl.load(span, mask=more, other=0).to(tl.int32)
            index, capacity = tl.load(span + 1, mask=more, other=0), tl.load(span + 2, mask=more, other=0)
            key_base = tl.load(address, mask=more, other=0)
            value_base = tl.load(address + 1, mask=more, other=0)
        if used == 1:
            result = finished(best, total, mixed, sinks, head * GROUP, member, GROUP, SINKS)
            tl.store(out + place, result.to(dtype), mask=inside)
        else:
            pair = row * HEADS + head
            left = ((pair * SPLITS + split) * GROUP + member)[:, None] * D + column[None, :]
            tl.store(shares + left, mixed, mask=inside)
            stat = (pair * 2 * GROUP + member) * SPLITS + split
            tl.store(stats + stat, best, mask=member < GROUP)
            tl.store(stats + stat + GROUP * SPLITS, total, mask=member < GROUP)
            tl.debug_barrier()
            if tl.atomic_add(done + pair, 1, sem="acq_rel") == used - 1:
                tl.store(done + pair, 0)
                part = tl.arange(0, SPLITS)
                some = (member[:, None] < GROUP) & (part[None, :] < used)
                all_stats = (pair * 2 * GROUP + member)[:, None] * SPLITS + part[None, :]
                bests = tl.load(stats + all_stats, mask=some, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(stats + all_stats + GROUP * SPLITS, mask=some, other=0.0, cache_modifier=".cg")
                top = tl.where(member < GROUP, tl.max(bests, axis=1), 0.0)
                bottom = tl.sum(totals * tl.exp(bests - top[:, None]), axis=1)
                if SINKS:
                    sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=float("-inf"))
                    bottom += tl.exp(sink.to(tl.float32) - top)
                for m in tl.static_range(GROUP):
                    best_m = tl.load(
                        stats + (pair * 2 * GROUP + m) * SPLITS + part,
                        mask=part < used,
                        other=float("-inf"),
                        cache_modifier=".cg",
                    )
                    top_m = tl.sum(tl.where(member == m, top, 0.0), axis=0)
                    bottom_m = tl.sum(tl.where(member == m, bottom, 0.0), axis=0)
                    left_m = ((pair * SPLITS + part) * GROUP + m)[:, None] * D + column[None, :]
                    mixed_m = tl.load(shares + left_m, mask=(part[:, None] < used) & used_column[None, :], other=0.0,
                                      cache_modifier=".cg")  # fmt: skip
                    result_m = tl.sum(mixed_m * tl.exp(best_m - top_m)[:, None], axis=0) / bottom_m
                    tl.store(out + (row * HEADS * GROUP + head * GROUP + m) * D + column, result_m.to(dtype),
                             mask=used_column)  # fmt: skip
