"""fp8 with scales."""

import pytest
import torch

from naranhi.precision import dequantize, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_values_that_fit_come_back():
    tensor = torch.tensor([[448.0, -1.0, 0.5, 0.0], [7.0, 1.75, -3.5, 0.25]])
    values, scales = quantize(tensor, block=4)
    assert values.dtype == E4M3
    assert scales.tolist() == [[1.0], [2**-6]]
    assert torch.equal(dequantize(values, scales), tensor)


@pytest.mark.parametrize("dtype, half_step", [(E4M3, 2**-4), (E5M2, 2**-3)])
@pytest.mark.parametrize("block", [None, 16])
def test_the_error_is_half_a_step(dtype, half_step, block):
    tensor = 1 + torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    back = dequantize(*quantize(tensor, dtype, block)).reshape(tensor.shape)
    assert ((back - tensor).abs() <= half_step * tensor * 1.001).all()
    assert (back - tensor).abs().max() > half_step / 4


def test_the_largest_of_each_block_fits_exactly():
    tensor = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -6, 6, 8
    ).view(8, 1)
    values, scales = quantize(tensor, block=32)
    assert values.float().abs().amax(1).tolist() == [448.0] * 8
    torch.testing.assert_close(scales.view(-1) * 448, tensor.abs().amax(1))


def test_powers_of_two_are_exact_and_never_saturate():
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(tensor, block=32, power_of_two=True)
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = values.float().abs().amax(1)
    assert (scales.view(-1) * 448 >= tensor.abs().amax(1)).all()
    assert ((largest > 200) & (largest <= 448)).all()
    e8m0 = scales.to(torch.float8_e8m0fnu)
    assert torch.equal(e8m0.float(), scales), "one byte holds such a scale"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_numbers_of_fp32_stay_finite(dtype):
    """Rounded up by fp8, they would be 2 to the power of 128."""
    largest = torch.finfo(torch.float32).max
    tensor = torch.tensor([[largest, -largest, 0.97 * largest, 0.0]])
    back = dequantize(*quantize(tensor, dtype, power_of_two=True))
    torch.testing.assert_close(back, tensor, rtol=2**-4, atol=0)


def test_a_block_of_zeros():
    values, scales = quantize(torch.zeros(2, 4), block=4)
    assert torch.equal(dequantize(values, scales), torch.zeros(2, 4))


def test_one_scale_for_a_tensor_of_any_shape():
    values, scales = quantize(torch.ones(2, 3, 4))
    assert (values.shape, scales.shape) == ((1, 24), (1, 1))


@pytest.mark.parametrize("block", [5, 0])
def test_blocks_that_do_not_fit_are_refused(block):
    with pytest.raises(ValueError, match=f"24 elements cannot be cut into blocks of {block}"):
        quantize(torch.ones(2, 12), block=block)


@pytest.mark.parametrize("block", [None, 4])
def test_nothing(block):
    values, scales = quantize(torch.empty(0), block=block)
    assert values.numel() == scales.numel() == dequantize(values, scales).numel() == 0
