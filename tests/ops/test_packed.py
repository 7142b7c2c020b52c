"""Packed weights: what is packed comes back, products are those of the dequantized matrix, nothing else is computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv import InputError, IntegrityError
from exactkv.ops import REFERENCE
from exactkv.ops.linear import embedding, linear
from exactkv.ops.packed import MIDDLE, PackedWeight, kernel_rows, pack_numbers, pack_scales, packed
from exactkv.ops.quantize import GROUPS, WeightFormat, pack

shapes = st.tuples(st.integers(1, 150), st.sampled_from([1, 2, 3]), st.sampled_from([4, 8]), st.sampled_from(GROUPS))


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 2**31))
def test_numbers_scales_and_offsets_come_back(shape: tuple[int, int, int, int], seed: int) -> None:
    rows, groups, bits, group = shape
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, groups * group), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, groups, generator=generator, dtype=torch.float64)
    offset = torch.randn(rows, groups, generator=generator, dtype=torch.float64)
    weight = PackedWeight(pack_numbers(numbers, bits), pack_scales(scale, offset), (rows, groups * group), bits)
    spread = [t.repeat_interleave(group, 1) for t in (scale, offset)]
    wanted = (numbers.double() - MIDDLE[bits]) * spread[0] + spread[1]
    assert (weight.bits, weight.group, tuple(weight.shape)) == (bits, group, tuple(wanted.shape))
    assert torch.equal(weight.dense(), wanted)
    ids = torch.randint(0, rows, (2, 3), generator=generator)
    assert torch.equal(embedding(ids, weight), wanted[ids])


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from([1, 2, 8, 9, 16, 17, 40]), st.booleans(), st.integers(0, 2**31))
def test_products_are_those_of_the_dequantized_matrix(
    shape: tuple[int, int, int, int], count: int, has_bias: bool, seed: int
) -> None:
    rows, groups, bits, group = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * group, generator=generator)
    x = torch.randn(1, count, groups * group, generator=generator)
    bias = torch.randn(rows, generator=generator) if has_bias else None
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float32, 5e-6), (torch.float64, 1e-12)):
        held = pack(weight.to(dtype), WeightFormat(bits, group))
        given = (x.to(dtype), held, None if bias is None else bias.to(dtype))
        wanted = given[0].double() @ held.dense(torch.float64).t() + (0 if bias is None else given[2].double())
        for found in (linear(*given), REFERENCE.linear(*given)):
            assert found.dtype == dtype
            assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("bits, group, most", [(8, 128, 0.009), (8, 32, 0.007), (4, 64, 0.1), (4, 32, 0.09)])
def test_rounding_leaves_no_more_than_it_must(bits: int, group: int, most: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = pack(weight, WeightFormat(bits, group)).dense(torch.float32)
    assert (found - weight).norm() <= most * weight.norm()


def test_zeros_and_constant_rows_are_exact() -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2] = 0.5, -2.0
    for bits in (4, 8):
        found = pack(weight, WeightFormat(bits, 32)).dense()
        assert torch.allclose(found, weight, rtol=1e-2, atol=0)
        assert torch.equal(found[0], weight[0])


def test_experts_are_matrices_of_their_own() -> None:
    weight = torch.randn(3, 70, 64, generator=torch.Generator().manual_seed(0))
    held = pack(weight, WeightFormat(4, 32))
    assert tuple(held.shape) == (3, 70, 64)
    for e in range(3):
        assert torch.equal(held[e].dense(), pack(weight[e], WeightFormat(4, 32)).dense())  # type: ignore[attr-defined]


def test_other_operations_are_refused() -> None:
    held = pack(torch.randn(64, 64), WeightFormat(8, 32))
    for work in (lambda: held + 1, lambda: held.t(), lambda: torch.mm(held, held), lambda: held.double()):
        with pytest.raises(IntegrityError, match="packed"):
            work()


def test_formats_and_parts_that_do_not_fit_are_refused() -> None:
    for bits, group in ((3, 32), (4, 48), (8, 0)):
        with pytest.raises(InputError, match="groups"):
            WeightFormat(bits, group)
    held = pack(torch.randn(64, 64), WeightFormat(4, 32))
    for shape, bits in (((65, 64), 4), ((64, 128), 4), ((64, 64), 8), ((2, 64, 64), 4)):
        with pytest.raises(InputError, match="expected"):
            packed(held.numbers, held.scales, shape, bits)
    with pytest.raises(InputError, match="expected"):
        packed(held.numbers.to(torch.int8), held.scales, (64, 64), 4)


@pytest.mark.skipif(kernel_rows() is None, reason="this machine has no fast product with 4-bit weights")
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets_give_the_same(capability: str) -> None:
    script = (
        "import torch; from exactkv.ops.quantize import *; from exactkv.ops.linear import linear\n"
        "g = torch.Generator().manual_seed(0); w = torch.randn(100, 64, generator=g).bfloat16()\n"
        "x = torch.randn(1, 64, generator=g).bfloat16()\n"
        "for bits in (4, 8): print(*linear(x, pack(w, WeightFormat(bits, 32))).float()[0].tolist())\n"
    )
    found = []
    for environment in ({"ATEN_CPU_CAPABILITY": capability}, {}):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(torch.tensor([[float(n) for n in line.split()] for line in done.stdout.splitlines()]))
    assert found[0].shape == (2, 100)
    assert (found[0] - found[1]).abs().max() <= 1e-2 * found[1].abs().max()
