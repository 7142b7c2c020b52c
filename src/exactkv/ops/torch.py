"""The arithmetic on PyTorch's own kernels, on any device. Signatures and meaning: see reference.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.cache import AttentionPattern, KVSegment, KVView, RowView, visible
from exactkv.ops import reference
from exactkv.ops.linear import linear

QUERY_BLOCK = 256
"""Queries that share one mask where a mask is needed: bounds the mask's size and the work on unseen keys."""
READ_BLOCK = 1024
"""Quantized rows that are made dense at once for a single query."""


def attend(
    q: Tensor, view: KVView, scale: float, softcap: float | None = None, sink_logits: Tensor | None = None
) -> Tensor:
    """See reference.attend. Work is proportional to what is visible; no mask is made for a single query."""
    if view.pattern.anchors > 0 and view.pattern.bound is not None and q.shape[2] > 1:
        return reference.attend(q, view, scale, softcap, sink_logits)
    plain = softcap is None and sink_logits is None
    rows = []
    for r, row in enumerate(view.rows):
        queries = q[r : r + 1, :, : row.queries]
        if row.queries == 0:
            out = q.new_zeros((1, *q.shape[1:3], 0))
        elif row.queries == 1:
            out = _attend_one(queries, row, scale, softcap, sink_logits)
        elif _has_kernels(q):
            out = _attend_fused(queries, view.pattern, row, scale, softcap, sink_logits)
        elif plain:
            out = _attend_many(queries, view.pattern, row, scale)
        else:
            out = _attend_explicitly(queries, view.pattern, row, scale, softcap, sink_logits)
        rows.append(out)
    if len(rows) == 1 and view.rows[0].queries == q.shape[2]:
        return rows[0]
    size = max(out.shape[3] for out in rows) or q.shape[3]
    padded = q.new_zeros((q.shape[0], q.shape[1], q.shape[2], size))
    for r, (row, out) in enumerate(zip(view.rows, rows, strict=True)):
        if row.queries:
            padded[r, :, : row.queries] = out[0]
    return padded


def _attend_one(q: Tensor, row: RowView, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """One query [1, Hq, 1, D], which sees every key of the view. A group's query heads act as queries of one head."""
    grouped = q.reshape(1, row.segments[0].heads, -1, q.shape[3])
    segments = _in_blocks(row.segments)
    if len(segments) == 1 and softcap is None and sinks is None:
        k, v = (segments[0].read(part)[None] for part in ("k", "v"))
        out = F.scaled_dot_product_attention(grouped, k, v, scale=scale)
        return out.reshape(1, q.shape[1], 1, -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = [grouped.to(dtype) @ s.read("k")[None].to(dtype).transpose(2, 3) for s in segments]
    sizes = [s.shape[3] for s in scores]
    weights = _softmax(scale * torch.cat(scores, dim=3), softcap, sinks).split(sizes, dim=3)
    parts_out = [w @ s.read("v")[None].to(dtype) for w, s in zip(weights, segments, strict=True)]
    return torch.stack(parts_out).sum(0).to(q.dtype).reshape(1, q.shape[1], 1, -1)


def _in_blocks(segments: Sequence[KVSegment]) -> list[KVSegment]:
    """The same rows, where reading copies them in segments of at most READ_BLOCK: copies then stay in the processor's
    cache, and there is never one of all rows."""
    cut = []
    for s in segments:
        size = READ_BLOCK if s.copies else s.rows
        cut += [s.narrow(low, min(low + size, s.rows)) for low in range(0, s.rows, size)]
    return cut


def _softmax(scores: Tensor, softcap: float | None, sinks: Tensor | None, hidden: Tensor | None = None) -> Tensor:
    """Weights of the keys from ``scores`` [1, H, group·count, n], which are overwritten. A sink is one more column,
    cut off again. ``hidden`` [count, n]: True where a query does not see a key."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores.unflatten(2, (-1, hidden.shape[0])).masked_fill_(hidden, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=3)
    column = sinks.to(scores.dtype).reshape(scores.shape[1], -1, 1)  # [H, group, 1]
    column = column.repeat_interleave(scores.shape[2] // column.shape[1], dim=1)[None]
    return torch.softmax(torch.cat((scores, column), dim=3), dim=3)[..., :-1]


def _keys_and_values(row: RowView) -> tuple[Tensor, Tensor]:
    """All of a row's keys and values; their positions are contiguous."""
    if len(row.segments) == 1:
        return row.segments[0].read("k"), row.segments[0].read("v")
    keys, values = (torch.cat([s.read(part) for s in row.segments], dim=1) for part in ("k", "v"))
    return keys, values


def _attend_explicitly(
    q: Tensor, pattern: AttentionPattern, row: RowView, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Queries [1, Hq, count, D], in blocks of QUERY_BLOCK, where SDPA has not the softmax that is wanted."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = (t.to(dtype) for t in _keys_and_values(row))
    first_key, out = row.segments[0].position, []
    for start in range(row.start, row.start + row.queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, row.start + row.queries)
        low = pattern.first_visible(start)
        block = q[:, :, start - row.start : end - row.start].to(dtype)
        grouped = block.reshape(1, keys.shape[0], -1, q.shape[3])  # [1, H, group·count, D]
        k, v = (t[None, :, low - first_key : end - first_key] for t in (keys, values))
        seen = visible(pattern, torch.arange(start, end, device=q.device), torch.arange(low, end, device=q.device))
        weights = _softmax((grouped @ k.transpose(2, 3)).mul_(scale), softcap, sinks, ~seen)
        out.append((weights @ v).reshape(1, q.shape[1], end - start, -1).to(q.dtype))
    return torch.cat(out, dim=2)


def _attend_many(q: Tensor, pattern: AttentionPattern, row: RowView, scale: float) -> Tensor:
    """Queries [1, Hq, count, D], in blocks; positions of the keys are contiguous."""
    first_key, (keys, values) = row.segments[0].position, _keys_and_values(row)
    blocks = []
    for start, end, causal in query_blocks(pattern, row.start, row.start + row.queries):
        low = pattern.first_visible(start)
        k, v = (t[None, :, low - first_key : end - first_key] for t in (keys, values))
        mask = None
        if not causal:
            queries = torch.arange(start, end, device=q.device)
            mask = visible(pattern, queries, torch.arange(low, end, device=q.device))
        block = q[:, :, start - row.start : end - row.start]
        blocks.append(
            F.scaled_dot_product_attention(block, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _has_kernels(x: Tensor) -> bool:
    """Whether there are Triton kernels for what holds ``x``: on CUDA, in half precision."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and importlib.util.find_spec("triton") is not None


def _attend_fused(
    q: Tensor, pattern: AttentionPattern, row: RowView, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Queries [1, Hq, count, D] in one kernel."""
    from exactkv.ops.triton import launch

    keys, values = _keys_and_values(row)
    return launch.flash(q[0], keys, values, pattern, row.start, row.segments[0].position, scale, softcap, sinks)[None]


def query_blocks(pattern: AttentionPattern, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Cut the queries [start, end) into blocks (from, to, causal). A causal block sees no key before its own
    first query and every one from there up to each query, so that it needs no mask."""
    while start < end:
        causal = pattern.first_visible(start) == start
        if causal:
            last = pattern.last_query(start)
            stop = end if last is None else min(end, last + 1)
        else:
            stop = min(end, start + QUERY_BLOCK)
            if pattern.restart(stop - 1) > start:
                stop = pattern.restart(stop - 1)
        yield start, stop, causal
        start = stop


def experts(
    x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See reference.experts. Reads the chosen experts' weights only, each once."""
    if _has_kernels(x) and gate_up_bias is None and down_bias is None:
        return _experts_grouped(x, chosen, gate_up, down, activation)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for e in torch.unique(chosen).tolist():
        rows = torch.nonzero(chosen == e, as_tuple=True)
        both = linear(x[rows], gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        gate, up = both.chunk(2, dim=-1)
        out[rows] = linear(gated(gate, up, activation), down[e], None if down_bias is None else down_bias[e])
    return out


def _experts_grouped(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """The same as one product of groups each, of inputs sorted by expert; the host waits for nothing."""
    by_expert, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    inputs = x[order // x.shape[1], order % x.shape[1]]
    gate, up = F.grouped_mm(inputs, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    results = F.grouped_mm(gated(gate, up, activation), down.transpose(1, 2), offs=ends)
    return torch.empty_like(results).index_copy_(0, order, results).view(x.shape)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See reference.gated."""
    if activation == "clamped_swiglu":
        return reference.gated(gate, up, activation)
    return activate(gate, activation).mul_(up)


def activate(x: Tensor, activation: str) -> Tensor:
    """See reference.activate."""
    if activation in ("relu", "relu2"):
        positive = F.relu(x)
        return positive if activation == "relu" else positive.square_()
    if activation == "quick_gelu":
        return torch.sigmoid(1.702 * x).mul_(x)
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


top_experts = reference.top_experts
