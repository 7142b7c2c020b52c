"""The specification of recurrences: each token by token, as its formula.

Every faster implementation (recurrent_torch.py) has the same signature and is tested against this one, whole and in
pieces. States are in the compute dtype, max(float32, the model's), and so is all that is done here; a state that is
given is not written to. B rows of T tokens each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each channel by itself over its newest K tokens: y_t = Σ_k w_k · x_(t-K+1+k) + b.

    ``rows`` [B, K - 1 + T, C]: the T tokens after the K - 1 that came before them, zeros before the first;
    ``weight`` [C, K], ``bias`` [C]. Returns [B, T, C].
    """
    width = weight.shape[1]
    out = []
    for t in range(rows.shape[1] - width + 1):
        y = (rows[:, t : t + width] * weight.t()).sum(1)
        out.append(y if bias is None else y + bias)
    return _stacked(out, rows[:, width - 1 :])


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba's selective state space (arXiv 2312.00752, eq. 2 and 4, with B discretized as Δ · B):

    h_t = exp(Δ_t · A) · h_(t-1) + Δ_t · B_t · x_t,  y_t = C_t · h_t + D · x_t

    ``x``, ``dt`` [B, T, I]; ``a`` [I, N], negative; ``b``, ``c`` [B, T, N]; ``d`` [I]; ``state`` [B, I, N].
    Returns y [B, T, I] and the state after the last token.
    """
    out = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        state = torch.exp(step * a) * state + step * b[:, t, None, :] * x[:, t, :, None]
        out.append((state * c[:, t, None, :]).sum(-1) + d * x[:, t])
    return _stacked(out, x), state


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba-2's state space (arXiv 2405.21060, section 2.1 and 7): as Mamba's, with one decay a head.

    h_t = exp(Δ_t · A) · h_(t-1) + Δ_t · x_t B_tᵀ,  y_t = h_t C_t + D · x_t

    ``x`` [B, T, H, P]; ``dt`` [B, T, H]; ``a`` [H], negative; ``b``, ``c`` [B, T, G, N], H a multiple of G (head h
    reads group h // (H / G)); ``d`` [H]; ``state`` [B, H, P, N]. Returns y [B, T, H, P] and the state after the
    last token.
    """
    out = []
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (b, c))  # [B, T, H, N]
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = torch.exp(step * a[:, None, None]) * state + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        out.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return _stacked(out, x), state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464, eq. 10): the memory decays, then what it answers to a key is moved
    by β of the way to the value.

    S_t = α_t · S_(t-1) + k_t (β_t · (v_t - (α_t · S_(t-1))ᵀ k_t))ᵀ,  y_t = S_tᵀ q_t,  α = exp(decay)

    ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V]; ``decay`` (of 0 or less), ``beta`` [B, T, H]; ``state``
    [B, H, K, V]. Returns y [B, T, H, V] and the state after the last token.
    """
    out = []
    for t in range(q.shape[1]):
        state = torch.exp(decay[:, t, :, None, None]) * state
        answer = (state * k[:, t, :, :, None]).sum(2)
        moved = beta[:, t, :, None] * (v[:, t] - answer)
        state = state + k[:, t, :, :, None] * moved[:, :, None, :]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return _stacked(out, v), state


def rg_lru(
    x: Tensor, recurrence: Tensor, gate: Tensor, rate: Tensor, first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Griffin's real-gated linear recurrent unit (arXiv 2402.19427, eq. 1 to 4, c = 8):

    log a_t = -8 · softplus(Λ) · σ(r_t),  h_t = a_t · h_(t-1) + sqrt(1 - a_t²) · σ(i_t) · x_t

    ``x``, ``recurrence`` r, ``gate`` i [B, T, C]; ``rate`` Λ [C]; ``first`` bool [B, T], true at a row's first
    token, whose input is not scaled; ``state`` [B, C]. Returns h [B, T, C] and the state after the last token.
    """
    out = []
    for t in range(x.shape[1]):
        log_a = -8.0 * F.softplus(rate) * torch.sigmoid(recurrence[:, t])
        scale = torch.where(first[:, t, None], 1.0, torch.sqrt(1 - torch.exp(2 * log_a)))
        state = torch.exp(log_a) * state + scale * torch.sigmoid(gate[:, t]) * x[:, t]
        out.append(state)
    return _stacked(out, x), state


def _stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    """One tensor of each token's result; of none the shape of ``like``, which has no tokens."""
    return torch.stack(rows, dim=1) if rows else torch.zeros_like(like)
