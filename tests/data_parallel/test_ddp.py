"""`DDP` when something goes wrong, is forgotten, or is done by others: replicas never part
silently, an error is a rank's own, nothing is kept alive."""

import copy
import datetime
import gc
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from one_process import same_bits_everywhere
from torch import nn
from torch.utils.checkpoint import checkpoint

from naranhi.data_parallel import DDP

SMALL = 50  # bytes of a bucket: one for each layer or less


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def layers(number=3, dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(number)))


def rows(rank, dtype=None):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def gradients_alone(model, ranks=2, dtype=None):
    """The gradients of one process that has the rows of all ranks."""
    model.zero_grad()
    for rank in range(ranks):
        model(rows(rank, dtype)).abs().square().sum().backward()
    return [param.grad for param in model.parameters()]


def forgotten(kind, options):
    """A step whose backwards were all in no_sync()."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    expected = gradients_alone(copy.deepcopy(model))
    parallel = DDP(model, group, bucket_bytes=SMALL)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    start = copy.deepcopy(model.state_dict())
    with parallel.no_sync():
        model(rows(rank)).square().sum().backward()
    found = [message(optimizer.step)]
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name]), "nothing has been changed"
    parallel.synchronize()
    for param, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, other)
    optimizer.step()
    optimizer.zero_grad()

    with parallel.no_sync():
        model(rows(rank)).square().sum().backward()
    optimizer.zero_grad()  # thrown away: nothing is left to be forgotten
    optimizer.step()
    model(rows(rank)).square().sum().backward()
    optimizer.step()
    assert same_bits_everywhere(model, group)
    other = layers()  # an optimizer of another model is none of its business
    with parallel.no_sync():
        optimizer.zero_grad()
        model(rows(rank)).square().sum().backward()
    other(rows(rank)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    parallel.close()
    optimizer.step()  # and on one that is closed it has no say
    return found


@pytest.mark.parametrize(
    "kind, options", [("SGD", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True})]
)
def test_a_forgotten_sum_is_told_before_replicas_part(five, kind, options):
    for found in five.call(forgotten, kind, options)[:2]:
        assert found == [
            "RuntimeError: the gradient of parameter 0.weight is not yet summed: run the last "
            "backward of a step outside of no_sync(), or call synchronize()"
        ]


def nested_no_sync():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = layers()
    expected = gradients_alone(copy.deepcopy(model))
    parallel = DDP(model, group, bucket_bytes=SMALL)
    loss = model(rows(rank)).square().sum()  # the forward may be anywhere
    with parallel.no_sync():
        with parallel.no_sync():
            pass
        (loss / 4).backward(retain_graph=True)
        with pytest.raises(KeyError), parallel.no_sync():
            raise KeyError("not the end of the outer block")
        (loss / 4).backward(retain_graph=True)
        half = [param.grad.clone() for param in model.parameters()]
        loss = loss / 2
    loss.backward()
    for param, own, total in zip(model.parameters(), half, expected, strict=True):
        assert not torch.equal(own * 2, total)
        torch.testing.assert_close(param.grad, total)


def test_no_sync_is_about_the_backward(five):
    five.call(nested_no_sync)


def other_parameters():
    """Unfrozen later, replaced by load_state_dict, added; frozen later."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found = []

    def unfreeze(model):
        model[0].requires_grad_(True)

    def replace(model):
        model.load_state_dict(layers().state_dict(), assign=True)

    def add(model):
        model.append(nn.Linear(4, 4))

    def freeze(model):
        model[1].requires_grad_(False)

    for change in unfreeze, replace, add, freeze:
        model = layers()
        model[0].requires_grad_(change is not unfreeze)
        DDP(model, group, bucket_bytes=SMALL)
        model(rows(rank)).square().sum().backward()
        model.zero_grad()
        change(model)
        found.append(message(lambda model=model: model(rows(rank)).square().sum().backward()))
    assert model[1].weight.grad is None and model[0].weight.grad is not None
    total = model[0].weight.grad.clone()
    dist.broadcast(total, src=0, group=group)
    assert torch.equal(total, model[0].weight.grad)
    return found


def test_a_parameter_that_is_trained_later_is_named(five):
    for found in five.call(other_parameters)[:2]:
        end = (
            "was unfrozen, added or replaced after DDP was made: call close() on DDP, and make a "
            "new one"
        )
        assert found == [
            f"RuntimeError: parameter {name} {end}" for name in ("0.weight", "0.weight", "3.weight")
        ] + [None]


def let_go(closed):
    """How many of some models, and of the memory of their gradients, are still there."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    there = []
    for _ in range(3):
        model = layers()
        parallel = DDP(model, group, bucket_bytes=SMALL)
        model(rows(rank)).square().sum().backward()
        model.kept = model(rows(rank))  # with its graph, whose hooks know DDP
        there += [
            weakref.ref(model),
            weakref.ref(parallel),
            weakref.ref(parallel.buckets[0]),
            weakref.ref(parallel.buckets[0].flat),
            weakref.ref(model[0].weight),
        ]
        if closed:
            parallel.close()
        del model, parallel
    gc.collect()
    return sum(one() is not None for one in there)


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_let_go_is_freed(five, closed):
    assert five.call(let_go, closed)[:2] == [0, 0]


def held_by_the_model():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = layers()
    expected = gradients_alone(copy.deepcopy(model))
    DDP(model, group, bucket_bytes=SMALL)  # nobody keeps it, but the model
    gc.collect()
    for copied in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        copied(rows(rank)).square().sum().backward()  # an ordinary model, that sends nothing
        assert not torch.equal(copied[0].weight.grad, expected[0])
    model(rows(rank)).square().sum().backward()
    for param, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, other)


def test_a_model_in_use_keeps_it_and_a_copy_does_not(five):
    five.call(held_by_the_model)


def dtypes():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    for dtype in torch.float64, torch.complex64, torch.complex128:
        model = layers(dtype=dtype)
        expected = gradients_alone(copy.deepcopy(model), dtype=dtype)
        parallel = DDP(model, group, bucket_bytes=SMALL, check_finite=True)
        model(rows(rank, dtype)).abs().square().sum().backward()
        for param, other in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad, other)
        model.zero_grad()
        with pytest.raises(RuntimeError, match="has a gradient on rank 0, but none on rank 1"):
            model[: 3 - rank](rows(rank, dtype)).abs().sum().backward()
            parallel.synchronize()


def test_double_and_complex_parameters(five):
    five.call(dtypes)


def failing(ranks_that_fail):
    """A backward that fails with buckets in flight, not the same on both ranks: what each rank is
    told, and how long it took; and whether the step after is right."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=30))
    others, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, fails = layers(4), [rank in ranks_that_fail]
    expected = gradients_alone(copy.deepcopy(model))
    DDP(model, group, bucket_bytes=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(gradient):
        if fails[0]:
            raise KeyError(f"rank {rank}'s own")

    model[1 + rank].weight.register_hook(fail)
    found, start = [], time.monotonic()
    found.append(message(lambda: model(rows(rank)).square().sum().backward()))
    own = time.monotonic() - start
    if rank in ranks_that_fail:
        assert own < 10
        found.append(message(optimizer.step))
    if len(ranks_that_fail) == 2:  # both have been told before either begins the next step
        dist.barrier(others)
    optimizer.zero_grad()
    fails[0] = False
    model(rows(rank)).square().sum().backward()
    for param, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, other)
    return found


@pytest.mark.parametrize("ranks_that_fail", [(0,), (1,), (0, 1)])
def test_a_rank_that_fails_says_why_and_the_next_step_is_right(five, ranks_that_fail):
    for rank, found in enumerate(five.call(failing, ranks_that_fail)[:2]):
        own = [
            f'KeyError: "rank {rank}\'s own"',
            f"RuntimeError: the gradient of parameter {1 + rank}.bias is not yet summed: run "
            "the last backward of a step outside of no_sync(), or call synchronize()",
        ]
        assert found == (
            own
            if rank in ranks_that_fail
            else ["RuntimeError: the backward of another rank has failed in this step"]
        )


class Recomputed(nn.Module):
    """The last layers are recomputed in a backward of their own."""

    def __init__(self, called):
        super().__init__()
        self.layers, self.unused = layers(4), nn.Linear(2, 2)

    def forward(self, x):
        first, *rest = self.layers
        x = checkpoint(rest[0], first(x), use_reentrant=True)
        return checkpoint(nn.Sequential(*rest[1:]), x, use_reentrant=True)


def recomputed():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = Recomputed(True)
    expected = gradients_alone(copy.deepcopy(model))
    DDP(model, group, bucket_bytes=SMALL)
    for _ in range(2):
        model.zero_grad()
        model(rows(rank)).square().sum().backward()
        for param, other in zip(model.parameters(), expected, strict=True):
            assert (other is None and param.grad is None) or torch.equal(param.grad, other)


def test_reentrant_checkpoints_do_not_end_a_backward(five):
    five.call(recomputed)


def hooks_of_others():
    """Each halves every gradient: before the sum, whenever it was registered."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = layers()
    expected = gradients_alone(copy.deepcopy(model))

    def halve(param):
        param.grad.div_(2)

    def replace(param):
        param.grad = param.grad / 2

    def register():
        for param in model.parameters():
            param.register_hook(lambda gradient: gradient / 2)
            param.register_post_accumulate_grad_hook(halve)
            param.register_post_accumulate_grad_hook(replace)

    register()
    parallel = DDP(model, group, bucket_bytes=SMALL)
    for factor in 8, 64, 512:
        for summing in True, False:
            model.zero_grad()
            if summing:
                model(rows(rank)).square().sum().backward()
            else:
                with parallel.no_sync():
                    model(rows(rank)).square().sum().backward()
                parallel.synchronize()
            for param, other in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param.grad * factor, other), (factor, summing)
        register()


def test_hooks_on_gradients_run_before_the_sum(five):
    five.call(hooks_of_others)


class Critic(nn.Module):
    """A model with a buffer that autograd saves."""

    def __init__(self):
        super().__init__()
        self.body = layers()
        self.register_buffer("blur", torch.full((4, 4), 0.25))

    def forward(self, x):
        return torch.tanh(self.body(x @ self.blur))


def gradient_penalty(penalty_first):
    """The norm of a gradient as a part of the loss, before and after the forward of the rest; then
    torch.autograd.grad between a backward and its step."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None

    def penalty(model, x):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    def loss(model, rank):
        x = rows(rank).requires_grad_()
        parts = [lambda: penalty(model, x), lambda: model(x).square().sum()]
        return sum(part() for part in (parts if penalty_first else parts[::-1]))

    model, one = Critic(), Critic()
    parallel = DDP(model, group, bucket_bytes=SMALL)
    loss(model, rank).backward()
    for other in 0, 1:
        loss(one, other).backward()
    for param, expected in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)

    x = rows(rank).requires_grad_()
    before = [param.grad.clone() for param in model.parameters()]
    with parallel.no_sync():
        penalty(model, x)
    assert all(map(torch.equal, before, [param.grad for param in model.parameters()]))
    return message(penalty, model, x)


@pytest.mark.parametrize("penalty_first", [True, False])
def test_a_gradient_penalty(five, penalty_first):
    for error in five.call(gradient_penalty, penalty_first)[:2]:
        assert error.startswith("RuntimeError: parameter body.")
        assert error.endswith(
            "still has the gradient of the step before: call zero_grad() first, which sets it to "
            "None, or torch.autograd.grad in no_sync()"
        )


def transformed():
    """Whether torch.func computes what it does without DDP; whether the next step is right."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = Critic(), Critic()
    DDP(model, group, bucket_bytes=SMALL)
    for way in torch.func.grad, torch.func.jacfwd:
        found, expected = (way(lambda x, m=m: m(x).sum())(rows(rank)) for m in (model, one))
        torch.testing.assert_close(found, expected)
    assert all(param.grad is None for param in model.parameters())
    model(rows(rank)).square().sum().backward()
    for other in 0, 1:
        one(rows(other)).square().sum().backward()
    for param, expected in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)


def test_transforms_of_torch_func_pass_by(five):
    five.call(transformed)
