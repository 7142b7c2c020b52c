"""The kernels as functions of tensors, each with the launch that was the fastest measured (docs/gpu.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from exactkv.cache import AttentionPattern, ChunkedAttention, SlidingWindow
from exactkv.ops.triton import attention, experts, kernels
from exactkv.ops.triton import flash as pieces
from exactkv.ops.triton import gemv as products

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "quick_gelu", "relu")
"""What `gated` and `gemv` compute; see reference.activate."""
PART = 4096
"""Logits of which one program finds the greatest."""


def begin(
    tokens: Tensor, chosen: Tensor, positions: Tensor, embedding: Tensor, scale: float | None, freqs: Tensor,
    amplitudes: Tensor, cos: Tensor, sin: Tensor, x: Tensor,
) -> None:  # fmt: skip
    """Embeddings of the tokens into ``x`` [B, hidden], rotations into ``cos`` and ``sin`` [ropes, B, width]."""
    ropes, width = freqs.shape
    block = min(1024, triton.next_power_of_2(x.shape[1]))
    kernels.begin[(x.shape[0], 1 + ropes)](
        tokens, chosen, positions, embedding, x, 1.0 if scale is None else scale, freqs, amplitudes, cos, sin,
        HIDDEN=x.shape[1], ROPES=ropes, WIDTH=width, BLOCK=block, SCALED=scale is not None,
    )  # fmt: skip


def add_norm(
    x: Tensor, added: Tensor | None, post: Tensor | None, norm: Tensor | None, out: Tensor | None, scale: float,
    eps: float,
) -> None:  # fmt: skip
    """``x`` [B, hidden] += scale · ``added``, normed with ``post`` if that is given; then ``out`` = norm of x."""
    kernels.add_norm[(x.shape[0],)](
        x, x if added is None else added, x if post is None else post, x if norm is None else norm,
        x if out is None else out, scale, eps, HIDDEN=x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]),
        ADDED=added is not None, POST=post is not None, NORM=norm is not None, num_warps=8,
    )  # fmt: skip


def gated(both: Tensor, activation: str, gate_scale: float, out: Tensor) -> None:
    """``out`` [B, inter] = act(gate) · up, of ``both`` [B, 2 · inter]."""
    inner = out.shape[1]
    kernels.gated[(out.shape[0], triton.cdiv(inner, 1024))](
        both, out, gate_scale, INNER=inner, BLOCK=1024, ACTIVATION=activation
    )


def choose(logits: Tensor, values: Tensor, places: Tensor, chosen: Tensor) -> None:
    """The greatest of ``logits`` [B, V], the lowest id of equals, into ``chosen`` [B]."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    kernels.best_of_part[(rows, parts)](logits, values, places, VOCABULARY=vocabulary, BLOCK=PART, PARTS=parts)
    kernels.best_of_parts[(rows,)](values, places, chosen, PARTS=parts, WIDTH=triton.next_power_of_2(parts))


def tile(rows: int, inputs: int, gate: bool, normed: bool) -> tuple[int, int, int]:
    """Rows and inputs of a program's tile, and its warps, for a product with one row: the fastest measured on an H200
    (benchmarks/gpu_decode.py --sweep)."""
    if gate:
        block_n, block_k, warps = 2, 2048, 8
    elif rows >= 32768:
        block_n, block_k, warps = 4, 1024, 8
    elif normed:
        block_n, block_k, warps = 16, 512, 4
    else:
        block_n, block_k, warps = 2, 1024 if inputs > 8192 else 2048, 4
    while block_k > 128 and inputs % block_k:
        block_k //= 2
    return block_n, block_k, warps


def gemv(
    x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, residual: Tensor | None = None, scale: float = 1.0, activation: str = "",
    gate_scale: float = 1.0, shape: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """``out`` [1, rows] = [residual + scale ·] W x, see gemv.py. ``x`` [1, in], ``weight`` [rows, in] or, with an
    ``activation``, [2 · rows, in]. ``shape``: as `tile` gives it."""
    rows, inputs = out.shape[1], x.shape[1]
    block_n, block_k, warps = tile(rows, inputs, bool(activation), norm is not None) if shape is None else shape
    products.gemv[(triton.cdiv(rows, block_n),)](
        x, weight, x if bias is None else bias, x if norm is None else norm, x if residual is None else residual, out,
        eps, scale, gate_scale, rows, INPUTS=inputs, NORM=norm is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, ACTIVATION=activation, BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN_N=rows % block_n == 0, EVEN_K=inputs % block_k == 0, num_warps=warps,
    )  # fmt: skip


def route(
    logits: Tensor, bias: Tensor | None, chosen: Tensor, scores: Tensor, score_scale: float, sigmoid: bool,
    normalized: bool,
) -> None:  # fmt: skip
    """The best experts of each row of ``logits`` [B, E] into ``chosen`` and ``scores`` [B, k]."""
    rows, count = logits.shape
    experts.route[(rows,)](
        logits, logits if bias is None else bias, chosen, scores, score_scale, EXPERTS=count,
        BLOCK=triton.next_power_of_2(count), TOP=chosen.shape[1], SIGMOID=sigmoid, NORMALIZED=normalized,
        BIAS=bias is not None,
    )  # fmt: skip


def experts_up(x: Tensor, weight: Tensor, chosen: Tensor, scores: Tensor | None, activation: str, out: Tensor) -> None:
    """``out`` [B, k, inter] = act(gate) · up of the chosen experts, of ``x`` [B, in] times its score if given."""
    top, inner = out.shape[1:]
    block_n, block_k, warps = tile(inner, x.shape[1], True, False)
    experts.up[(triton.cdiv(inner, block_n), x.shape[0] * top)](
        x, weight, chosen, x if scores is None else scores, out, INPUTS=x.shape[1], INNER=inner, TOP=top,
        SCORED=scores is not None, ACTIVATION=activation, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip


def experts_down(
    x: Tensor, weight: Tensor, chosen: Tensor, scores: Tensor | None, shared: Tensor | None, residual: Tensor | None,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """``out`` [B, hidden] = [residual +] scale · (sum of [score ·] W x [+ shared]), ``x`` [B, k, inter]."""
    rows, top, inner = x.shape
    block_n, block_k, warps = tile(out.shape[1], inner, False, False)
    experts.down[(triton.cdiv(out.shape[1], block_n), rows)](
        x, weight, chosen, x if scores is None else scores, x if shared is None else shared,
        x if residual is None else residual, out, scale, INPUTS=inner, OUTPUTS=out.shape[1], TOP=top,
        SCORED=scores is not None, SHARED=shared is not None, RESIDUAL=residual is not None, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """What the attention kernel must know of a layer; ``rope``: numbers of a head that are rotated."""

    num_kv_heads: int
    group: int
    head_dim: int
    scale: float
    rope: int
    interleaved: bool
    softcap: float | None
    eps: float
    temperature: tuple[float, float, float] | None = None  # scale, floor_scale, first position


@dataclass(frozen=True)
class Scratch:
    """What programs of one launch leave for each other; made for the layer that needs most."""

    shares: Tensor
    stats: Tensor
    done: Tensor

    @staticmethod
    def make(rows: int, heads: int, group: int, head_dim: int, splits: int, device: torch.device) -> Scratch:
        """For ``heads`` key heads, each read by ``group`` query heads."""
        shares = torch.empty(rows * heads * splits * group * head_dim, dtype=torch.float32, device=device)
        stats = torch.empty(rows * heads * 2 * group * splits, dtype=torch.float32, device=device)
        return Scratch(shares, stats, torch.zeros(rows * heads, dtype=torch.int32, device=device))


def attend(
    qkv: Tensor, norm: Tensor | None, rotation: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor | None, scratch: Scratch, out: Tensor, heads: Heads, splits: int,
) -> None:  # fmt: skip
    """A layer's attention, its new rows written to the cache. ``tables``: positions [B], and of the layer's zone
    counts and spans, and its addresses. See attention.py."""
    positions, counts, spans, addresses = tables
    cos, sin = rotation
    exact = out.dtype == torch.float32
    attention.attend[(out.shape[0], heads.num_kv_heads, splits)](
        qkv, qkv if norm is None else norm, cos, sin, positions, counts, spans, addresses,
        qkv if sinks is None else sinks, scratch.shares, scratch.stats, scratch.done, out, heads.scale,
        heads.softcap or 1.0, heads.eps, *(heads.temperature or (1.0, 1.0, 0.0)),
        HEADS=heads.num_kv_heads, GROUP=heads.group, D=heads.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(heads.head_dim)), BLOCK_M=max(16, triton.next_power_of_2(heads.group)),
        BLOCK=32 if exact else 64, SPLITS=splits, SEGMENTS=spans.shape[1], ROPE=heads.rope, WIDE=cos.shape[-1],
        INTERLEAVED=heads.interleaved, NORM=norm is not None, SOFTCAP=heads.softcap is not None,
        SINKS=sinks is not None, TEMPERATURE=heads.temperature is not None, PRECISION="ieee", num_warps=4,
    )  # fmt: skip


def flash(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, start: int, first_key: int, scale: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of the queries ``q`` [Hq, T, D], at ``start`` and on, to the keys ``k`` and values ``v`` [H, n, D], at
    ``first_key`` and up to the last query's position: [Hq, T, D]. Columns must be contiguous, rows need not be."""
    heads, count, dim = q.shape
    window = pattern.window if isinstance(pattern, SlidingWindow) else 0
    chunk = pattern.chunk_size if isinstance(pattern, ChunkedAttention) else 0
    out = torch.empty(count, heads, dim, dtype=q.dtype, device=q.device).transpose(0, 1)
    exact = q.dtype == torch.float32
    width = max(16, triton.next_power_of_2(dim))
    block_m, block_n, warps = (32, 32, 4) if exact else (128, 128, 8) if width <= 128 else (128, 64, 8)
    pieces.flash[(triton.cdiv(count, block_m), heads)](
        q, k, v, q if sinks is None else sinks, out, scale, softcap or 1.0, count, start, first_key,
        window or chunk or 1,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        GROUP=heads // k.shape[0], D=dim, BLOCK_D=width, BLOCK_M=block_m, BLOCK_N=block_n, WINDOW=window > 0,
        CHUNK=chunk > 0, SOFTCAP=softcap is not None, SINKS=sinks is not None, PRECISION="ieee", num_warps=warps,
        num_stages=3 if width <= 128 else 2,
    )  # fmt: skip
    return out
