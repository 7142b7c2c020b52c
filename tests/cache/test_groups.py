"""Quantizing in groups: half a step at most, whatever the numbers; a row's codes depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.cache import groups
from exactkv.cache.storage import QuantizedStorage, make_storage
from exactkv.errors import InputError

CPU = torch.device("cpu")


def there_and_back(x, bits, group):
    return groups.dequantize(groups.quantize(x, bits, group), bits, group, x.dtype)


@settings(max_examples=150, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([1, 3, 4, 32]),
    size=st.sampled_from([2, 6, 8, 64, 80]),
    magnitude=st.integers(-12, 3),
    shift=st.sampled_from([0.0, 1.0, -40.0]),
    seed=st.integers(0, 999),
)
def test_the_error_is_half_a_step_at_most(bits, group, size, magnitude, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn((2, 5, size), dtype=torch.float64, generator=generator) + shift) * 10.0**magnitude
    back = there_and_back(x, bits, group)
    for at in range(0, size, group):
        some = x[..., at : at + group]
        span = (some.abs().amax(-1) / 127) if bits == 8 else (some.amax(-1) - some.amin(-1)) / 15
        largest = some.abs().amax(-1)
        step = span * (1 + 2**-9) + largest * 2**-9 / (127 if bits == 8 else 15) + 2**-23  # of what float16 holds
        assert ((back - x)[..., at : at + group].abs().amax(-1) <= step / 2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [4, 32])
def test_a_row_alone_is_the_row_among_others(bits, group):
    x = torch.randn(3, 2, 7, 6, generator=torch.Generator().manual_seed(0))
    whole = groups.quantize(x, bits, group)
    alone = groups.quantize(x[1:2, :, 4:5], bits, group)
    for suffix, buffer in whole.items():
        assert torch.equal(buffer[1:2, :, 4:5], alone[suffix])


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_what_was_stored_come_back_as_they_were(bits):
    assert (there_and_back(torch.zeros(1, 2, 8), bits, 4).abs() <= 1e-6).all()
    constant = torch.full((1, 2, 8), 3.0)
    assert (there_and_back(constant, bits, 4) - constant).abs().max() <= 3.0 * 2**-9


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_is_no_number_shows(bits, wrong):
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2] = wrong
    back = there_and_back(x, bits, 4)
    assert not back[0, 1, :4].isfinite().all(), "the group"
    assert back[0, 0].isfinite().all() and back[0, 1, 4:].isfinite().all(), "nothing else"


@pytest.mark.parametrize("bits", [8, 4])
def test_layout_and_bytes(bits):
    storage = QuantizedStorage(torch.bfloat16, CPU, bits=bits, group=32)
    parts = {"k": (2, 80), "v": (2, 64)}
    stored = storage.stored({name: torch.randn(1, h, 3, d) for name, (h, d) in parts.items()})
    layout = storage.layout(parts)
    assert {n: (t.shape[1], t.shape[3], t.dtype) for n, t in stored.items()} == layout
    # 2 bytes a scale, 2 more a least number; 80 numbers are 3 groups, 64 are 2
    numbers = 2 * (80 + 64) * bits // 8
    assert storage.row_nbytes(parts) == numbers + 2 * (3 + 2) * 2 * (1 if bits == 8 else 2)
    assert sum(t.nbytes for t in storage.allocate(parts, 10).values()) == 10 * storage.row_nbytes(parts)


def test_names_say_what_they_make():
    for name, known in [("int8", "int8"), ("int8:32", "int8"), ("int4:64", "int4:64"), ("dense", "dense")]:
        made = make_storage(name, torch.float32, CPU, False)
        assert made.name == known and make_storage(known, torch.float32, CPU, False) == made
    for wrong in ["int4:0", "int4:", "int2", "dense:32", "INT8", "int8:x", None, 8]:
        with pytest.raises(InputError, match="storage is .*int8, int4"):
            make_storage(wrong, torch.float32, CPU, False)


def test_four_bits_take_an_even_number():
    with pytest.raises(InputError, match="5 numbers.*int8"):
        QuantizedStorage(torch.float32, CPU, bits=4).layout({"k": (1, 5)})
    assert QuantizedStorage(torch.float32, CPU, bits=8).layout({"k": (1, 5)})["k"] == (1, 5, torch.int8)
