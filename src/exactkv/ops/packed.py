"""Matrices kept as integers of 4 or 8 bits with a scale and an offset a group, and products with them.

One layout serves both widths: that of torch's product with 4-bit weights on a CPU with AVX-512, the only one of its
kernels that reads a row's weights faster than bfloat16 ones (docs/log.md). A number of 8 bits lies there as two of 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import InputError, IntegrityError

GROUPS = (32, 64, 128, 256)
"""How many numbers of a row may share a scale."""
ROWS = 64
"""Rows of a block of the layout; a matrix's last block is filled up."""
MIDDLE = {4: 8, 8: 136}
"""What is subtracted from a number: 8 from each 4 bits of it."""
FEW_ROWS = {4: 16, 8: 8}
"""Up to so many rows of x, by bits, the packed product is faster than dequantizing first."""
_NUMBERS = 1 << 16  # dequantized at a time, so that what lies between two operations stays in a CPU's cache


class Packed(Tensor):
    """What stands for a tensor of numbers that are not there: only shape, dtype and device are a tensor's. Any
    operation that does not know of it raises IntegrityError."""

    numbers: Tensor
    scales: Tensor
    bits: int
    group: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _made(cls, numbers: Tensor, scales: Tensor, shape: tuple[int, ...], bits: int) -> Any:
        wrapper: Any = Tensor._make_wrapper_subclass
        made = wrapper(cls, shape, dtype=scales.dtype, device=numbers.device)
        made.numbers, made.scales, made.bits = numbers, scales, bits
        made.group = shape[-1] // scales.shape[-3]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise IntegrityError(f"{func} on a packed weight; it is for linear() and embedding(), and dense() unpacks it")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.bits} bits in groups of {self.group}, {self.dtype})"


class PackedWeight(Packed):
    """A matrix [out, in] of the dtype of its scales: (number - MIDDLE) · scale + offset.

    ``numbers`` uint8 [blocks, bits / 4 · in, 32]: a byte holds rows j and j + 32 of its block, the lower half first;
    of 8 bits, the upper halves of all inputs come before the lower ones. ``scales`` [in / group, 64 · blocks, 2]: scale
    and offset.
    """

    _kernels: tuple[Tensor, Tensor] | None

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, shape: tuple[int, int], bits: int) -> PackedWeight:
        made: PackedWeight = cls._made(numbers, scales, shape, bits)
        made._kernels = None
        return made

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held, those of the kernel's own copies among them."""
        kept = {t.data_ptr(): t.nbytes for t in (self.numbers, self.scales, *(self._kernels or ()))}
        return sum(kept.values())

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, see linear. Few rows in bfloat16 on a CPU by the packed kernel, else dequantized first."""
        flat = x.reshape(-1, x.shape[-1])
        few = 0 < flat.shape[0] <= FEW_ROWS[self.bits] and x.dtype == torch.bfloat16 and x.device.type == "cpu"
        kernels = self._for_kernel() if few else None
        if kernels is not None:
            both = flat if self.bits == 4 else torch.cat((flat, flat), dim=1)
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(both, kernels[0], self.group, kernels[1])
        else:
            out = flat @ self._transposed(self.dtype)
        if out.shape[1] > self.shape[0]:
            out = out[:, : self.shape[0]]
        out = out.reshape(*x.shape[:-1], self.shape[0])
        return out if bias is None else out + bias

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix in ``dtype``, by default its own; computed in float32 or better and rounded once."""
        return self._transposed(dtype or self.dtype).t()[: self.shape[0]].contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` [...], as of an embedding: [..., in]."""
        flat, inputs = ids.reshape(-1), self.shape[1]
        within = flat % ROWS
        found = self.numbers[flat // ROWS, :, within % 32]  # [n, bits / 4 · in]
        found = torch.where((within >= 32)[:, None], found >> 4, found & 15)
        if self.bits == 8:
            found = (found[:, :inputs] << 4) | found[:, inputs:]
        exact = torch.promote_types(self.dtype, torch.float32)
        scale, offset = self.scales[:, flat].to(exact).repeat_interleave(self.group, 0).unbind(-1)  # [in, n]
        values = found.to(exact).sub_(MIDDLE[self.bits]).mul_(scale.t()).add_(offset.t())
        return values.to(self.dtype).view(*ids.shape, inputs)

    def _for_kernel(self) -> tuple[Tensor, Tensor] | None:
        """Numbers and scales as torch's kernel on this machine has them; None where it has none that is fast."""
        if self._kernels is None:
            rows = kernel_rows()
            if rows is None:
                return None
            scales = self.scales
            if self.bits == 8:  # a number is 16 · upper half + lower half
                upper = torch.stack((scales[..., 0] * 16, torch.zeros_like(scales[..., 0])), dim=-1)
                scales = torch.cat((upper, scales))
            numbers = self.numbers if rows == ROWS else laid_out(halves(self.numbers), rows)
            self._kernels = numbers.view(scales.shape[1], -1), scales  # the kernel wants [out, in / 2]
        return self._kernels

    def _transposed(self, dtype: torch.dtype) -> Tensor:
        """[in, 64 · blocks] in ``dtype``."""
        blocks, inputs = self.numbers.shape[0], self.shape[1]
        out = torch.empty(inputs, blocks, ROWS, dtype=dtype, device=self.device)
        scales = self.scales.view(-1, blocks, ROWS, 2).transpose(0, 1).unsqueeze(2)  # [blocks, groups, 1, 64, 2]
        exact = torch.promote_types(dtype, torch.float32)
        step = max(1, _NUMBERS // (inputs * ROWS)) if self.device.type == "cpu" else blocks
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            numbers = halves(self.numbers[first:last])  # [n, bits / 4 · in, 64]
            if self.bits == 8:
                numbers = (numbers[:, :inputs] << 4) | numbers[:, inputs:]
            values = numbers.to(exact).sub_(MIDDLE[self.bits]).view(last - first, -1, self.group, ROWS)
            scale, offset = scales[first:last].to(exact).unbind(-1)
            values = values.mul_(scale).add_(offset)
            out[:, first:last].copy_(values.view(last - first, inputs, ROWS).transpose(0, 1))
        return out.view(inputs, -1)


class PackedExperts(Packed):
    """Matrices [E, out, in], one an expert: see PackedWeight, with an axis more in front. ``experts[e]`` is one."""

    matrices: tuple[PackedWeight, ...]

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, shape: tuple[int, int, int], bits: int) -> PackedExperts:
        made: PackedExperts = cls._made(numbers, scales, shape, bits)
        made.matrices = tuple(PackedWeight(n, s, shape[1:], bits) for n, s in zip(numbers, scales, strict=True))
        return made

    def __getitem__(self, expert: Any) -> PackedWeight:
        matrix: PackedWeight = self.matrices[expert]
        return matrix

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """See PackedWeight."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """See PackedWeight."""
        return torch.stack([matrix.dense(dtype) for matrix in self.matrices])


def packed(numbers: Tensor, scales: Tensor, shape: tuple[int, ...], bits: int) -> PackedWeight | PackedExperts:
    """The matrix, or the experts' matrices, of that shape. Raises InputError where the parts do not fit it."""
    *stack, rows, inputs = shape
    blocks, groups = -(-rows // ROWS), scales.shape[-3] if scales.dim() > 2 else 0
    wanted = ((*stack, blocks, bits // 4 * inputs, 32), (*stack, groups, blocks * ROWS, 2))
    if (
        (tuple(numbers.shape), tuple(scales.shape)) != wanted
        or numbers.dtype != torch.uint8
        or groups not in {inputs // g for g in GROUPS if inputs % g == 0}
    ):
        raise InputError(
            f"a matrix {list(shape)} of {bits} bits has {numbers.dtype} {list(numbers.shape)} as numbers, scales "
            f"{list(scales.shape)}; expected torch.uint8 {list(wanted[0])} and "
            f"{[*stack, 'in / group', *wanted[1][-2:]]}"
        )
    if len(shape) == 3:
        return PackedExperts(numbers, scales, (shape[0], rows, inputs), bits)
    return PackedWeight(numbers, scales, (rows, inputs), bits)


def dense(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``weight``, unpacked if it is packed, in ``dtype`` (default: its own)."""
    if isinstance(weight, PackedWeight | PackedExperts):
        return weight.dense(dtype)
    return weight if dtype is None else weight.to(dtype)


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """``numbers`` [out, in], from 0 to 2^bits - 1, as PackedWeight has them: uint8 [blocks, bits / 4 · in, 32]."""
    rows, inputs = numbers.shape
    blocks = -(-rows // ROWS)
    filled = torch.zeros(blocks * ROWS, inputs, dtype=torch.uint8, device=numbers.device)
    filled[:rows] = numbers
    blocked = filled.view(blocks, ROWS, inputs).transpose(1, 2)  # [blocks, in, 64]
    return laid_out(blocked if bits == 4 else torch.cat((blocked >> 4, blocked & 15), dim=1), ROWS)


def pack_scales(scale: Tensor, offset: Tensor) -> Tensor:
    """``scale`` and ``offset`` [out, in / group] as PackedWeight has them: [in / group, 64 · blocks, 2]."""
    rows, groups = scale.shape
    filled = torch.zeros(groups, -(-rows // ROWS) * ROWS, 2, dtype=scale.dtype, device=scale.device)
    filled[:, :rows] = torch.stack((scale.t(), offset.t()), dim=-1)
    return filled


def halves(numbers: Tensor) -> Tensor:
    """Bytes [blocks, n, rows / 2] -> their halves [blocks, n, rows]."""
    return torch.cat((numbers & 15, numbers >> 4), dim=-1)


def laid_out(numbers: Tensor, rows: int) -> Tensor:
    """Numbers of 4 bits [blocks, n, 64] in blocks of ``rows`` rows: bytes [blocks · 64 / rows, n, rows / 2]."""
    smaller = numbers.unflatten(-1, (-1, rows)).permute(0, 2, 1, 3).flatten(0, 1)
    paired: Tensor = smaller[..., : rows // 2] | (smaller[..., rows // 2 :] << 4)
    return paired.contiguous()


@lru_cache(maxsize=1)
def kernel_rows() -> int | None:
    """How many rows a block of torch's own packing has on this machine, told from what it makes of two matrices; None
    where its packing is another, as without AVX2."""
    number = torch.arange(2 * ROWS, dtype=torch.int32)[:, None].expand(-1, 32)
    probes = [(number % 16).contiguous(), (number // 16).contiguous()]
    try:
        found = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(p, 1).flatten() for p in probes]
    except (RuntimeError, AttributeError):
        return None
    blocked = [p.to(torch.uint8).view(2, ROWS, 32).transpose(1, 2) for p in probes]
    for rows in (ROWS, ROWS // 2):
        if all(torch.equal(laid_out(b, rows).flatten(), f) for b, f in zip(blocked, found, strict=True)):
            return rows
    return None
