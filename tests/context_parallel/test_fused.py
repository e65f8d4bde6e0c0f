"""The fused attention of each device, beside plain products in float64."""

import pytest
import torch

from naranhi.context_parallel import fused
from naranhi.context_parallel.partial_attention import merge


def farthest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max((one.double() - other).abs().max().item() for one, other in pairs)


def two_blocks(device, dtype, size, keys=48):
    """Queries, two blocks of keys and values, and the output's gradient, drawn alike anywhere."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 48, size), *4 * [(2, 3, keys, size)], (2, 3, 48, size)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


GPU = [
    pytest.param("cuda", *case, marks=pytest.mark.gpu)
    for case in (
        (torch.bfloat16, 64, ("cudnn", "flash"), 0.02),
        (torch.float16, 8, ("cudnn", "flash"), 0.004),
        (torch.float32, 40, ("efficient",), 2e-5),
        (torch.float32, 20, ("plain",), 2e-5),
        (torch.float64, 64, ("plain",), 1e-12),
    )
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "device, dtype, size, kernels, tolerance",
    [("cpu", torch.float64, 4, ("cpu",), 1e-12), ("cpu", torch.float32, 64, ("cpu",), 2e-5), *GPU],
)
def test_fused_attention_is_plain_products(device, dtype, size, kernels, tolerance, causal):
    """Its lse too, and its gradients from the output and lse of more keys than its own."""
    query, key, value, other_key, other_value, to_output = two_blocks(device, dtype, size)
    # As `Partial` gives keys and values: expanded over the heads that share them.
    key, value = (x[:, :1].expand(-1, 3, -1, -1) for x in (key, value))
    assert fused.kernel(query, key, value, causal) in kernels
    given = [x.double() for x in (query, key, value)]
    expected = fused.plain_forward(*given, causal, 0.4)
    output, lse = fused.forward(query, key, value, causal, 0.4)
    assert output.dtype == dtype
    assert farthest([output, lse], expected) < tolerance
    whole, sums = expected
    merge(
        whole,
        sums,
        *fused.plain_forward(given[0], other_key.double(), other_value.double(), False, 0.4),
    )
    exact = fused.plain_backward(to_output.double(), *given, whole, sums, causal, 0.4)
    found = fused.backward(
        to_output, query, key, value, whole.to(dtype), sums.to(lse.dtype), causal, 0.4
    )
    for gradient, other in zip(found, exact, strict=True):
        assert gradient.dtype == dtype
        assert farthest([gradient], [other]) < 10 * tolerance


@pytest.mark.parametrize("causal", [False, True])
def test_plain_products_of_16_bits_are_rounded_at_their_end_only(causal):
    """Scores rounded to 16 bits put lse off by up to 0.06, and gradients by several roundings."""
    given = [4 * x for x in two_blocks("cpu", torch.bfloat16, 64)[:3]]
    to_output = two_blocks("cpu", torch.bfloat16, 64)[-1]
    exact = [x.double() for x in given]
    output, lse = fused.plain_forward(*given, causal, 0.125)
    expected = fused.plain_forward(*exact, causal, 0.125)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (lse - expected[1]).abs().max() < 1e-4
    found = [output, *fused.plain_backward(to_output, *given, *expected, causal, 0.125)]
    wanted = fused.plain_backward(to_output.double(), *exact, *expected, causal, 0.125)
    for one, other in zip(found, [expected[0], *wanted], strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 2**-8 * other.norm()
