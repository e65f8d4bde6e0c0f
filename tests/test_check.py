import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from naranhi import check


def failure(function, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        function("claim", *args, **kwargs)
    message = str(caught.value)
    assert message.startswith("claim: ") and "\n" not in message
    return message


def line(capsys, function, *args, **kwargs):
    function("claim", *args, **kwargs)
    return capsys.readouterr().out


def test_one_line_each(capsys):
    assert line(capsys, check.close, 1.0, 1.0 + 1e-7, atol=1e-6) == "✓ claim (within 1e-6)\n"
    assert line(capsys, check.close, 1.0, 1.05, rtol=0.1) == "✓ claim (within 10%)\n"
    assert line(capsys, check.close, 1.0, 1.0, rtol=1e-5, atol=1e-8) == (
        "✓ claim (within 1e-8 + 1e-5 of the value)\n"
    )
    assert line(capsys, check.close, 2, 2) == "✓ claim\n"
    assert line(capsys, check.equal, torch.arange(3), torch.arange(3)) == "✓ claim\n"
    assert line(capsys, check.true, torch.ones(2).bool().all()) == "✓ claim\n"


def test_a_failure_prints_nothing(capsys):
    failure(check.close, 1.0, 2.0)
    failure(check.equal, 1, 2)
    failure(check.true, False)
    assert capsys.readouterr().out == ""


def test_a_tensor_failure_says_where_and_by_how_much():
    expected = torch.zeros(4, 3)
    actual = expected.clone()
    actual[1, 2], actual[3, 0] = 0.25, -0.5
    assert failure(check.close, actual, expected, atol=0.125) == (
        "claim: 2 of 12 values differ, the most at [3, 0]: -0.5, expected 0.0, "
        "off by 0.5 (0.125 allowed)"
    )
    check.close("half is allowed", actual, expected, atol=0.5)
    assert failure(check.equal, {"w": [actual]}, {"w": [expected]}) == (
        "claim: 2 of 12 values differ, the most at ['w'][0][3, 0]: -0.5, expected 0.0, "
        "off by 0.5 (they must be the same)"
    )


def test_a_number_failure_says_by_how_much():
    assert failure(check.close, [1.0, 2.5], [1.0, 2.0], rtol=0.1) == (
        "claim: at [1]: 2.5, expected 2.0, off by 0.5 (10% allowed)"
    )
    assert failure(check.close, torch.tensor(2.5), 2.0) == (
        "claim: 2.5, expected 2.0, off by 0.5 (0 allowed)"
    )


def test_the_relative_tolerance_is_of_the_expected_value():
    check.close("numbers", 100.0, 110.0, rtol=0.0910)
    assert "off by 10" in failure(check.close, 110.0, 100.0, rtol=0.0910)
    assert "off by 10" in failure(
        check.close, torch.tensor([110.0]), torch.tensor([100.0]), rtol=0.0910
    )


@pytest.mark.parametrize("function", [check.close, check.equal])
def test_shape_dtype_length_and_keys_are_named(function):
    a = torch.zeros(2, 3)
    assert "shape (2, 3), expected (3, 2)" in failure(function, a, a.T)
    assert "shape (2, 3), expected ()" in failure(function, a, 0.0)
    assert "dtype torch.float32, expected torch.float64" in failure(function, a, a.double())
    assert "length 2, expected 3" in failure(function, [1, 2], [1, 2, 3])
    assert "at ['x']: length 1, expected 0" in failure(function, {"x": [1]}, {"x": []})
    assert "lacks 'b'" in failure(function, {"a": 1}, {"a": 1, "b": 2})
    assert "should not have 'b'" in failure(function, {"a": 1, "b": 2}, {"a": 1})
    assert "'F0', expected 'B0'" in failure(function, ["F0"], ["B0"])
    assert "cannot compare a tensor with 'text'" in failure(function, a, "text")
    assert "None, expected 1" in failure(function, None, 1)


@pytest.mark.parametrize("function", [check.close, check.equal])
def test_nan_agrees_with_nothing(function):
    nan = math.nan
    assert "nan" in failure(function, nan, nan)
    assert "nan" in failure(function, 1.0, nan)
    assert "nan" in failure(function, {nan}, {nan})
    values = torch.tensor([1.0, nan, 9.0])
    assert "1 of 3 values differ, the most at [1]: nan, expected nan" in failure(
        function, values, values.clone()
    )
    assert "[1]: nan, expected 2.0" in failure(function, values, torch.tensor([1.0, 2.0, 3.0]))


def test_infinity_is_only_itself():
    inf = math.inf
    check.close("infinities", [inf, torch.tensor([-inf])], [inf, torch.tensor([-inf])], rtol=1.0)
    for finite, infinite in ((1.0, inf), (torch.tensor([1.0]), torch.tensor([inf]))):
        failure(check.close, finite, infinite, rtol=1.0, atol=1.0)
        failure(check.close, infinite, finite, rtol=1.0, atol=1.0)
    message = failure(check.close, torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0]))
    assert "1 of 2 values differ, the most at [1]: 1.0" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_is_to_the_bit(dtype):
    ones = torch.ones(5, dtype=dtype)
    check.equal("ones", ones, ones.clone())
    after = ones.clone()
    after[3] += torch.finfo(dtype).eps
    assert "1 of 5 values differ, the most at [3]" in failure(check.equal, after, ones)
    assert "[0]: -0.0, expected 0.0" in failure(
        check.equal, torch.full((1,), -0.0, dtype=dtype), torch.zeros(1, dtype=dtype)
    )


def test_integers_beyond_float64():
    big = torch.tensor([2**53, 2**53 + 1])
    for function in (check.close, check.equal):
        function("the same", big, big.clone())
        assert "1 of 2 values" in failure(function, big, torch.tensor([2**53, 2**53]))
        failure(function, 2**53 + 1, 2**53)


def test_other_dtypes():
    check.equal("bools", torch.tensor([True, False]), [True, False])
    failure(check.equal, torch.tensor([True]), [False])
    small = torch.tensor([0], dtype=torch.uint8)
    assert "off by 1 " in failure(check.close, small, small + 1)
    z = torch.tensor([1 + 2j])
    check.close("complex", z, z + 1e-9j, atol=1e-8)
    assert "[0, 1]: 2.0, expected 3.0" in failure(check.close, z, z + 1j)


def test_a_tensor_beside_plain_values():
    check.equal("ints", torch.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]])
    check.equal("rounded to the tensor's dtype", torch.tensor([0.1, 1.0]), [0.1, 1])
    assert "cannot hold" in failure(check.close, torch.tensor([2]), [2.5], atol=1.0)
    check.equal("numpy", torch.arange(3).numpy(), torch.arange(3))
    failure(check.equal, torch.arange(3).numpy(), [0, 1, 3])
    check.equal("empty", torch.zeros(0), [])


def test_gradients_and_strides_do_not_matter():
    a = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    check.equal("transposed", a, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])


@pytest.mark.parametrize("bad", [-1e-6, math.nan, math.inf])
def test_a_tolerance_that_would_excuse_anything_is_refused(bad):
    for name in ("rtol", "atol"):
        with pytest.raises(ValueError, match="tolerances are finite"):
            check.close("claim", 1.0, 1.0, **{name: bad})


@pytest.mark.parametrize("condition", [(False, "reason"), "False", None, 1, [False]])
def test_true_refuses_what_always_counts_as_true(condition):
    with pytest.raises(TypeError, match="claim: a condition is a bool"):
        check.true("claim", condition)


def test_true_wants_one_condition():
    with pytest.raises(TypeError, match="2 values, expected one"):
        check.true("claim", torch.ones(2).bool())
    assert "it is false" in failure(check.true, torch.tensor([1.0]).isnan().any())


def test_a_measured_claim_says_so(capsys):
    assert line(capsys, check.true, True, measured=True) == "✓ claim (measured)\n"
    assert line(capsys, check.close, 1.0, 1.05, rtol=0.1, measured=True) == (
        "✓ claim (within 10%, measured)\n"
    )


@pytest.mark.parametrize(
    "function, values, message",
    [
        (check.true, (False,), "it is false"),
        (check.equal, (1, 2), "1, expected 2, off by 1 (they must be the same)"),
        (
            check.close,
            ([1.0, 2.5], [1.0, 2.0]),
            "at [1]: 2.5, expected 2.0, off by 0.5 (0 allowed)",
        ),
    ],
)
def test_a_measured_claim_that_is_false_is_printed_and_stops_nothing(
    capsys, function, values, message
):
    said = line(capsys, function, *values, measured=True)
    assert said == f"✗ claim: {message} (measured: is the machine busy with something else?)\n"


@pytest.mark.parametrize(
    "actual, expected",
    [
        ([1.0], [1.0, 2.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (torch.ones(2), torch.ones(3)),
        (None, 3.0),
        ([1.0], None),
        ([1.0], {0: 1.0}),
        ("3", 3.0),
    ],
)
def test_measured_values_of_another_form_are_an_error(actual, expected):
    for function in (check.close, check.equal):
        with pytest.raises(AssertionError):
            function("claim", actual, expected, measured=True)


def test_a_false_claim_is_a_plain_assertion_error():
    for function, values in ((check.true, [False]), (check.equal, [1, 2]), (check.close, [1, 2])):
        with pytest.raises(AssertionError) as caught:
            function("claim", *values)
        assert caught.type is AssertionError


def test_a_measured_claim_still_has_to_be_one():
    with pytest.raises(TypeError):
        check.true("claim", 1, measured=True)
    with pytest.raises(ValueError):
        check.close("claim", 1.0, 1.0, rtol=-1, measured=True)


def test_whole_numbers_beyond_the_digits_of_float64():
    big = torch.tensor([2**62 + 100])
    assert "off by 100 (10 allowed)" in failure(check.close, big, torch.tensor([2**62]), atol=10)
    check.close("claim", big, torch.tensor([2**62]), atol=100)
    assert "off by" in failure(
        check.close, torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), atol=1
    )


@pytest.mark.parametrize("number", [np.uint8, np.int16, np.float16])
def test_numbers_of_numpy_do_not_wrap_around(number):
    far, near = number(250), number(3)
    for pair in ((far, near), (near, far), (far, 3), (near, 250)):
        assert "off by 247 (20 allowed)" in failure(check.close, *pair, atol=20)
    lowest = np.int8(-128)
    check.close("claim", lowest, np.int8(-127), rtol=0.01)
    check.close("claim", np.int8(-127), lowest, rtol=0.01)


def test_decimals_beside_floats():
    check.close("claim", Decimal("0.1"), 0.1, atol=1e-9)
    check.equal("claim", Decimal("0.5"), 0.5)
    assert "Decimal('0.3'), expected 0.1, off by 0.2 (" in failure(
        check.close, Decimal("0.3"), 0.1, rtol=0.5
    )


def test_views_that_are_conjugate_or_negative():
    x = torch.tensor([1 + 2j, 3 - 1j])
    check.equal("claim", x.conj(), x.conj().resolve_conj())
    check.close("claim", x.conj().imag, -x.imag, rtol=1e-6)
    assert "1 of" not in failure(check.equal, x.conj(), x)
