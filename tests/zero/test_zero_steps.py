"""A step of ZeRO in which something is forgotten, unusual, or done by hooks of others."""

import contextlib
import copy
import gc
import weakref
from collections import defaultdict, namedtuple

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn.utils import parametrizations, prune

from naranhi.zero import Zero

STAGES = 1, 2, 3


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def layers(number=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


def rows(rank, step=0):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def squares(output):
    return output.square().sum()


def beside(make, stage, steps=3, loss=squares, change=None, **options):
    """Return the largest difference of parameters between a sharded model and one process.

    `make()` returns the model, the same one each time. `change(model)` is called for both before
    each step. None on the ranks that are not in the group.
    """
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = make(), make()
    zero = Zero(model, stage, group=group, **options)
    ours = torch.optim.SGD(zero.param_groups, lr=0.01, momentum=0.5)
    theirs = torch.optim.SGD(
        [p for p in one.parameters() if p.requires_grad], lr=0.01, momentum=0.5
    )
    for step in range(steps):
        for m in (model, one) if change else ():
            change(m)
        theirs.zero_grad()
        for place in 0, 1:
            one.train(place == 0)  # a power iteration of spectral_norm is done once in a step
            loss(one(rows(place, step))).backward()
        theirs.step()
        loss(model(rows(rank, step))).backward()
        zero.step(ours)
    with zero.gathered():
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        apart = max((a - b).abs().max().item() for a, b in pairs)
    zero.close()
    return apart


# --- what is forgotten ---------------------------------------------------------------------------


def forgotten(stage):
    """All backwards of a step in no_sync(), on all ranks; an optimizer that steps by itself."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    one = copy.deepcopy(model)
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    with zero.no_sync():
        model(rows(rank)).square().sum().backward()
    zero.step(optimizer)  # which sums what has not been summed
    for place in 0, 1:
        one(rows(place)).square().sum().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    with zero.gathered():
        for param, other in zip(model.parameters(), one.parameters(), strict=True):
            assert torch.equal(param, other)

    found = []
    with zero.no_sync():
        model(rows(rank)).square().sum().backward()
    found.append(zero.clip_grad_norm_(1e9))
    zero.zero_grad()
    model(rows(rank)).square().sum().backward()
    found[0] -= zero.clip_grad_norm_(1e9)  # clip sums as well
    found.append(message(optimizer.step))  # instead of zero.step(optimizer)
    found.append(message(lambda: model(rows(rank)).square().sum().backward()))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_sum_is_made_up_for(five, stage):
    for found in five.call(forgotten, stage)[:2]:
        assert found == [
            0.0,
            (
                "RuntimeError: the gradient of this shard is set by Zero: call step() and "
                "zero_grad() of Zero, not the optimizer's, clip by clip_grad_norm_() of Zero, and "
                "scale a loss by naranhi.precision.LossScaler, not GradScaler"
            ),
            (
                "RuntimeError: the gradient of parameter 2.bias is summed and sharded over the "
                "ranks: "
                "use clip_grad_norm_() or shard_gradients() of Zero for it, "
                "and step() or zero_grad() before "
                "another backward (a forward that takes gradients itself has one: "
                "run all of a step's micro-batches in no_sync())"
            ),
        ]


def lost(stage):
    """A reduction that ends in an error: a first `zero_grad` says so, and leaves nothing behind."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    zero = Zero(model := layers(), stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    model(rows(rank)).square().sum().backward()
    ends, failures = zero._gradients.finish, [RuntimeError("connection closed by peer")]

    def finish():
        ends()
        if failures:
            raise failures.pop()

    zero._gradients.finish = finish
    said = message(zero.zero_grad)
    model(rows(rank)).square().sum().backward()
    zero.step(optimizer)
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_while_a_step_is_discarded_leaves_nothing_of_it(five, stage):
    assert five.call(lost, stage)[:2] == ["RuntimeError: connection closed by peer"] * 2


def other_parameters(stage):
    """Unfrozen later, replaced, added; frozen later beside others, and all of a model."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found = []

    def unfreeze(model, zero):
        model[0].requires_grad_(True)

    def replace(model, zero):
        model[1] = nn.Linear(4, 4)

    def replace_in_no_sync(model, zero):
        model[1] = nn.Linear(4, 4)
        with zero.no_sync():
            model(rows(rank)).square().sum().backward()
        zero.synchronize()

    def add(model, zero):
        model.append(nn.Linear(4, 4))

    def freeze(model, zero):
        model[1].weight.requires_grad_(False)

    for change in unfreeze, replace, replace_in_no_sync, add, freeze:
        model = layers()
        model[0].requires_grad_(change is not unfreeze)
        zero = Zero(model, stage, group=group)
        optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
        model(rows(rank)).square().sum().backward()
        zero.step(optimizer)

        def step(change=change, model=model, zero=zero, optimizer=optimizer):
            change(model, zero)
            model(rows(rank)).square().sum().backward()
            zero.step(optimizer)

        found.append(message(step))

    # A model that is frozen while another one is trained through it, as in adversarial training.
    model, other = layers(), layers()
    zero, of_other = Zero(model, stage, group=group), Zero(other, stage, group=group)
    model.requires_grad_(False)
    model(other(rows(rank))).square().sum().backward()
    of_other.step(torch.optim.SGD(of_other.param_groups, lr=0.1))
    model.requires_grad_(True)
    model(other(rows(rank)).detach()).square().sum().backward()
    zero.step(torch.optim.SGD(zero.param_groups, lr=0.1))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_is_trained_or_frozen_later_is_named(five, stage):
    end = (
        "was unfrozen, added or replaced after Zero was made: call close() on Zero, and make a new "
        "one"
    )
    for found in five.call(other_parameters, stage)[:2]:
        assert found == [
            *[
                f"RuntimeError: parameter {name} {end}"
                for name in ("0.weight", "1.weight", "1.weight", "3.weight")
            ],
            "RuntimeError: parameter 1.weight was frozen after Zero was made: close() that Zero "
            "and make a new one",
        ]


def let_go(stage, precision, closed):
    """How many of some models, and of the memory of their shards, are still there."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    there = []
    for _ in range(3):
        model = layers()
        zero = Zero(model, stage, group=group, precision=precision)
        optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
        model(rows(rank)).square().sum().backward()
        zero.step(optimizer)
        model.kept = model(rows(rank))  # with its graph, whose hooks know Zero
        model[1].kept = model[1].forward(rows(rank).to(model[1].weight)) if stage < 3 else None
        flat = zero.flats[0]
        there += [
            weakref.ref(one)
            for one in (model, model[0].weight, zero, flat, flat.whole, flat.shard, flat.gradients)
        ]
        if closed:
            zero.close()
        del model, zero, optimizer, flat
    gc.collect()
    return sum(one() is not None for one in there)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_what_is_let_go_is_freed(five, stage, precision, closed):
    assert five.call(let_go, stage, precision, closed)[:2] == [0, 0]


def held_by_the_model(stage):
    """Zero is let go, the model goes on: it is sharded all the same."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = layers()
    one = copy.deepcopy(model)
    reference = weakref.ref(Zero(model, stage, group=group))
    gc.collect()
    assert torch.equal(model(rows(rank)), one(rows(rank)))
    reference().close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_in_use_keeps_it(five, stage):
    five.call(held_by_the_model, stage)


# --- gradients that are elsewhere ----------------------------------------------------------------


def torchs_clipping(stage):
    """What is said to who looks for gradients where torch would have them."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    found = set()
    for _ in range(2):
        model(rows(rank)).square().sum().backward()
        params = [*model.parameters()]
        found |= {
            message(nn.utils.clip_grad_norm_, params, 1.0),
            message(nn.utils.clip_grad_norm_, params, 1.0, foreach=False),
            message(nn.utils.clip_grad_value_, params, 1.0),
            message(nn.utils.get_total_norm, [param.grad for param in params]),
            message(lambda params=params: sum(param.grad.norm() for param in params)),
            message(lambda params=params: params[0].grad.isnan().any()),
            message(torch.optim.SGD(params, lr=0.1).step),
            repr(params[0].grad),
        }
        zero.step(optimizer)
        assert all(param.grad is None for param in params)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_clipping_is_refused(five, stage):
    text = (
        "the gradient of parameter 0.weight is summed and sharded over the ranks: "
        "use clip_grad_norm_() "
        "or shard_gradients() of Zero for it, and step() or zero_grad() before another "
        "backward (a forward that takes gradients itself has one: run all of a step's "
        "micro-batches in no_sync())"
    )
    assert five.call(torchs_clipping, stage)[:2] == [{f"RuntimeError: {text}", f"<{text}>"}] * 2


def zeroed_by_the_model(stage):
    """Leave a step out with the model's zero_grad(), which does not know of the sums; then with
    Zero's."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    zero = Zero(model, stage, group=group)
    model(rows(rank)).square().sum().backward()
    model.zero_grad()
    error = message(lambda: model(rows(rank)).square().sum().backward())
    zero.zero_grad()
    norms = []
    for _ in range(2):
        model(rows(rank)).square().sum().backward()
        norms.append(zero.clip_grad_norm_(1e9))
        zero.zero_grad()
    assert norms[0] == norms[1] > 0
    return error


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_beside_sums_of_the_step_is_refused(five, stage):
    for error in five.call(zeroed_by_the_model, stage)[:2]:
        assert error == (
            "RuntimeError: parameter 2.bias gets a gradient, but this step's gradients are summed "
            "already: call step() or zero_grad() of Zero before another backward"
        )


def zeroed_by_the_optimizer(stage):
    """Discard a micro-batch with the optimizer's zero_grad(), which does not know of it; then what
    else would use the gradients of shards, which are not there between two steps."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def backward(step):
        squares(model(rows(rank, step))).backward()

    errors = []
    for use in lambda: backward(1), zero.synchronize:
        with zero.no_sync():
            backward(0)
        optimizer.zero_grad()
        errors.append(message(use))
        zero.zero_grad()
        optimizer.zero_grad()  # as often as one likes, when there is nothing to discard
    norms = []
    for discarded in False, True:
        if discarded:
            with zero.no_sync():
                backward(0)
            zero.zero_grad()
        backward(1)
        norms.append(zero.clip_grad_norm_(1e9))
        zero.zero_grad()
    assert norms[0] == norms[1] > 0

    scaler.scale(squares(model(rows(rank)))).backward()
    shards = [message(scaler.unscale_, optimizer), message(optimizer.step)]
    zero.step(optimizer)
    optimizer.zero_grad()
    backward(1)
    zero.step(optimizer)
    return errors, shards


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_and_step_of_the_optimizer_are_refused_by_name(five, stage):
    for errors, shards in five.call(zeroed_by_the_optimizer, stage)[:2]:
        assert errors == 2 * [
            "RuntimeError: zero_grad() of the optimizer does not discard what the backwards of "
            "this step have accumulated: call zero_grad() of Zero"
        ]
        assert shards == 2 * [
            "RuntimeError: the gradient of this shard is set by Zero: call step() and zero_grad() "
            "of Zero, not the optimizer's, clip by clip_grad_norm_() of Zero, and scale a loss by "
            "naranhi.precision.LossScaler, not GradScaler"
        ]


def stale(stage, precision):
    """A backward of a forward that was before the last step."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    zero = Zero(model, stage, precision=precision, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    early, late = squares(model(rows(rank))), squares(model(rows(rank, 1)))
    early.backward()
    zero.step(optimizer)
    error = message(late.backward)
    zero.zero_grad()
    model(rows(rank)).square().sum().backward()
    zero.step(optimizer)
    return error


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_from_before_the_step_is_refused(five, stage, precision):
    for error in five.call(stale, stage, precision)[:2]:
        assert error and "modified by an inplace operation" in error


# --- hooks and parametrizations ------------------------------------------------------------------


def gradient_hooks(stage):
    """Hooks on gradients, made before Zero and after it, each of which halves."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = layers(), layers()
    for place in 0, 1:
        one(rows(place)).square().sum().backward()
    expected = nn.utils.get_total_norm([param.grad for param in one.parameters()]).item()

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
    zero = Zero(model, stage, group=group)
    for factor in 8, 64:
        for sync in True, False:
            if sync:
                model(rows(rank)).square().sum().backward()
            else:
                with zero.no_sync():
                    model(rows(rank)).square().sum().backward()
            norm = zero.clip_grad_norm_(1e9) * factor
            assert norm == pytest.approx(expected, rel=1e-6), (factor, sync)
            zero.zero_grad()
        register()  # between two steps
    loss = model(rows(rank)).square().sum()
    register()  # between forward and backward
    loss.backward()
    assert zero.clip_grad_norm_(1e9) * 4096 == pytest.approx(expected, rel=1e-6)
    zero.zero_grad()

    def take_away(param):
        param.grad = None

    model[1].bias.register_post_accumulate_grad_hook(take_away)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 1\.bias is gone: a hook on it"):
        model(rows(rank)).square().sum().backward()


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_on_gradients_run_before_the_sum(five, stage):
    five.call(gradient_hooks, stage)


def spectral(model):
    nn.utils.spectral_norm(model[0])
    parametrizations.spectral_norm(model[1])


def weight(model):
    nn.utils.weight_norm(model[0])
    parametrizations.weight_norm(model[1])


def pruned(model):
    prune.random_unstructured(model[0], "weight", 0.5)


def orthogonal(model):
    parametrizations.orthogonal(model[1])


def module_hooks(model):
    """Which read the weights before and after a forward, and change what goes in and out."""
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: (args[0] + layer.weight.mean(),))
        layer.register_forward_pre_hook(
            lambda layer, args: (args[0] * layer.weight.square().mean(),), prepend=True
        )
        layer.register_forward_hook(lambda layer, args, output: output + layer.weight.sum(1))
        layer.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * 2,))
    model.register_forward_hook(lambda model, args, output: output * 2)


CHANGES = {
    "spectral norm": spectral,
    "weight norm": weight,
    "pruned": pruned,
    "orthogonal": orthogonal,
    "hooks": module_hooks,
}


def changed(stage, kind, when):
    """A model with parametrizations or hooks, from before Zero or (hooks) after it."""
    change, done = CHANGES[kind], []
    if when == "before":

        def make():
            model = layers()
            change(model)
            return model

        return beside(make, stage)
    return beside(layers, stage, change=lambda m: m in done or (change(m), done.append(m)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, when", [*((kind, "before") for kind in CHANGES), ("hooks", "after")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_parametrizations_and_hooks_of_modules(five, stage, kind, when):
    assert five.call(changed, stage, kind, when)[0] <= 2e-6


# --- what units take and give --------------------------------------------------------------------


Pair = namedtuple("Pair", "x extra")


class Exotic(dict):
    """Cannot be made from a dict alone."""

    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class Adds(nn.Module):
    """Takes containers of several kinds, and adds to those that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair, losses, table, exotic):
        assert type(table) is defaultdict and exotic.name == "a name" and type(pair) is Pair
        y = self.layer(pair.x) + table["x"] + exotic["y"] + sum(losses)
        losses.append(y.tanh().mean())
        table["seen"].append(y)  # its default is a list
        table.pop("gone", None)
        exotic["y"] = exotic["y"] + 1
        return y


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(4, 4), nn.ModuleList([Adds(), Adds()])

    def forward(self, x):
        x = self.first(x)
        losses, table = [x.sum()], defaultdict(list, x=x, gone=x)
        exotic, kept = Exotic("a name", {"y": x}), losses
        for part in self.parts:
            x = part(Pair(x, None), losses, table, exotic)
        assert kept is losses and len(losses) == 3 and len(table["seen"]) == 2
        assert "gone" not in table
        return x.sum() + sum(losses) + sum(one.sum() for one in table["seen"]) + exotic["y"].sum()


def containers(stage):
    return beside(Containers, stage, loss=lambda output: output)


@pytest.mark.parametrize("stage", STAGES)
def test_containers_are_those_of_the_caller(five, stage):
    assert five.call(containers, stage)[0] <= 1e-6


class Penalized(nn.Module):
    """Puts a penalty into its caller's list, by a layer that runs last, and first in a backward."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, penalties):
        y = self.layer(x).tanh()
        penalties.append(self.last(y).square().sum())
        return y


class Penalties(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Penalized(), Penalized()])

    def forward(self, x):
        penalties = []
        for part in self.parts:
            x = part(x, penalties)
        return sum(penalties)


def penalties_of_a_list(stage):
    return beside(Penalties, stage, loss=lambda output: output)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_may_begin_at_what_a_unit_has_put_into_a_list(five, stage):
    assert five.call(penalties_of_a_list, stage)[0] <= 1e-6


class Scaled(nn.Module):
    """Buffers in fp32 in the arithmetic between units, and in that of the root."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        y = self.second({"unused": 0} and self.first(x + self.table) * self.table)
        return (y + self.table) @ self.out.to(self.table.dtype)


def fp32_buffers(stage):
    """In mixed precision each unit computes in bf16, whatever it is given; as fully_shard does."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = Scaled(), Scaled()
    zero = Zero(model, stage, precision="bf16", group=group)
    x = rows(rank)
    output = model(x)
    low = copy.deepcopy(one)
    for layer in low.first, low.second:
        layer.bfloat16()
    y = low.first((x.bfloat16() + low.table).bfloat16())
    y = low.second((y * low.table).bfloat16())
    expected = (y + low.table) @ low.out.bfloat16().float()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.square().sum().backward()
    zero.step(torch.optim.SGD(zero.param_groups, lr=0.1))


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_in_fp32_beside_mixed_precision(five, stage):
    five.call(fp32_buffers, stage)


class InPlace(nn.Module):
    """A unit that changes its input in place, as fully_shard does not allow either."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        return self.second(self.first(x))


def in_place(stage):
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = InPlace()
    Zero(model, stage, group=group)
    return message(model, rows(rank))


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_that_changes_its_input_in_place_is_refused(five, stage):
    for found in five.call(in_place, stage)[:2]:
        assert "is a view and is being modified inplace" in found


# --- compiled ------------------------------------------------------------------------------------


def compiled(stage, how):
    """Layers, or all, compiled before Zero: the difference, and whether hooks were compiled."""
    torch._dynamo.reset()
    traced = []

    def make():
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
        if how == "layers":
            return nn.Sequential(*(torch.compile(part, backend="aot_eager") for part in parts))
        model = nn.Sequential(*parts)
        for module in model if how == "layers in place" else [model]:
            module.compile(backend="aot_eager")
        return model

    def note(*event):
        traced.append(torch.compiler.is_compiling())

    return beside(make, stage, on_event=note), set(traced)


@pytest.mark.parametrize("how", ["layers", "layers in place", "all in place"])
@pytest.mark.parametrize("stage", STAGES)
def test_compiled_layers(five, stage, how):
    apart, traced = five.call(compiled, stage, how)[0]
    assert apart <= 1e-6 and traced == {False}


# --- other backwards -----------------------------------------------------------------------------


def under_autocast(stage, backwards):
    """Two micro-batches in one block of autocast, which keeps casts of weights until its end. The
    norms of two steps, and those in one process."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    one = copy.deepcopy(model)
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    optimizer_of_one = torch.optim.SGD(one.parameters(), lr=0.1)

    def loss(model, x):
        return model(x).float().square().sum()

    def accumulate(model, no_sync, ranks, step):
        """One block for the forwards of a rank, and perhaps its backwards."""
        for place in ranks:
            first, second = rows(place, step), rows(place, step + 10)
            if backwards == "inside":
                with torch.autocast("cpu", torch.bfloat16):
                    with no_sync():
                        loss(model, first).backward()
                    loss(model, second).backward()
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    losses = loss(model, first), loss(model, second)
                with no_sync():
                    losses[0].backward()
                losses[1].backward()

    norms = []
    for number in range(2):
        accumulate(model, zero.no_sync, [rank], number)
        accumulate(one, contextlib.nullcontext, [0, 1], number)
        expected = nn.utils.get_total_norm([param.grad for param in one.parameters()]).item()
        norms.append((zero.clip_grad_norm_(1e9), expected))
        zero.step(optimizer)
        optimizer_of_one.step()
        optimizer_of_one.zero_grad()
    with zero.gathered():
        for param, other in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(param, other, rtol=0.02, atol=0.01)
    return norms


@pytest.mark.parametrize("backwards", ["inside", "outside"])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_in_one_block_of_autocast(five, stage, backwards):
    for norms in five.call(under_autocast, stage, backwards)[:2]:
        for norm, expected in norms:
            assert norm == pytest.approx(expected, rel=0.01)


def input_gradients(stage):
    """torch.autograd.grad through the model, before a step's backward and after it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = layers(), layers()
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    x = rows(rank).requires_grad_()

    def look():
        for m in model, one:
            (gradient,) = torch.autograd.grad(m(x).square().sum(), x)
            yield gradient

    for _ in range(2):
        for _ in range(2):
            ours, other = look()
            assert torch.equal(ours, other)
        model(x).square().sum().backward()
        ours, other = look()
        assert torch.equal(ours, other)
        zero.step(optimizer)
        theirs.zero_grad()
        for place in 0, 1:
            one(rows(place)).square().sum().backward()
        theirs.step()
    with zero.gathered():
        for param, other in zip(model.parameters(), one.parameters(), strict=True):
            assert torch.equal(param, other)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_inputs_are_no_step(five, stage):
    five.call(input_gradients, stage)


def gradient_penalty(stage, micro_batches):
    """The norm of a gradient as a part of the loss, made before the forward of the rest."""

    def loss(model, x):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return model(x).square().sum() + gradient.square().sum()

    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = layers(), layers()
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(2):
        theirs.zero_grad()
        for place in 0, 1:
            loss(one, rows(place, step)).backward()
            if micro_batches:
                loss(one, rows(place, step + 5)).backward()
        theirs.step()
        if micro_batches:
            with zero.no_sync():
                loss(model, rows(rank, step)).backward()
                last = loss(model, rows(rank, step + 5))  # whose autograd.grad is not the last
            last.backward()
        else:
            loss(model, rows(rank, step)).backward()
        zero.step(optimizer)
    for param, other in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(param, other)


@pytest.mark.parametrize("micro_batches", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_penalty_before_the_forward(five, stage, micro_batches):
    five.call(gradient_penalty, stage, micro_batches)


def retained(stage, together):
    """A graph that is kept for another backward, together with a later graph or alone."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers()
    zero = Zero(model, stage, group=group)

    def twice(model, rank, no_sync):
        early = squares(model(rows(rank)))
        with no_sync():
            early.backward(retain_graph=True)
            if not together:
                early.backward()
        late = squares(model(rows(rank, 1)))
        (early + late if together else late).backward()

    error = message(twice, model, rank, zero.no_sync)
    if error is None:
        for place in 0, 1:
            twice(one, place, contextlib.nullcontext)
        expected = nn.utils.get_total_norm([param.grad for param in one.parameters()]).item()
        assert zero.clip_grad_norm_(1e9) == pytest.approx(expected)
    zero.zero_grad()
    return error


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_kept_graph_needs_a_backward_of_its_own(five, stage, together):
    for error in five.call(retained, stage, together)[:2]:
        assert error == (
            "RuntimeError: parameter 2.bias gets a gradient after its unit's backward has ended: "
            "use it outside the forward only after the forward, and run a separate backward for "
            "graphs from before the last backward"
            if together
            else None
        )


def different_options():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    return [
        message(Zero, layers(), 2, group=group, check_finite=bool(rank)),
        message(Zero, layers(), 2, group=group, buffers=bool(rank)),
    ]


def test_options_that_differ_are_told(five):
    for found in five.call(different_options)[:2]:
        assert found == [
            "ValueError: check finite: False on rank 0, True on rank 1",
            "ValueError: buffers: False on rank 0, True on rank 1",
        ]
