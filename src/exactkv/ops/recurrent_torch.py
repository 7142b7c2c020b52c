"""The recurrences on whole stretches of tokens at a time. Signatures and meaning: see recurrent.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_TOKENS = 4
"""So many tokens are done one by one: what a chunk needs to be set up costs more."""
CHUNK = 64
"""Tokens that are done at once where the work within a chunk grows with the square of its length."""
SCAN_CHUNK = 32
"""Tokens whose states are in memory at once."""


def causal_conv(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See recurrent.causal_conv. A sum of K shifted products, which needs no other layout of ``rows``."""
    width = weight.shape[1]
    tokens = rows.shape[1] - width + 1
    out = rows[:, :tokens] * weight[:, 0]
    for k in range(1, width):
        out.addcmul_(rows[:, k : k + tokens], weight[:, k].expand_as(out))
    return out if bias is None else out.add_(bias)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See recurrent.selective_scan. Each channel has decays of its own, so that products of matrices do not help:
    all is done for a chunk at once but the one product and sum a token that carry the state."""
    out = torch.empty_like(x)
    for begin in range(0, x.shape[1], SCAN_CHUNK):
        part = slice(begin, begin + SCAN_CHUNK)
        step = dt[:, part, :, None]  # [B, L, I, 1]
        states = (dt[:, part] * x[:, part]).unsqueeze(-1) * b[:, part, None, :]  # [B, L, I, N]
        state = _carried(torch.exp(step * a), states, state)
        out[:, part] = torch.einsum("blin,bln->bli", states, c[:, part]).add_(d * x[:, part])
    return out, state


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """See recurrent.ssd_scan. Within a chunk as masked attention, between chunks by the state (arXiv 2405.21060,
    section 6)."""
    out = torch.empty_like(x)
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (b, c))
    if x.shape[1] <= FEW_TOKENS:
        for t in range(x.shape[1]):
            decayed = state * torch.exp(dt[:, t] * a)[..., None, None]
            state = decayed.addcmul_((x[:, t] * dt[:, t].unsqueeze(-1)).unsqueeze(-1), b[:, t].unsqueeze(-2))
            out[:, t] = (state @ c[:, t].unsqueeze(-1)).squeeze(-1) + d[:, None] * x[:, t]
        return out, state
    for begin in range(0, x.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        xs, bs, cs = (t[:, part].transpose(1, 2) for t in (x, b, c))  # [B, H, L, P or N]
        steps = dt[:, part].transpose(1, 2)  # [B, H, L]
        within, since, until, through = _decays(steps * a[:, None])
        inputs = xs * steps.unsqueeze(-1)
        y = ((cs @ bs.transpose(2, 3)) * within) @ inputs
        y = y + (cs * since.unsqueeze(-1)) @ state.transpose(2, 3) + d[:, None, None] * xs
        state = through * state + (inputs * until.unsqueeze(-1)).transpose(2, 3) @ bs
        out[:, part] = y.transpose(1, 2)
    return out, state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See recurrent.gated_delta_rule. Within a chunk what each token adds depends on what those before it added: a
    triangular system (arXiv 2412.06464, section 3.3)."""
    out = torch.empty_like(v)
    if q.shape[1] <= FEW_TOKENS:
        for t in range(q.shape[1]):
            decayed = state * torch.exp(decay[:, t])[..., None, None]
            answer = (k[:, t].unsqueeze(-2) @ decayed).squeeze(-2)
            moved = beta[:, t].unsqueeze(-1) * (v[:, t] - answer)
            state = decayed.addcmul_(k[:, t].unsqueeze(-1), moved.unsqueeze(-2))
            out[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
        return out, state
    for begin in range(0, q.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        qs, ks, vs = (t[:, part].transpose(1, 2) for t in (q, k, v))  # [B, H, L, K or V]
        rates = beta[:, part].transpose(1, 2).unsqueeze(-1)  # [B, H, L, 1]
        within, since, until, through = _decays(decay[:, part].transpose(1, 2))
        system = (rates * ks @ ks.transpose(2, 3)) * within  # its diagonal is taken for ones
        wanted = rates * (vs - (ks * since.unsqueeze(-1)) @ state)
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [B, H, L, V]
        y = (qs * since.unsqueeze(-1)) @ state + ((qs @ ks.transpose(2, 3)) * within) @ added
        state = through * state + (ks * until.unsqueeze(-1)).transpose(2, 3) @ added
        out[:, part] = y.transpose(1, 2)
    return out, state


def rg_lru(
    x: Tensor, recurrence: Tensor, gate: Tensor, rate: Tensor, first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See recurrent.rg_lru."""
    log_a = -8.0 * F.softplus(rate) * torch.sigmoid(recurrence)
    scale = torch.where(first.unsqueeze(-1), 1.0, torch.sqrt(1 - torch.exp(2 * log_a)))
    states = scale * torch.sigmoid(gate) * x
    state = _carried(torch.exp(log_a), states, state)
    return states, state


def _carried(decays: Tensor, states: Tensor, state: Tensor) -> Tensor:
    """What each token adds, ``states`` [B, T, ...], becomes the state after it, in place; returns the last."""
    for t in range(states.shape[1]):
        state = states[:, t].addcmul_(decays[:, t], state)
    return state.clone()


def _decays(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For a chunk's ``log_decay`` [B, H, L]: how much decays from after token j until after token i ([.., i, j],
    0 for j > i), from before the chunk until after i, from after j until the chunk's end, and through the whole
    chunk. Sums run in float64: differences of long ones are what is wanted."""
    total = log_decay.to(torch.float64).cumsum(-1)
    later = torch.ones(total.shape[-1:] * 2, dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf)
    end = total[..., -1:]
    within, since, until = (t.to(log_decay.dtype).exp() for t in (between, total, end - total))
    return within, since, until, end.to(log_decay.dtype).exp().unsqueeze(-1)
