"""Assert claims and print one readable line for each, in a notebook and on its ranks.

A true claim prints `✓ <what>` and never a measured number, so that two runs of a notebook print
the same. A false claim raises AssertionError, whose message says what differed, where, and by how
much. NaN equals nothing, not even NaN: two losses that are both NaN are not a success.

A claim about measured times (`measured=True`) is printed with ✗ when its values differ, and the
notebook goes on: other work on the machine can make it fail. `book/build.py` names such claims when
it ends. A wrong shape, dtype, length or set of keys is an error all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from decimal import Decimal
from numbers import Number
from typing import Any, NamedTuple

import torch


def close(
    what: str,
    actual: Any,
    expected: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
    *,
    measured: bool = False,
) -> None:
    """Check that values agree: |actual - expected| <= atol + rtol * |expected|, everywhere.

    Args:
        what: the claim, as printed.
        actual: a tensor, a number, or a list, tuple or dict of these.
        expected: the same. Tensors must have the same shape and dtype; a tensor may also be
            compared with a number or with nested lists of its shape.
        rtol: relative tolerance.
        atol: absolute tolerance, in the values' own unit.
        measured: whether the values are times, or follow from times.

    Raises:
        AssertionError: the values differ by more and are not measured, or they differ in shape,
            dtype, length or keys.
        ValueError: a tolerance is negative or not finite.
    """
    tolerance = _Tolerance(rtol, atol)
    if not all(value >= 0 and math.isfinite(value) for value in tolerance):
        raise ValueError(f"tolerances are finite numbers, 0 or more, not {tolerance}")
    with _printed(what, measured, f"within {tolerance}" if any(tolerance) else ""):
        _compare(what, actual, expected, tolerance)


def equal(what: str, actual: Any, expected: Any, *, measured: bool = False) -> None:
    """Check that values are the same; two tensors, the same to the bit (0.0 is not -0.0).

    Args:
        what: the claim, as printed.
        actual: a tensor, a plain value, or a list, tuple or dict of these.
        expected: the same. Tensors must have the same shape and dtype; a tensor may also be
            compared with a number or with nested lists of its shape, which are then rounded to
            its dtype.
        measured: whether the values follow from measured times.

    Raises:
        AssertionError: a value differs and is not measured, or anything else differs.
    """
    with _printed(what, measured):
        _compare(what, actual, expected, None)


def true(what: str, condition: bool | torch.Tensor, *, measured: bool = False) -> None:
    """Check a condition.

    Args:
        what: the claim, as printed.
        condition: a bool, or a tensor that holds one bool.
        measured: whether the condition is about measured times.

    Raises:
        AssertionError: the condition is false, and not about measured times.
        TypeError: the condition is not a bool or such a tensor, because most other objects count as
            true whatever they hold.
    """
    value = condition
    if hasattr(condition, "numel") and condition.numel() != 1:
        raise TypeError(f"{what}: {condition.numel()} values, expected one; use .all() or .any()")
    if hasattr(condition, "item"):
        value = condition.item()
    if not isinstance(value, bool):
        raise TypeError(f"{what}: a condition is a bool, not {type(value).__name__}")
    with _printed(what, measured):
        if not value:
            raise _OtherValue(f"{what}: it is false")


@contextmanager
def _printed(what: str, measured: bool, within: str = "") -> Iterator[None]:
    """Print the claim that the block asserts."""
    notes = ", ".join(filter(None, [within, "measured" if measured else ""]))
    try:
        yield
    except _OtherValue as error:
        if not measured:
            raise AssertionError(str(error)) from None
        print(f"✗ {error} (measured: is the machine busy with something else?)")
    else:
        print(f"✓ {what}" + (f" ({notes})" if notes else ""))


class _OtherValue(AssertionError):
    """A difference in values, not in shape, dtype, length or keys."""


class _Tolerance(NamedTuple):
    rtol: float
    atol: float

    def allows(self, gap, expected):
        # An infinite gap is never allowed: rtol times an infinite value would excuse anything.
        return math.isfinite(gap) and gap <= self.atol + self.rtol * abs(expected)

    def __str__(self):
        parts = [_short(self.atol)] if self.atol else []
        if self.rtol >= 0.01:
            parts.append(f"{_short(100 * self.rtol)}%")
        elif self.rtol:
            parts.append(f"{_short(self.rtol)} of the value")
        return " + ".join(parts) or "0"


def _compare(what, actual, expected, tolerance, where=""):
    """Raise AssertionError at the first difference. A tolerance of None means equal to the bit."""
    actual, expected = (
        torch.as_tensor(x) if hasattr(x, "__array__") and not isinstance(x, Number) else x
        for x in (actual, expected)
    )
    if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
        return _compare_tensors(what, actual, expected, tolerance, where)
    if isinstance(actual, Number) and isinstance(expected, Number):
        if actual == expected:
            return
        # Numbers of NumPy wrap around: in uint8, 3 - 250 is 9.
        actual, expected = (x.item() if hasattr(x, "item") else x for x in (actual, expected))
        # A Decimal cannot be subtracted from a float.
        a, e = (float(x) if isinstance(x, Decimal) else x for x in (actual, expected))
        gap = abs(a - e)
        if tolerance is None or not tolerance.allows(gap, e):
            message = f"{actual!r}, expected {expected!r}, {_off(gap, tolerance)}"
            _fail(what, where, message, kind=_OtherValue)
    elif isinstance(actual, dict) and isinstance(expected, dict):
        for word, keys in (
            ("lacks", expected.keys() - actual.keys()),
            ("should not have", actual.keys() - expected.keys()),
        ):
            if keys:
                _fail(what, where, f"{word} {', '.join(sorted(map(repr, keys)))}")
        for key in expected:
            _compare(what, actual[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            _fail(what, where, f"length {len(actual)}, expected {len(expected)}")
        for i, (value, other) in enumerate(zip(actual, expected, strict=True)):
            _compare(what, value, other, tolerance, f"{where}[{i}]")
    elif actual != expected or _holds_nan(actual):
        kind = _OtherValue if type(actual) is type(expected) else AssertionError
        _fail(what, where, f"{actual!r}, expected {expected!r}", kind=kind)


def _holds_nan(value):
    """Return whether a set has NaN, which equals itself there: sets compare identities first."""
    return isinstance(value, Set) and any(x != x for x in value if isinstance(x, Number))


def _compare_tensors(what, actual, expected, tolerance, where):
    try:
        a, e = _tensor(actual, like=expected), _tensor(expected, like=actual)
    except (TypeError, ValueError, RuntimeError) as error:
        plain = expected if isinstance(actual, torch.Tensor) else actual
        _fail(what, where, f"cannot compare a tensor with {plain!r}: {error}")
    if a.shape != e.shape:
        _fail(what, where, f"shape {tuple(a.shape)}, expected {tuple(e.shape)}")
    if a.dtype != e.dtype:
        _fail(what, where, f"dtype {a.dtype}, expected {e.dtype}")
    if a.is_complex():
        a, e = torch.view_as_real(a), torch.view_as_real(e)
    gap = (a.double() - e.double()).abs()
    if not a.is_floating_point():  # subtract as int64: float64 cannot represent every int64
        gap = torch.where(gap < 2**62, (a.long() - e.long()).abs().double(), gap)
    if tolerance is None:
        differs = _bits(a) != _bits(e)
    else:
        allowed = tolerance.atol + tolerance.rtol * e.double().abs()
        # With a tolerance of 0 only equality counts: float64 cannot represent every int64.
        differs = (a != e) & ~((gap <= allowed) & (allowed > 0) & gap.isfinite())
    differs |= (a != a) | (e != e)  # NaN
    if not differs.any():
        return
    # Report the worst: NaN before infinity before the largest gap.
    badness = gap.nan_to_num(nan=math.inf, posinf=torch.finfo(gap.dtype).max)
    index = torch.unravel_index(badness.where(differs, -1.0).argmax(), gap.shape)
    place = f"{where}[{', '.join(str(int(i)) for i in index)}]" if index else where
    count = f"{int(differs.sum())} of {a.numel()} values differ, the most " if index else ""
    _fail(
        what,
        place,
        f"{a[index].item()!r}, expected {e[index].item()!r}, {_off(gap[index].item(), tolerance)}",
        count,
        _OtherValue,
    )


def _tensor(value, like):
    """Convert to a tensor on the CPU; a plain value takes the dtype of the tensor beside it."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_conj().resolve_neg()
    exact = torch.tensor(value)
    cast = exact.to(like.dtype)
    # Rounding 0.1 to float32 is intended; turning 2.5 into 2 is not.
    if not (exact.is_floating_point() and cast.is_floating_point()) and (cast != exact).any():
        raise ValueError(f"{like.dtype} cannot hold it")
    return torch.tensor(value, dtype=like.dtype)


def _bits(tensor):
    """Return the tensor's bits as integers of the same shape, in which 0.0 and -0.0 differ."""
    if not tensor.is_floating_point():
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integer[tensor.element_size()])


def _off(gap, tolerance):
    limit = "they must be the same" if tolerance is None else f"{tolerance} allowed"
    return f"off by {_short(gap)} ({limit})"


def _fail(what, where, message, count="", kind=AssertionError):
    raise kind(f"{what}: {count}" + (f"at {where}: " if where else "") + message)


def _short(number):
    """Write at most four digits, and 1e-06 as 1e-6."""
    mantissa, _, exponent = f"{number:.4g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if exponent else "")
