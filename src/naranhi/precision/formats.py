"""What the bits of a floating-point number mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_INTEGER = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Format(NamedTuple):
    """The layout and the limits of a floating-point format.

    Attributes:
        exponent_bits: the number of bits of the exponent.
        mantissa_bits: the number of bits of the mantissa, without the leading 1 that is not stored.
        bias: the number that is subtracted from the exponent's bits.
        largest: the largest finite value.
        smallest_normal: the smallest positive value with a full mantissa.
        smallest: the smallest positive value; it is subnormal and has one digit left.
        eps: the distance from 1 to the next larger value.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    smallest_normal: float
    smallest: float
    eps: float


class Fields(NamedTuple):
    """The three fields of a stored number, as the integers that its bits are.

    Attributes:
        sign: 0, or 1 for a negative number.
        exponent: the exponent with the bias added; 0 marks zero and the subnormal numbers.
        mantissa: the digits after the leading 1.
    """

    sign: int
    exponent: int
    mantissa: int

    def value(self, dtype: torch.dtype) -> float:
        """Return the number that these fields store in a dtype.

        Infinity and NaN, which use the largest exponent, are not decoded.
        """
        layout = describe(dtype)
        leading = 0 if self.exponent == 0 else 1
        digits = leading + self.mantissa / 2**layout.mantissa_bits
        return (-1) ** self.sign * digits * 2.0 ** (max(self.exponent, 1) - layout.bias)

    def bits(self, dtype: torch.dtype) -> str:
        """Return the bits of the fields, separated by spaces: "0 01011 1001100110"."""
        layout = describe(dtype)
        exponent = format(self.exponent, f"0{layout.exponent_bits}b")
        return f"{self.sign} {exponent} {self.mantissa:0{layout.mantissa_bits}b}"


def describe(dtype: torch.dtype) -> Format:
    """Return the layout and the limits of a floating-point dtype with sign and mantissa.

    Raises:
        TypeError: the dtype is not a floating-point type of this kind.
    """
    if not dtype.is_floating_point or dtype is torch.float8_e8m0fnu:
        raise TypeError(f"{dtype} has no sign, exponent and mantissa")
    if dtype is torch.float4_e2m1fn_x2:
        raise TypeError(f"an element of {dtype} is two numbers of 4 bits, which torch cannot read")
    limits = torch.finfo(dtype)
    eps = 0.25 if dtype is torch.float8_e5m2fnuz else limits.eps  # finfo says 0.125 for it
    mantissa_bits = -round(math.log2(eps))
    return Format(
        exponent_bits=limits.bits - 1 - mantissa_bits,
        mantissa_bits=mantissa_bits,
        bias=1 - round(math.log2(limits.smallest_normal)),
        largest=limits.max,
        smallest_normal=limits.smallest_normal,
        smallest=limits.smallest_normal * eps,
        eps=eps,
    )


def decompose(value: float, dtype: torch.dtype) -> Fields:
    """Round a value to a dtype, and return the sign, exponent and mantissa that are stored.

    Args:
        value: any number; it is rounded to the nearest number of the dtype, and a tie to even.
        dtype: a floating-point dtype.

    Raises:
        TypeError: the dtype has no sign, exponent and mantissa.
    """
    layout = describe(dtype)
    width = 1 + layout.exponent_bits + layout.mantissa_bits
    stored = torch.tensor(_nearest(float(value), layout), dtype=torch.float64).to(dtype)
    bits = stored.view(_INTEGER[width]).item() % 2**width
    rest, mantissa = divmod(bits, 2**layout.mantissa_bits)
    sign, exponent = divmod(rest, 2**layout.exponent_bits)
    return Fields(sign, exponent, mantissa)


def _nearest(value, layout):
    """Round in one step: torch rounds float64 to float32 first, and then rounds again."""
    # NaN, infinity, or what becomes the format's largest
    if not (math.isfinite(value) and abs(value) <= 2 * layout.largest):
        return value
    last = max(math.frexp(value)[1] - 1, 1 - layout.bias) - layout.mantissa_bits  # digit's exponent
    digits = round(math.ldexp(abs(value), -last))
    return math.copysign(math.ldexp(digits, last), value)
