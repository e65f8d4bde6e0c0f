"""Our loss scaler beside torch.amp.GradScaler."""

import pytest
import torch
from torch import nn

from naranhi.precision import LossScaler

GRADIENTS = [1.0, 2.0, float("inf"), 1.0, 3.0, 1.0, 1.0, float("nan"), float("-inf"), 2.0, 1.0, 1.0]


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("growth, backoff", [(2.0, 0.5), (4.0, 0.25)])
def test_every_scale_and_step_of_torch(interval, growth, backoff):
    ours = LossScaler(2.0**8, growth, backoff, interval)
    theirs = torch.amp.GradScaler("cpu", 2.0**8, growth, backoff, interval)
    params = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in "ab"]
    optimizers = [torch.optim.SGD([param], lr=0.125) for param in params]
    for gradient in GRADIENTS:
        theirs.scale(torch.zeros(1))
        for param, scale in zip(params, (ours.scale, theirs.get_scale()), strict=True):
            param.grad = torch.tensor([gradient, 0.25]) * scale
        finite = ours.unscale_([params[0].grad])
        if finite:
            optimizers[0].step()
        ours.update(finite)
        theirs.step(optimizers[1])
        theirs.update()
        assert ours.scale == theirs.get_scale()
        assert torch.equal(*params)


def test_unscaling_divides_and_looks_at_all():
    scaler = LossScaler(4.0)
    first, second = torch.tensor([4.0, 8.0]), torch.tensor([2.0])
    assert scaler.unscale_([first, second]) is True
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [0.5])
    assert scaler.unscale_([torch.tensor([float("nan")]), torch.ones(1)]) is False
    assert scaler.unscale_([torch.ones(1), torch.tensor([float("inf")])]) is False
    last = torch.tensor([4.0])
    assert scaler.unscale_([torch.tensor([float("inf")]), last]) is False
    assert last.item() == 1.0, "the rest is unscaled all the same"


def test_an_overflow_starts_the_count_again():
    scaler = LossScaler(8.0, interval=2)
    for finite, scale in ((True, 8), (False, 4), (True, 4), (True, 8), (True, 8), (True, 16)):
        scaler.update(finite)
        assert scaler.scale == scale


def test_a_resumed_scaler_grows_as_if_it_had_never_stopped():
    whole, resumed = LossScaler(8.0, interval=5), LossScaler(8.0, interval=5)
    for _ in range(4):
        for _ in range(3):
            whole.update(True)
            resumed.update(True)
        state = resumed.state_dict()
        resumed = LossScaler(1.0, interval=5)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == whole.state_dict()
    assert whole.scale == 32.0


def test_sparse_gradients_are_unscaled():
    sparse = torch.eye(2).mul(8.0).to_sparse()
    assert LossScaler(4.0).unscale_([sparse]) is True
    assert torch.equal(sparse.to_dense(), torch.eye(2).mul(2.0))
    assert LossScaler(4.0).unscale_([torch.eye(2).mul(float("inf")).to_sparse()]) is False


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.0}, {"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}, {"interval": 0}],
)
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match="expected scale > 0, growth > 1, 0 < backoff < 1"):
        LossScaler(**options)


def test_a_scale_grows_no_further_than_fp32():
    ours = LossScaler(2.0**126, interval=1)
    theirs = torch.amp.GradScaler("cpu", 2.0**126, growth_interval=1)
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for _ in range(3):
        theirs.scale(torch.zeros(1))
        param.grad = torch.zeros(1)
        theirs.step(optimizer)
        theirs.update()
        ours.update(True)
        assert ours.scale == theirs.get_scale()
    assert ours.scale == 2.0**127


def test_a_scale_that_no_gradient_fits_is_refused():
    scaler = LossScaler(2.0**-125)
    scaler.update(False)
    assert scaler.unscale_([torch.tensor([2.0**-126])])
    with pytest.raises(RuntimeError, match=r"fallen to 5.88e-39, and .* precision.first_nonfinite"):
        scaler.update(False)
