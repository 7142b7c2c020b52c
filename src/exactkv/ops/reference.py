"""The specification of the arithmetic: each function as its formula, slow and plain.

Every faster implementation has the same signature and is tested against this one. Computation runs in
max(float32, the input's dtype).
"""

from __future__ import annotations

import torch
from torch import Tensor

from exactkv.cache import KVView, RowView, visible
from exactkv.ops.packed import dense as unpacked


def attend(
    q: Tensor, view: KVView, scale: float, softcap: float | None = None, sink_logits: Tensor | None = None
) -> Tensor:
    """Attention as a masked softmax: softmax(scale · q kᵀ) v over the visible keys (arXiv 1706.03762, eq. 1).

    ``q`` [B, Hq, T, D]; the view's segments read as "k" [H, n, D] and "v" [H, n, Dv], Hq a multiple of H (query head h
    reads key head h // (Hq / H)). ``softcap`` c replaces a score s by c · tanh(s / c) (Gemma 2).
    ``sink_logits`` [Hq]: one more score a head that takes part in the softmax and has no value (GPT-OSS).
    Returns [B, Hq, T, Dv] in q's dtype; padded positions are 0. A row that no query of the call sees is
    never multiplied.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = []
    for r, row in enumerate(view.rows):
        keys, values, key_positions = (t.to(q.device) for t in dense(row, q))
        query_positions = torch.arange(row.start, row.start + row.queries, device=q.device)
        mask = visible(view.pattern, query_positions, key_positions)  # [count, n]
        seen = mask.any(dim=0)
        keys, values, mask = keys[:, seen].to(dtype), values[:, seen].to(dtype), mask[:, seen]
        group = q.shape[1] // max(1, keys.shape[0])
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)

        scores = scale * (q[r, :, : row.queries].to(dtype) @ keys.transpose(1, 2))  # [Hq, count, n]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sink_logits is not None:
            sinks = sink_logits.to(dtype)[:, None, None].expand(-1, row.queries, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : mask.shape[1]]
        out = (weights @ values).to(q.dtype)  # [Hq, count, Dv]
        rows.append(torch.nn.functional.pad(out, (0, 0, 0, q.shape[2] - row.queries)))
    return torch.stack(rows)


def dense(row: RowView, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row's keys [H, n, D], values [H, n, Dv] and their positions [n], copied out of its segments."""
    if not row.segments:
        none = like.new_zeros((like.shape[1], 0, like.shape[3]))
        return none, none, torch.zeros(0, dtype=torch.int64)
    keys, values = (torch.cat([s.read(part) for s in row.segments], dim=1) for part in ("k", "v"))
    positions = [torch.arange(s.position, s.position + s.rows) for s in row.segments]
    return keys, values, torch.cat(positions)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. ``x`` [..., in], ``weight`` [out, in], packed or not, ``bias`` [out] -> [..., out]."""
    out = x @ unpacked(weight).t()
    return out if bias is None else out + bias


def top_experts(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest of ``logits`` [N, E]: values and indices [N, k], ties broken by the lowest index."""
    values, indices = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def experts(
    x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each token's chosen experts, one gated MLP each.

    ``x`` [N, k, hidden] (an input for each of a token's k experts), ``chosen`` [N, k] int64, ``gate_up``
    [E, 2·inter, hidden] (gate first), ``down`` [E, hidden, inter], biases [E, out]. Returns [N, k, hidden].
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for n in range(x.shape[0]):
        for j in range(x.shape[1]):
            e = int(chosen[n, j])
            both = linear(x[n, j], gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
            gate, up = both.chunk(2)
            out[n, j] = linear(gated(gate, up, activation), down[e], None if down_bias is None else down_bias[e])
    return out


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up, both [..., inter]; "clamped_swiglu" (GPT-OSS, model card, section 2.1) is
    gate · sigmoid(1.702 · gate) · (up + 1), the gate at most 7, up within -7 and 7."""
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return activate(gate, activation) * up


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of each number: "silu", "gelu" (arXiv 1606.08415, section 2), its approximations "gelu_tanh"
    and "quick_gelu" (the same section), "relu", or "relu2", max(x, 0)² (arXiv 2109.08668, section 3)."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu2":
        return torch.relu(x) ** 2
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    raise ValueError(f"activation {activation!r}")
