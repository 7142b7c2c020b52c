"""The arithmetic on PyTorch's own kernels, on any device. Signatures and meaning: see reference.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from exactkv.cache import AttentionPattern, KVView, RowView, visible
from exactkv.ops import reference
from exactkv.ops.linear import linear

QUERY_BLOCK = 256
"""Queries that share one mask where a mask is needed: bounds the mask's size and the work on unseen keys."""


def attend(
    q: Tensor, view: KVView, scale: float, softcap: float | None = None, sink_logits: Tensor | None = None
) -> Tensor:
    """See reference.attend. Work is proportional to what is visible; no mask is made for a single query."""
    anchored = view.pattern.anchors > 0 and view.pattern.bound is not None
    if softcap is not None or sink_logits is not None or (anchored and q.shape[2] > 1):
        return reference.attend(q, view, scale, softcap, sink_logits)
    rows = []
    for r, row in enumerate(view.rows):
        if row.queries == 0:
            out = q.new_zeros((1, *q.shape[1:3], 0))
        elif row.queries == 1:
            out = _attend_one(q[r, :, :1], row, scale)
        else:
            out = _attend_many(q[r : r + 1, :, : row.queries], view.pattern, row, scale)
        rows.append(out)
    if len(rows) == 1 and view.rows[0].queries == q.shape[2]:
        return rows[0]
    size = max(out.shape[3] for out in rows) or q.shape[3]
    padded = q.new_zeros((q.shape[0], q.shape[1], q.shape[2], size))
    for r, (row, out) in enumerate(zip(view.rows, rows, strict=True)):
        if row.queries:
            padded[r, :, : row.queries] = out[0]
    return padded


def _attend_one(q: Tensor, row: RowView, scale: float) -> Tensor:
    """One query [Hq, 1, D], which sees every key of the view. A group's query heads act as queries of one head."""
    heads = row.segments[0].parts["k"].shape[0]
    grouped = q.reshape(1, heads, q.shape[0] // heads, q.shape[2])
    if len(row.segments) == 1:
        parts = row.segments[0].parts
        out = F.scaled_dot_product_attention(grouped, parts["k"][None], parts["v"][None], scale=scale)
        return out.reshape(1, q.shape[0], 1, -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = [grouped.to(dtype) @ s.parts["k"][None].to(dtype).transpose(2, 3) for s in row.segments]
    sizes = [s.shape[3] for s in scores]
    weights = torch.softmax(scale * torch.cat(scores, dim=3), dim=3).split(sizes, dim=3)
    parts_out = [w @ s.parts["v"][None].to(dtype) for w, s in zip(weights, row.segments, strict=True)]
    return torch.stack(parts_out).sum(0).to(q.dtype).reshape(1, q.shape[0], 1, -1)


def _attend_many(q: Tensor, pattern: AttentionPattern, row: RowView, scale: float) -> Tensor:
    """Queries [1, Hq, count, D], in blocks; positions of the keys are contiguous."""
    first_key = row.segments[0].position
    if len(row.segments) == 1:
        keys, values = row.segments[0].parts["k"], row.segments[0].parts["v"]
    else:
        keys = torch.cat([s.parts["k"] for s in row.segments], dim=1)
        values = torch.cat([s.parts["v"] for s in row.segments], dim=1)
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


def experts(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """See reference.experts. Reads the chosen experts' weights only, each once."""
    flat, index = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    out = torch.empty_like(flat)
    for e in torch.unique(index).tolist():
        rows = torch.nonzero(index == e).squeeze(1)
        gate, up = linear(flat[rows], gate_up[e]).chunk(2, dim=-1)
        out[rows] = linear(gated(gate, up, activation), down[e])
    return out.view_as(x)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See reference.gated."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


top_experts = reference.top_experts
