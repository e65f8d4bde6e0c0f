"""Three ways of attention over a cut sequence: equal to one process, and what each sends."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import whole_attention as whole
from gloo_ranks import first_ranks
from sent import messages

from naranhi import costs
from naranhi.autograd import SavedTensors
from naranhi.context_parallel import (
    ORDERS,
    gathered_attention,
    join_sequence,
    partial_attention,
    ring,
    ring_attention,
    split_sequence,
    ulysses_attention,
)

WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}
LENGTH = 48
DOCUMENTS = None, [5, 20, 23], [[48], [1, 46, 1]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}


def on_ranks(attend, group, tensors, order, **options):
    """The output and the gradients, joined to the whole sequence."""
    *own, to_output = (split_sequence(x, group, order=order, dim=2) for x in tensors)
    leaves = [x.requires_grad_() for x in own]
    output = attend(*leaves, group, order=order, **options)
    grads = torch.autograd.grad(output, leaves, to_output)
    return [join_sequence(x.detach(), group, order=order, dim=2) for x in (output, *grads)]


def farthest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max((one.double() - other).abs().max().item() for one, other in pairs)


def worst(ranks, dtype, kv_heads, check=False):
    """{(way, causal, order, documents): the largest difference from one process}."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return {}
    tensors, found = whole.tensors(LENGTH, kv_heads, dtype), {}
    exact = [x.double() for x in tensors]
    for causal, documents in product((True, False), DOCUMENTS):
        expected = whole.results(*exact, whole.mask(LENGTH, causal, documents))
        for (name, attend), order in product(WAYS.items(), ORDERS):
            options = {"causal": causal, "documents": documents, "check": check}
            result = on_ranks(attend, group, tensors, order, **options)
            assert {x.dtype for x in result} == {dtype}
            found[name, causal, order, str(documents)] = farthest(result, expected)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_process(five, ranks):
    for found in five.call(worst, ranks, torch.float64, 12):
        for case, difference in found.items():
            assert difference < TOLERANCE[torch.float64], case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_precisions(five, dtype):
    for found in five.call(worst, 4, dtype, 12):
        for case, difference in found.items():
            assert difference < TOLERANCE[dtype], case


def grouped(kv_heads):
    """The largest difference with fewer key-value heads, with the ranks' arguments compared."""
    group = first_ranks(3)
    if dist.get_rank() >= 3:
        return []
    tensors = whole.tensors(LENGTH, kv_heads)
    expected = whole.results(*tensors, whole.mask(LENGTH, True, None))
    return [
        farthest(on_ranks(attend, group, tensors, order), expected)
        for name, attend in WAYS.items()
        for order in ORDERS
        if name != "ulysses" or kv_heads % 3 == 0
    ]


@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_several_heads_share_keys_and_values(five, kv_heads):
    for found in five.call(grouped, kv_heads)[:3]:
        assert len(found) == (6 if kv_heads == 3 else 4)
        assert max(found) < 1e-12


def strided():
    """The largest difference with tensors as a projection leaves them, and a scale."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    x = torch.randn(2, 8, 3 * 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query, key, value = (
        part.unflatten(-1, (4, 4)).transpose(1, 2) for part in x.requires_grad_().chunk(3, -1)
    )
    expected = whole.attention(query * 0.6, key, value, whole.mask(8, True, None))
    (to_x,) = torch.autograd.grad(expected.square().sum(), x)
    found = []
    for attend in WAYS.values():
        own = split_sequence(x.detach(), group, dim=1).requires_grad_()
        parts = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in own.chunk(3, -1))
        output = attend(*parts, group, scale=0.3, positions=torch.arange(4) + 4 * rank)
        output.square().sum().backward()
        found.append(farthest([output], [expected.chunk(2, 2)[rank]]))
        found.append(farthest([own.grad], [to_x.chunk(2, 1)[rank]]))
    return max(found)


def test_strided_tensors_a_scale_and_positions(five):
    assert max(five.call(strided)[:2]) < 1e-12


# --- wrong ways are seen -------------------------------------------------------------------------


def averaged(output, lse, new_output, new_lse):
    """Merge as if both had seen as much."""
    new_lse = new_lse.view_as(lse)
    first = lse.isneginf().unsqueeze(-1)
    output.copy_(torch.where(first, 1.0, 0.5) * (output + new_output.view_as(output)))
    lse.copy_(torch.logaddexp(lse, new_lse))


def own_block(block, cut):
    """Send the blocks round, and compute with this rank's."""
    for owner, _ in ring_around(block, cut):
        yield owner, block


def late(block, cut):
    """Compute with a block before it has arrived: with the one before."""
    before = block
    for owner, arrived in ring_around(block, cut):
        yield owner, before
        before = arrived


ring_around = ring.around


def wrong(where, name, function, ranks):
    """The differences of output and of gradients with a part of the ring replaced."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    tensors = whole.tensors(LENGTH, 12)
    expected = whole.results(*tensors, whole.mask(LENGTH, False, None))
    right = getattr(where, name)
    setattr(where, name, function)
    try:
        found = on_ranks(ring_attention, group, tensors, "plain", causal=False, check=False)
    finally:
        setattr(where, name, right)
    return farthest(found[:1], expected[:1]), farthest(found[1:], expected[1:])


def test_a_merge_without_log_sum_exp_is_seen(five):
    for output, grads in five.call(wrong_merge)[:3]:
        assert output > 0.01
        assert grads > 0.01


def wrong_merge():
    return wrong(partial_attention, "merge", averaged, 3)


@pytest.mark.parametrize("function", [own_block, late])
def test_stale_blocks_are_seen(five, function):
    for output, grads in five.call(stale, function)[:3]:
        assert output > 0.01
        assert grads > 0.01


def stale(function):
    return wrong(ring, "around", function, 3)


def test_stale_blocks_of_the_backward_alone_are_seen(five):
    for output, grads in five.call(stale_backward)[:3]:
        assert output < 1e-12
        assert grads > 0.01


def stale_backward():
    calls = []

    def around(block, cut):
        calls.append(block)
        return ring_around(block, cut) if len(calls) == 1 else own_block(block, cut)

    return wrong(ring, "around", around, 3)


# --- bytes and messages --------------------------------------------------------------------------


def sent(ranks, way, kv_heads, order):
    """[(messages, bytes) of the forward, of both], and the bytes saved in between."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    tensors = whole.tensors(LENGTH, kv_heads)
    *own, to_output = (split_sequence(x, group, order=order, dim=2) for x in tensors)
    leaves = [x.requires_grad_() for x in own]
    with messages() as handed:
        with SavedTensors([]) as saved:
            output = WAYS[way](*leaves, group, order=order, check=False)
        forward = [one.nbytes for one in handed]
        output.backward(to_output)
    both = [one.nbytes for one in handed]
    return [(len(sizes), sum(sizes)) for sizes in (forward, both)], saved.bytes


@pytest.mark.parametrize(
    ("way", "kv_heads"), [("ring", 12), ("ring", 2), ("gathered", 4), ("ulysses", 12)]
)
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_and_messages_are_what_the_formulas_say(five, way, kv_heads, order):
    shape = {"sequence": LENGTH, "heads": 12, "kv_heads": kv_heads, "head_size": whole.SIZE}
    shape |= {"batch": whole.BATCH, "element": 8}
    for ranks in (1, 2, 3, 4):
        expected = [
            (
                costs.context_messages(way, ranks, backward=backward),
                costs.context_bytes_sent(way, ranks, **shape, backward=backward),
            )
            for backward in (False, True)
        ]
        for counts, saved in five.call(partial(sent, ranks, way, kv_heads, order))[:ranks]:
            assert counts == expected
            assert saved == costs.context_bytes_saved(way, ranks, **shape)
