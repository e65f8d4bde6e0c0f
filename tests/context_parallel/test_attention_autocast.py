"""Attention over a cut sequence under autocast: the dtypes of torch's own, in results and sent."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from sent import messages
from torch.nn import functional as F

from naranhi.context_parallel import (
    gathered_attention,
    join_sequence,
    ring_attention,
    split_sequence,
    ulysses_attention,
)


def under_autocast(attend, dtypes):
    """(dtypes of output and gradients; those of torch's attention; distances from it)."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    torch.manual_seed(0)
    *whole, to_output = (torch.randn(2, 4, 12, 8) for _ in range(4))
    whole = [x.to(dtype).requires_grad_() for x, dtype in zip(whole, dtypes, strict=True)]
    own = [split_sequence(x.detach(), group, dim=2).requires_grad_() for x in whole]
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(*own, group)
        expected = F.scaled_dot_product_attention(*whole, is_causal=True)
        shape = attend(*(torch.empty_like(x, device="meta") for x in own), group)
    grads = torch.autograd.grad((output * split_sequence(to_output, group, dim=2)).sum(), own)
    wanted = torch.autograd.grad((expected * to_output).sum(), whole)
    assert shape.shape == output.shape
    found = [join_sequence(x.detach(), group, dim=2) for x in (output, *grads)]
    apart = [
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(found, (expected, *wanted), strict=True)
    ]
    return [x.dtype for x in found], [x.dtype for x in (expected, *wanted)], apart


MIXED = [torch.float32, torch.float32, torch.bfloat16]  # rotary embeddings leave queries and keys


@pytest.mark.parametrize("dtypes", [MIXED, [torch.float32] * 3])
@pytest.mark.parametrize("attend", [ring_attention, gathered_attention, ulysses_attention])
def test_dtypes_are_those_of_torchs_attention(five, attend, dtypes):
    for found, expected, apart in five.call(under_autocast, attend, dtypes)[:2]:
        assert found == expected and found[0] == torch.bfloat16
        assert max(apart) < 0.02, apart


def bytes_sent(attend):
    """The messages of a forward of float32 under autocast, and of bfloat16 without it."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    found = []
    for dtype, enabled in ((torch.float32, True), (torch.bfloat16, False)):
        with messages() as sent, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            attend(*(torch.ones(1, 4, 6, 8, dtype=dtype) for _ in range(3)), group, check=False)
        found.append([(message.dtype, message.nbytes) for message in sent])
    return found


@pytest.mark.parametrize("attend", [ring_attention, gathered_attention, ulysses_attention])
def test_messages_have_autocasts_dtype(five, attend):
    for autocast, narrow in five.call(bytes_sent, attend)[:2]:
        assert autocast == narrow and narrow
