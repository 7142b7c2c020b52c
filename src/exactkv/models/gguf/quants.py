"""Dequantization of GGUF tensor types in vectorised torch.

A quantized row is a sequence of blocks; a block holds scales and small integers for 32 values (256 for the
K types). Layouts: ggml's `ggml-common.h`; the arithmetic is that of ggml's `dequantize_row_*`, in the same
order and without fused multiply-add, so that float32 results equal `gguf.quants.dequantize` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from exactkv.errors import InputError, LoadError

# Values dequantized at a time: few enough that all temporaries stay in the cache, and below the 32,768 from
# which torch spreads an operation over threads, whose barriers cost ten times the work where other programs
# use the cores too.
_VALUES_PER_STEP = (1 << 15) - 1


class QuantType(IntEnum):
    """The tensor types that can be read, with ggml's numbers for them."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type: `num_bytes` of a block hold `num_values`; `decode` makes uint8 [n, num_bytes] float32
    [n, num_values]."""

    num_values: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor]


def block_format(type: int) -> BlockFormat:
    """The format of a ggml type number. Raises LoadError for a type that can't be read, naming those that
    can.
    """
    try:
        return _FORMATS[QuantType(type)]
    except ValueError:
        raise LoadError(
            f"GGUF tensor type number {int(type)} is not supported; supported are "
            f"{', '.join(t.name for t in QuantType)}. Use a file quantized to one of these (Q4_K_M, Q5_K_M, "
            "Q6_K and Q8_0 files are)."
        ) from None


def row_bytes(type: int, columns: int) -> int:
    """Bytes of one row of `columns` values. Raises LoadError if the row is not a whole number of blocks."""
    fmt = block_format(type)
    if columns % fmt.num_values:
        raise LoadError(
            f"a row of {columns} values is not a whole number of {QuantType(type).name} blocks of "
            f"{fmt.num_values} values: the file is damaged or was not written by a GGUF writer."
        )
    return columns // fmt.num_values * fmt.num_bytes


def dequantize_into(raw: Tensor, type: int, out: Tensor) -> None:
    """Write the values of quantized rows into `out`.

    raw: uint8 [rows, bytes a row]. type: a ggml type number (`QuantType`). out: [rows, columns], any floating
    dtype, stride and device; values are computed in float32 on raw's device and then cast. Works in steps of
    a few rows, so temporary memory is a few hundred kB (or ten float32 rows) however large the tensor is.
    Different tensors may be read from different threads at once. Raises LoadError for an unsupported type and
    InputError where shapes or raw's dtype do not fit.
    """
    fmt = block_format(type)
    if raw.dtype != torch.uint8 or raw.dim() != 2 or out.dim() != 2:
        raise InputError(
            f"dequantize_into takes raw bytes as uint8 [rows, bytes] and out as [rows, columns]; given "
            f"{raw.dtype} {list(raw.shape)} and {list(out.shape)}."
        )
    rows, columns = out.shape
    if tuple(raw.shape) != (rows, row_bytes(type, columns)):
        raise InputError(
            f"out is {rows} x {columns}, which as {QuantType(type).name} takes {rows} rows of "
            f"{row_bytes(type, columns)} bytes; given {raw.shape[0]} rows of {raw.shape[1]} bytes."
        )
    step = max(1, _VALUES_PER_STEP // max(columns, 1))
    for start in range(0, rows, step):
        blocks = raw[start : start + step].reshape(-1, fmt.num_bytes)
        out[start : start + step].copy_(fmt.decode(blocks).view(-1, columns))


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes [n, b] as [n, b / itemsize] of `dtype`, in float32. The copy makes any offset
    aligned.
    """
    return data.clone(memory_format=torch.contiguous_format).view(dtype).to(torch.float32)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: _as(blocks, dtype)


def _shifted(data: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack small integers: uint8 [n, g, w] -> uint8 [n, g, len(shifts), w], (byte >> shift) & mask."""
    parts = torch.empty(data.shape[0], data.shape[1], len(shifts), data.shape[2], dtype=torch.uint8, device=data.device)
    for index, shift in enumerate(shifts):
        torch.bitwise_right_shift(data, shift, out=parts[:, :, index])
    return parts.bitwise_and_(mask)


def _nibbles(data: Tensor) -> Tensor:
    """Bytes [n, 16] -> uint8 [n, 32]: the low halves of the 16 bytes, then the high halves."""
    return _shifted(data.unsqueeze(1), (0, 4), 0x0F).view(-1, 32)


def _fifth_bits(data: Tensor) -> Tensor:
    """Bytes [n, 4], one little-endian 32 bit word -> uint8 [n, 32]: bit i of the word, times 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(2) >> shifts) & 1).bitwise_left_shift_(4).view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 2:]).to(torch.float32)
    return values.sub_(8).mul_(_as(blocks[:, :2], torch.float16))


def _q4_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 4:]).to(torch.float32)
    return values.mul_(_as(blocks[:, :2], torch.float16)).add_(_as(blocks[:, 2:4], torch.float16))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks[:, 2:6])).to(torch.float32)
    return values.sub_(16).mul_(_as(blocks[:, :2], torch.float16))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks[:, 4:8])).to(torch.float32)
    return values.mul_(_as(blocks[:, :2], torch.float16)).add_(_as(blocks[:, 2:4], torch.float16))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_as(blocks[:, :2], torch.float16))


def _q2_k(blocks: Tensor) -> Tensor:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    d, d_min = _as(blocks[:, 80:82], torch.float16), _as(blocks[:, 82:84], torch.float16)
    scale = (scales & 0x0F).to(torch.float32).mul_(d).unsqueeze(2)  # [n, 16, 1]
    offset = (scales >> 4).to(torch.float32).mul_(d_min).unsqueeze(2)
    values = _shifted(packed.reshape(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 16, 16).to(torch.float32)
    return values.mul_(scale).sub_(offset).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # 16 scales of 6 bits: the low four bits as nibbles of 8 bytes, the high two as quarters of 4 bytes.
    low4 = _shifted(scales[:, :8].unsqueeze(1), (0, 4), 0x0F).view(-1, 16)
    high2 = _shifted(scales[:, 8:].unsqueeze(1), (0, 2, 4, 6), 3).view(-1, 16)
    scale = high2.bitwise_left_shift_(4).bitwise_or_(low4).to(torch.float32).sub_(32)
    scale = scale.mul_(_as(blocks[:, 108:110], torch.float16)).unsqueeze(2)  # [n, 16, 1]
    low = _shifted(packed.reshape(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 16, 16)
    keep = _shifted(high.unsqueeze(1), tuple(range(8)), 1).view(-1, 16, 16)  # a cleared bit means minus 4
    values = keep.bitwise_left_shift_(2).add_(low).to(torch.float32).sub_(4)
    return values.mul_(scale).view(-1, 256)


def _scales_and_mins(data: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: 12 bytes [n, 12] -> eight 6 bit scales and eight 6 bit minima, float32 [n, 8] each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; their top two bits are those of
    scales and minima 4-7, whose low four bits are the low and high nibbles of bytes 8-11.
    """
    first, second, third = data[:, 0:4], data[:, 4:8], data[:, 8:12]
    scales = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    mins = torch.cat([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales.to(torch.float32), mins.to(torch.float32)


def _q4_k(blocks: Tensor) -> Tensor:
    values = _shifted(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 0x0F).view(-1, 8, 32)
    return _scaled_with_mins(blocks, values)


def _q5_k(blocks: Tensor) -> Tensor:
    values = _shifted(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 0x0F).view(-1, 8, 32)
    fifth = _shifted(blocks[:, 16:48].unsqueeze(1), tuple(range(8)), 1).view(-1, 8, 32)
    return _scaled_with_mins(blocks, values.bitwise_or_(fifth.bitwise_left_shift_(4)))


def _scaled_with_mins(blocks: Tensor, integers: Tensor) -> Tensor:
    """(d * scale) * q - (d_min * min) for Q4_K and Q5_K; integers uint8 [n, 8, 32]."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales.mul_(_as(blocks[:, 0:2], torch.float16))
    mins.mul_(_as(blocks[:, 2:4], torch.float16))
    return integers.to(torch.float32).mul_(scales.unsqueeze(2)).sub_(mins.unsqueeze(2)).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _shifted(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 0x0F).view(-1, 16, 16)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 16, 16)
    scale = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    scale = scale.mul_(_as(blocks[:, 208:210], torch.float16)).unsqueeze(2)  # [n, 16, 1]
    values = high.bitwise_left_shift_(4).bitwise_or_(low).to(torch.float32).sub_(32)
    return values.mul_(scale).view(-1, 256)


def _q8_k(blocks: Tensor) -> Tensor:
    # Behind the values lie sums of 16 values each, which only matrix products use.
    return blocks[:, 4:260].view(torch.int8).to(torch.float32).mul_(_as(blocks[:, :4], torch.float32))


# Microscaling FP4 (OCP MX v1.0): a power of two a block, and for each value one of these, doubled. Scales are halved.
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)  # below 2: subnormal
    values = torch.tensor(_FP4_DOUBLED, dtype=torch.float32, device=blocks.device)
    return values[_nibbles(blocks[:, 1:]).int()].mul_(bits.view(torch.float32))


_FORMATS: dict[QuantType, BlockFormat] = {
    QuantType.F32: BlockFormat(1, 4, _plain(torch.float32)),
    QuantType.F16: BlockFormat(1, 2, _plain(torch.float16)),
    QuantType.BF16: BlockFormat(1, 2, _plain(torch.bfloat16)),
    QuantType.Q4_0: BlockFormat(32, 18, _q4_0),
    QuantType.Q4_1: BlockFormat(32, 20, _q4_1),
    QuantType.Q5_0: BlockFormat(32, 22, _q5_0),
    QuantType.Q5_1: BlockFormat(32, 24, _q5_1),
    QuantType.Q8_0: BlockFormat(32, 34, _q8_0),
    QuantType.Q2_K: BlockFormat(256, 84, _q2_k),
    QuantType.Q3_K: BlockFormat(256, 110, _q3_k),
    QuantType.Q4_K: BlockFormat(256, 144, _q4_k),
    QuantType.Q5_K: BlockFormat(256, 176, _q5_k),
    QuantType.Q6_K: BlockFormat(256, 210, _q6_k),
    QuantType.Q8_K: BlockFormat(256, 292, _q8_k),
    QuantType.MXFP4: BlockFormat(32, 17, _mxfp4),
}
