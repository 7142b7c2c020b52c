"""The product of one row with a matrix, fused with what is around it: reading the weights is all it costs."""

import triton
import triton.language as tl

from exactkv.ops.triton.kernels import activated


@triton.jit
def gemv(
    x, weight, bias, norm, residual, out, eps, scale, gate_scale, rows,
    INPUTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """out = [residual + scale ·] ([act] W [norm] x + bias), of BLOCK_N rows of W [rows, INPUTS] a program.

    NORM: x is multiplied by ``norm`` [INPUTS] and the product by rsqrt(mean x² + eps). ACTIVATION: W is [2 · rows,
    INPUTS], and the result act(gate_scale · gate) · up. Sums in float32.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = n[:, None].to(tl.int64) * INPUTS + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        inside = (n[:, None] < rows) & (first + k[None, :] < INPUTS)
        if EVEN_K:
            value = tl.load(x + first + k).to(tl.float32)
        else:
            value = tl.load(x + first + k, mask=first + k < INPUTS, other=0.0).to(tl.float32)
        if EVEN_N and EVEN_K:
            w = tl.load(weight + at + first, eviction_policy="evict_first")
        else:
            w = tl.load(weight + at + first, mask=inside, other=0.0)
        if NORM:
            squares += value * value
            if EVEN_K:
                value = value * tl.load(norm + first + k)
            else:
                value = value * tl.load(norm + first + k, mask=first + k < INPUTS, other=0.0)
        total += w.to(tl.float32) * value[None, :]
        if ACTIVATION != "":
            at_up = at + first + rows.to(tl.int64) * INPUTS
            if EVEN_N and EVEN_K:
                w_up = tl.load(weight + at_up, eviction_policy="evict_first")
            else:
                w_up = tl.load(weight + at_up, mask=inside, other=0.0)
            total_up += w_up.to(tl.float32) * value[None, :]
    result = tl.sum(total, axis=1)
    if NORM:
        rate = tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + eps)
        result = result * rate
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up = tl.sum(total_up, axis=1)
        if NORM:
            up = up * rate
        if BIAS:
            up += tl.load(bias + rows + n, mask=n < rows, other=0.0).to(tl.float32)
        result = activated(result * gate_scale, ACTIVATION) * up
    if RESIDUAL:
        result = tl.load(residual + n, mask=n < rows, other=0.0).to(tl.float32) + scale * result
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < rows)
