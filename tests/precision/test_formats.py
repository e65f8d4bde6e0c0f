"""The bits of numbers, against torch's own."""

import math

import pytest
import torch

from naranhi.precision import Fields, decompose, describe

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize(
    "dtype, layout",
    [
        (torch.float32, (8, 23, 127)),
        (torch.bfloat16, (8, 7, 127)),
        (torch.float16, (5, 10, 15)),
        (torch.float8_e4m3fn, (4, 3, 7)),
        (torch.float8_e5m2, (5, 2, 15)),
        (torch.float8_e4m3fnuz, (4, 3, 8)),
        (torch.float8_e5m2fnuz, (5, 2, 16)),
        (torch.float64, (11, 52, 1023)),
    ],
)
def test_layouts(dtype, layout):
    assert describe(dtype)[:3] == layout


def test_limits():
    half = describe(torch.float16)
    assert half.largest == 65504
    assert half.smallest_normal == 2**-14
    assert half.smallest == 2**-24
    assert half.eps == 2**-10
    assert describe(torch.bfloat16).smallest == 2**-133
    assert describe(torch.float8_e4m3fn).largest == 448
    assert describe(torch.float8_e5m2).largest == 57344


def test_a_number_by_hand():
    assert decompose(0.1, torch.float16) == Fields(0, 11, 614)
    assert decompose(-0.1, torch.float16) == Fields(1, 11, 614)
    assert decompose(0.1, torch.bfloat16) == Fields(0, 123, 77)
    assert Fields(0, 11, 614).bits(torch.float16) == "0 01011 1001100110"


@pytest.mark.parametrize("dtype", DTYPES)
def test_fields_give_the_stored_number_back(dtype):
    layout = describe(dtype)
    values = [0.0, 1.0, -1.5, 0.1, 3.14159, layout.largest, -layout.largest, layout.smallest]
    values += [layout.smallest_normal, layout.smallest_normal / 2, 100.0]
    for value in values:
        stored = torch.tensor(value, dtype=torch.float64).to(dtype).double().item()
        assert decompose(value, dtype).value(dtype) == stored


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
def test_a_value_is_rounded_once(dtype):
    layout = describe(dtype)
    small = layout.smallest
    for even, step in (1.0, layout.eps), (layout.smallest_normal, small), (2 * small, small):
        for sign in 1, -1:
            for part, expected in ((0.5, even), (0.5 + 2**-40, even + step), (0.5 - 2**-40, even)):
                found = decompose(sign * (even + part * step), dtype).value(dtype)
                assert found == sign * expected
    assert decompose(-small / 4, dtype).value(dtype) == 0
    for value in 1.7e308, layout.largest, 1.5 * layout.largest, math.inf, -math.inf:
        stored = torch.tensor(value, dtype=torch.float64).to(dtype)
        bits = stored.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16).item()
        found = decompose(value, dtype).bits(dtype).replace(" ", "")
        assert found == f"{bits:0{8 * dtype.itemsize}b}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_pattern_of_16_bits(dtype):
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()][::17]  # every seventeenth is quick, and has all exponents
    for number in numbers.double().tolist():
        value = decompose(number, dtype).value(dtype)
        assert (value, math.copysign(1, value)) == (number, math.copysign(1, number))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_infinity_has_its_own_pattern(dtype):
    fields = decompose(-math.inf, dtype)
    layout = describe(dtype)
    assert fields == (1, 2**layout.exponent_bits - 1, 0)


def test_a_dtype_without_these_fields_is_refused():
    with pytest.raises(TypeError, match=r"torch.int16 has no sign, exponent and mantissa"):
        decompose(1.0, torch.int16)
    with pytest.raises(TypeError, match="e8m0fnu has no sign"):
        describe(torch.float8_e8m0fnu)
    with pytest.raises(TypeError, match="float4_e2m1fn_x2 is two numbers of 4 bits"):
        describe(torch.float4_e2m1fn_x2)
