"""A sharded model as a whole: what is taken out of a block stays, what is written in one is
trained, and at other times both are refused."""

import contextlib
import copy
import io
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi.zero import Zero, children

KINDS = list(product([1, 2, 3], ["fp32", "bf16"]))


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def layers(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4))
    model[1].weight.requires_grad_(False)
    model.register_buffer("table", torch.randn(4))
    return model


def same(values, model):
    return all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())


def taken_out(stage, precision):
    """All that can be taken out of a block: used after it, and after what follows."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = layers(), layers()
    zero = Zero(model, stage, precision=precision, group=group)
    with zero.gathered():
        state = model.state_dict()
        views = {name: param.detach() for name, param in model.named_parameters()}
        part, copied = model[0].state_dict(), copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        late = copy.copy(state)
    deep, saved = copy.deepcopy(late), io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert all(value.dtype == torch.float32 for value in state.values())
    for values in state, loaded, deep, copied.state_dict(), pickled.state_dict():
        assert same(values, one)
    assert same({f"0.{name}": value for name, value in part.items()}, one)
    assert same(views, one)
    x = torch.randn(4, 4)
    torch.testing.assert_close(copied(x), one(x))  # an ordinary model

    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    model(x).square().sum().backward()
    zero.step(optimizer)
    with zero.gathered():
        assert not torch.equal(model[0].weight, one[0].weight)
    if stage == 3 or precision == "bf16":  # else they are the parameters' own, as in any model
        assert same(state, one)


@pytest.mark.parametrize("stage, precision", KINDS)
def test_what_is_taken_out_of_a_block_stays(five, stage, precision):
    five.call(taken_out, stage, precision)


def forward_inside(stage, precision):
    """Forwards in a block, with a backward in it or after it; the block does not end by them."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one, found = layers(), layers(), []
    zero = Zero(model, stage, precision=precision, group=group)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    with torch.inference_mode(), zero.gathered():  # after which the model is trained all the same
        torch.testing.assert_close(model(x), one(x))
    with zero.gathered():
        with torch.no_grad():
            output = model(x)
        torch.testing.assert_close(output, one(x))  # with the masters
        assert same({name: p.detach() for name, p in model.named_parameters()}, one)
        with zero.gathered():
            pass
        assert same({name: p.detach() for name, p in model.named_parameters()}, one)
        if precision == "bf16":
            found.append(message(model, x))
        found.append(message(zero.gathered(write=True).__enter__))
        found.append(message(zero.step, torch.optim.SGD(zero.param_groups, lr=0.1)))
    if precision == "bf16":
        return found
    for within in True, False:
        with zero.gathered():
            loss = model(x).square().sum()
            if within:
                loss.backward()
                assert same({name: p.detach() for name, p in model.named_parameters()}, one)
        if not within:
            loss.backward()
        norm = zero.clip_grad_norm_(1e9)
        one.zero_grad()
        for other in 0, 1:
            other = torch.randn(4, 4, generator=torch.Generator().manual_seed(other))
            one(other).square().sum().backward()
        expected = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.requires_grad])
        assert norm == pytest.approx(expected.item(), rel=1e-5)
        zero.zero_grad()
    loss = model(x).square().sum()  # and a block between forward and backward
    with zero.gathered():
        assert same({name: p.detach() for name, p in model.named_parameters()}, one)
    loss.backward()
    assert zero.clip_grad_norm_(1e9) == pytest.approx(expected.item(), rel=1e-5)
    return found


@pytest.mark.parametrize("stage, precision", KINDS)
def test_a_forward_does_not_end_a_block(five, stage, precision):
    masters = [
        "RuntimeError: inside of gathered() parameters are the masters in fp32: leave the "
        "block before a forward that is to be trained"
    ] * (precision == "bf16")
    assert (
        five.call(forward_inside, stage, precision)[:2]
        == [
            [
                *masters,
                "RuntimeError: this model is in gathered(write=False): leave that block first",
                "RuntimeError: step() inside of a gathered() block: leave the block first",
            ]
        ]
        * 2
    )


def loaded(stage, precision, how):
    """Weights that are written in a block, and a step from there, beside one process."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers(seed=1)
    zero = Zero(model, stage, precision=precision, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.125)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()  # there is a step before
    zero.step(optimizer)

    if how == "load_state_dict":
        with zero.gathered(write=True):
            model.load_state_dict(one.state_dict())
    elif how == "in place":
        with zero.gathered(write=True), torch.no_grad():
            for param, other in zip(model.parameters(), one.parameters(), strict=True):
                param.copy_(other)
    elif how == "data":
        with zero.gathered(write=True):
            for param, other in zip(model.parameters(), one.parameters(), strict=True):
                param.data = other.detach().clone()
    elif how == "a part":
        with zero.gathered(write=True):
            for part, other in zip(model, one, strict=True):
                part.load_state_dict(other.state_dict())
    else:
        model.load_state_dict(one.state_dict())  # in fp32 at stages 1 and 2
    with zero.gathered():
        assert same({name: p.detach() for name, p in model.named_parameters()}, one)
    low = one if precision == "fp32" else copy.deepcopy(one).bfloat16()
    with torch.no_grad():  # with what is frozen, too
        torch.testing.assert_close(model(x), low(x.to(low[0].weight.dtype)).float())
    model(x).square().sum().backward()
    norm = zero.clip_grad_norm_(1e9)
    total = 0
    for place in 0, 1:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(place))
        total = total + low(x.to(low[0].weight.dtype)).float().square().sum()
    total.backward()
    expected = nn.utils.get_total_norm([p.grad for p in low.parameters() if p.requires_grad])
    assert norm == pytest.approx(expected.item(), rel=1e-5 if precision == "fp32" else 0.05)
    zero.step(torch.optim.SGD(zero.param_groups, lr=0.0))
    with zero.gathered():
        assert same({name: p.detach() for name, p in model.named_parameters()}, one)


@pytest.mark.parametrize(
    "stage, precision, how",
    [
        *product([1, 2, 3], ["fp32", "bf16"], ["load_state_dict", "in place", "data", "a part"]),
        (1, "fp32", ""),
        (2, "fp32", ""),
    ],
)
def test_what_is_written_in_a_block_is_trained(five, stage, precision, how):
    five.call(loaded, stage, precision, how)


def outside(stage):
    """A model whose parameters were put into other memory: before a forward, a step, a reading."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None

    def forward(model, zero):
        model(torch.ones(2, 4))

    def step(model, zero):
        zero.step(torch.optim.SGD(zero.param_groups, lr=0.1))

    def read(model, zero):
        with zero.gathered():
            pass

    def assign(model):
        model[0].weight.data = torch.ones(4, 4)

    found = []
    for change in assign, nn.Module.double:
        for use in (forward, read, step)[: 3 if change is assign else 2]:
            model = layers()
            zero = Zero(model, stage, group=group)
            model(torch.ones(2, 4)).sum().backward()
            if use is not step:
                zero.zero_grad()
            change(model)
            found.append(message(use, model, zero))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_in_other_memory_are_refused_by_name(five, stage):
    error = "RuntimeError: parameter 0.weight is no longer in the memory that Zero trains"
    for found in five.call(outside, stage)[:2]:
        assert all(text and text.startswith(error) for text in found), found


def backward_inside(precision):
    """A backward in a block, of a forward from before it, at stage 3; then a step of its own."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found, norms = [], []
    for nested in False, True:
        model = layers()
        zero = Zero(model, 3, precision=precision, group=group)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
        loss = model(x).square().sum()
        with zero.gathered(), zero.gathered() if nested else contextlib.nullcontext():
            found.append(message(loss.backward))
        for _ in range(2):
            zero.zero_grad()
            model(x).square().sum().backward()
            norms.append(zero.clip_grad_norm_(1e9))
    assert len({*norms}) == 1 and norms[0] > 0
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_in_a_block_of_a_forward_from_before_it_is_refused(five, precision):
    for found in five.call(backward_inside, precision)[:2]:
        assert found == 2 * [
            "RuntimeError: inside of gathered() a backward cannot go through a forward from before "
            "the block, whose parameters stage 3 has freed: run the backward outside of the block"
        ]


def written_outside(stage, precision):
    """Writes in place outside of a block: what the next use says, and what is trained after it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers()
    zero = Zero(model, stage, precision=precision, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.0)

    def clamp():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)

    def fill():
        nn.init.constant_(model[2].weight, 7.0)

    def scale_together():
        torch._foreach_mul_([model[1].weight, model[3].bias], 0.5)  # the first is frozen

    def forward():
        model(torch.ones(2, 4))

    def read():
        with zero.gathered():
            pass

    def step():
        zero.step(optimizer)

    found = {}
    for write in clamp, fill, scale_together:
        for use in forward, read, step:
            model(torch.ones(2, 4)).sum().backward()
            if use is not step:
                zero.zero_grad()
            with torch.no_grad():
                write()
            found[write.__name__, use.__name__] = message(use)
            zero.zero_grad()
            zero.refresh()
    with zero.gathered(), torch.no_grad():
        unchanged = same({name: p.detach() for name, p in model.named_parameters()}, one)
        clamp()  # lost, as `gathered` says, and no error
    with zero.gathered(write=True), torch.no_grad():
        fill()
    forward()
    with zero.gathered():
        assert (model[2].weight == 7).all()
    return found, unchanged


@pytest.mark.parametrize("stage, precision", KINDS)
def test_a_write_outside_of_a_block_is_refused_where_it_would_be_lost(five, stage, precision):
    kept = stage < 3 and precision == "fp32"
    what = (
        "this model is sharded"
        if stage == 3
        else "this model's parameters are copies in bf16 of the masters in fp32"
    )
    names = {"clamp": "0.weight", "fill": "2.weight", "scale_together": "1.weight"}
    for found, unchanged in five.call(written_outside, stage, precision)[:2]:
        assert unchanged != kept
        for (write, _), text in found.items():
            error = (
                f"RuntimeError: parameter {names[write]} was written while {what}, so the change "
                "is lost: call refresh() of Zero to go on, and write inside of gathered(write=True)"
            )
            assert text == (None if kept else error)


def refused(stage, precision):
    """Reading, loading and copying where that would go wrong; ranks that do not write the same."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers()
    zero = Zero(model, stage, precision=precision, group=group)
    state = layers(seed=1).state_dict()
    found = {
        "state_dict": message(model.state_dict),
        "part": message(model[0].state_dict),
        "deepcopy": message(copy.deepcopy, model),
        "pickle": message(pickle.dumps, model),
        "load": message(model.load_state_dict, one.state_dict()),
        "load part": message(model[0].load_state_dict, one[0].state_dict()),
        "assign": message(model.load_state_dict, one.state_dict(), assign=True),
    }
    with zero.gathered():
        found["load in read"] = message(model.load_state_dict, one.state_dict())
        model.state_dict()
    with zero.gathered(write=True):
        found["assign in write"] = message(model.load_state_dict, state, assign=True)

    def other():
        with zero.gathered(write=True):
            if rank == 1:
                model[2].load_state_dict(layers(seed=1)[2].state_dict())

    def wrong():
        with zero.gathered(write=True):
            model.load_state_dict({**state, "0.weight": torch.ones(5, 5)})

    found["ranks differ"] = message(other)
    if stage == 3 or precision == "bf16":  # else there is no other memory to write into
        with zero.gathered():
            assert same({name: p.detach() for name, p in model.named_parameters()}, one)
        found["raises"] = message(wrong).splitlines()[0]
        with zero.gathered():
            assert same({name: p.detach() for name, p in model.named_parameters()}, one)
    return found


@pytest.mark.parametrize("stage, precision", KINDS)
def test_reading_and_loading_is_refused_where_it_would_go_wrong(five, stage, precision):
    for found in five.call(refused, stage, precision)[:2]:
        what = (
            "this model is sharded"
            if stage == 3
            else "this model's parameters are copies in bf16 of the masters in fp32"
        )
        fine = stage < 3 and precision == "fp32"
        reading = (
            None
            if fine
            else f"RuntimeError: {what}: read it inside of Zero.gathered(), or save it by "
            "naranhi.checkpoint"
        )
        loading = (
            None
            if fine
            else (
                f"RuntimeError: {what}: load into it inside of Zero.gathered(write=True), or load "
                "a checkpoint by naranhi.checkpoint"
            )
        )
        assign = (
            "RuntimeError: load_state_dict(assign=True) would replace the parameters that "
            "Zero has sharded: load without assign"
        )
        error = ("RuntimeError: Error(s) in loading state_dict for Sequential:",)
        assert found == {
            **dict.fromkeys(["state_dict", "part", "deepcopy", "pickle"], reading),
            **dict.fromkeys(["load", "load part", "load in read"], loading),
            **dict.fromkeys(["assign", "assign in write"], assign),
            "ranks differ": "ValueError: rank 0 and rank 1 have different parameter 2.weight",
            **({} if fine else {"raises": error[0]}),
        }


def closed(stage, precision):
    """A closed model is an ordinary one: whole, in fp32, with all that was trained."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model, one = layers(), layers()
    zero = Zero(model, stage, units=list(children(model))[:2], precision=precision, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    x = torch.randn(4, 4)
    model(x).square().sum().backward()
    zero.step(optimizer)
    with zero.gathered():
        state = copy.deepcopy(model.state_dict())
    with zero.gathered():
        error = "close() inside of a gathered() block: leave the block first"
        assert message(zero.close) == f"RuntimeError: {error}"
        assert same(state, model)
    model(x).square().sum().backward()  # and gradients that nobody wants
    zero.close()
    assert all(param.grad is None for param in model.parameters())
    one.load_state_dict(state)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32 and torch.equal(param, state[name])
    for m in model, one, copy.deepcopy(model):
        m(x).square().sum().backward()
    for param, other in zip(model.parameters(), one.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None)
        assert param.grad is None or torch.equal(param.grad, other.grad)
    model.load_state_dict(layers(seed=1).state_dict(), assign=True)
    Zero(model, stage, precision=precision, group=group)


@pytest.mark.parametrize("stage, precision", KINDS)
def test_a_closed_model_is_an_ordinary_one(five, stage, precision):
    five.call(closed, stage, precision)


def copies_of_parts(stage, precision):
    """What is said of copies of the model, of a unit, and of a part of a unit."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    expected = copy.deepcopy(model.state_dict())
    zero = Zero(model, stage, precision=precision, group=group)
    parts = {"": model, "0.": model[0], "0.0.": model[0][0]}
    ways = copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))
    assert message(copy.deepcopy, model[0][1]) is None, "it has no parameters"
    said = [message(way, part) for way in ways for part in parts.values()]
    if stage < 3 and precision == "fp32":
        return said
    with zero.gathered():
        copied = {prefix: way(part) for way in ways for prefix, part in parts.items()}
    zero.close()
    copied |= {f"{prefix} ": copy.deepcopy(part) for prefix, part in parts.items()}
    for prefix, part in copied.items():
        for name, value in part.state_dict().items():
            assert torch.equal(value, expected[prefix.strip() + name])
    return said


@pytest.mark.parametrize("stage, precision", KINDS)
def test_a_part_of_a_model_is_copied_with_its_values_or_not_at_all(five, stage, precision):
    for said in five.call(copies_of_parts, stage, precision)[:2]:
        if stage < 3 and precision == "fp32":
            assert said == [None] * 6
        else:
            assert all("read it inside of Zero.gathered()" in words for words in said)


def closed_twice(stage, precision):
    """How far weights move by a second close(), after steps without Zero."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = layers()
    zero = Zero(model, stage, precision=precision, group=group)
    zero.close()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    trained = copy.deepcopy(model.state_dict())
    zero.close()
    return same(trained, model)


@pytest.mark.parametrize("stage, precision", KINDS)
def test_a_second_close_does_nothing(five, stage, precision):
    assert five.call(closed_twice, stage, precision)[:2] == [True, True]


def transformed(stage, precision):
    """What torch.func computes of a sharded model, inside of a block and outside; then a step."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers()
    zero = Zero(model, stage, precision=precision, group=group)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def computed(model):
        weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def loss(weights, x):
            return torch.func.functional_call(model, weights, (x,)).square().sum()

        by_weights = torch.func.grad(loss)(weights, x)
        by_input = torch.func.grad(lambda x: model(x).square().sum())(x)
        by_row = torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(x)
        with torch.no_grad():
            along, rows = torch.func.jvp(model, (x,), (x,))[1], torch.vmap(model)(x)
        return [*by_weights.values(), by_input, by_row, torch.func.jacrev(model)(x), along, rows]

    expected = computed(one)
    with zero.gathered():
        for found, right in zip(computed(model), expected, strict=True):
            torch.testing.assert_close(found, right)
    said = [
        message(one(model), x)
        for one in (lambda f: torch.func.grad(lambda x: f(x).sum()), torch.vmap)
    ]
    if stage < 3 and precision == "fp32":
        for found, right in zip(computed(model), expected, strict=True):
            torch.testing.assert_close(found, right)
    model(x).square().sum().backward()
    one(x).square().sum().backward()
    norm = nn.utils.get_total_norm([2 * p.grad for p in one.parameters() if p.requires_grad])
    tolerance = 1e-5 if precision == "fp32" else 0.05
    assert zero.clip_grad_norm_(1e9) == pytest.approx(norm.item(), rel=tolerance)
    return said


@pytest.mark.parametrize("stage, precision", KINDS)
def test_transforms_of_torch_func_pass_by(five, stage, precision):
    words = "cannot transform it: do that inside of Zero.gathered()"
    for by_gradients, by_vmap in five.call(transformed, stage, precision)[:2]:
        if stage < 3 and precision == "fp32":
            assert by_gradients is None
        else:
            assert by_gradients.endswith(words)
        assert by_vmap.endswith(words) if stage == 3 else by_vmap is None


def rows_trained(stage):
    """How far the gradients' norm is from one process's, of a model whose rows are mapped."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = layers(), layers()
    zero = Zero(model, stage, group=group)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with zero.gathered():
        torch.vmap(model)(x).square().sum().backward()
    torch.vmap(one)(x).square().sum().backward()
    norm = nn.utils.get_total_norm([2 * p.grad for p in one.parameters() if p.requires_grad])
    return (zero.clip_grad_norm_(1e9) / norm).item()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_goes_through_vmap(five, stage):
    assert five.call(rows_trained, stage)[:2] == pytest.approx([1.0, 1.0])
