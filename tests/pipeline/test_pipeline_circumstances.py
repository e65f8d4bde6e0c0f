"""What decides what a stage returns may change from one step to the next, on every rank or on one.

Each program is some steps and what stands between them; every step is compared with one process.
"""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn

from naranhi import pipeline, schedules

WIDTH, PARTS = 8, 3


class Cast(nn.Linear):
    """Returns the dtype of its weights, whatever it takes, as an embedding does."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Both(nn.Module):
    """Returns a tuple when it trains, and a tensor when it is evaluated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        return (y, x) if self.training else y


class First(nn.Module):
    def forward(self, value):
        return value[0] + value[1] if isinstance(value, tuple) else value


def layers():
    torch.manual_seed(0)
    return [
        Cast(WIDTH, WIDTH),
        Both(),
        First(),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ]


def batch(rows=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(2, rows * PARTS, WIDTH, generator=generator).to(dtype)


def plain(model, inputs, targets):
    """One process: a loop over the micro-batches."""
    total = 0
    for x, y in zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True):
        loss = squared_error(nn.Sequential(*model)(x), y) / len(inputs)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    return total


class Program:
    """The pipeline's layers and one process's, to which the same is done."""

    def __init__(self, ranks):
        self.group, self.rank, self.wrong = first_ranks(ranks), dist.get_rank(), []
        self.mine, self.plain, self.steps = layers(), layers(), 0
        self.pipe = pipeline.Pipeline(
            self.mine, schedules.gpipe(ranks, PARTS), squared_error, group=self.group, timeout=20.0
        )

    def step(self, **options):
        inputs, targets = batch(**options)
        expected = plain(self.plain, inputs, targets)
        found = self.pipe.step(inputs.clone(), targets, len(inputs))
        self.steps += 1
        if found is not None and not torch.equal(found, expected):
            self.wrong.append((self.steps, "loss"))
        own = {id(one) for one in self.pipe.parameters()}
        for (name, one), other in zip(
            nn.ModuleList(self.mine).named_parameters(),
            nn.ModuleList(self.plain).parameters(),
            strict=True,
        ):
            same = (
                one.grad is None
                if other.grad is None
                else (one.grad is not None and torch.equal(one.grad, other.grad))
            )
            if id(one) in own and not same:
                self.wrong.append((self.steps, name))

    def both(self, function):
        for model in (self.mine, self.plain):
            function(nn.ModuleList(model))

    def only(self, function, rank):
        """On that rank alone, which is how a loop over `pipe.parameters()` may look."""
        function(nn.ModuleList(self.plain))
        if self.rank == rank:
            function(nn.ModuleList(self.mine))


def bf16(cache):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


def autocast(program):
    program.step()
    with bf16(False):
        program.step()
    program.step()
    with bf16(True):
        program.step()
    with torch.autocast("cpu", torch.float16):
        program.step()
    program.step()


def autocast_first(program):
    with bf16(False):
        program.step()
    program.step()


def unfreezing(program):
    def freeze(frozen):
        def change(model):
            for number in (0, 1):
                model[number].requires_grad_(not frozen)

        return change

    program.both(freeze(True))
    program.step()
    program.both(freeze(False))
    program.step()
    program.both(freeze(True))
    program.step()


def unfreezing_on_its_rank(program):
    """The second rank does not have those layers, and is not told."""
    program.only(lambda model: model[0].requires_grad_(False), 0)
    program.only(lambda model: model[1].requires_grad_(False), 0)
    program.step()
    program.only(lambda model: model[0].requires_grad_(True), 0)
    program.step()


def checked_before(program):
    for rows, mode in ((4, torch.inference_mode), (2, torch.no_grad)):  # each new to its mode
        for _ in range(2):
            with mode():
                program.step(rows=rows)
            program.step(rows=rows)


def evaluated(program):
    program.step()
    program.both(lambda model: model.eval())
    program.step()
    with torch.no_grad():
        program.step(rows=2)
    program.both(lambda model: model.train())
    program.step()


def other_shapes(program):
    for rows in (4, 2, 5, 4, 5):
        program.step(rows=rows)


def other_dtypes(program):
    program.step()
    program.both(lambda model: model.double())
    program.both(lambda model: model.zero_grad())
    program.step(dtype=torch.float64)
    program.step()  # takes what the first step took
    program.both(lambda model: model.float())
    program.both(lambda model: model.zero_grad())
    program.step()


PROGRAMS = [
    autocast,
    autocast_first,
    unfreezing,
    unfreezing_on_its_rank,
    checked_before,
    evaluated,
    other_shapes,
    other_dtypes,
]


def run(which, ranks):
    """On a rank: what differs from one process, as (number of the step, what)."""
    if dist.get_rank() >= ranks:
        first_ranks(ranks)
        return pipeline.join_group_creation()
    program = Program(ranks)
    with program.pipe:
        PROGRAMS[which](program)
    return program.wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("which", range(len(PROGRAMS)), ids=[one.__name__ for one in PROGRAMS])
def test_steps_in_changing_circumstances(five, which, ranks):
    if PROGRAMS[which] is unfreezing_on_its_rank and ranks == 4:
        ranks = 3  # four would have one of the two layers each
    assert five.call(run, which, ranks) == [[]] * ranks + [None] * (5 - ranks)


# --- what the ranks do not agree on --------------------------------------------------------------


def known_elsewhere(case):
    """On a rank: the error of the last of some steps, in which the ranks are given different
    things, all of which they know."""
    if dist.get_rank() >= 2:
        first_ranks(2)
        return pipeline.join_group_creation()
    program, rank = Program(2), dist.get_rank()
    with program.pipe as pipe:
        program.step(rows=4)
        program.step(rows=2)
        with bf16(False):
            program.step()
        with torch.no_grad():
            program.step()
        grad, rows, context, count, told = True, 4, bf16(False), 12, None
        if case == "shapes":
            rows = (4, 2)[rank]
        elif case == "grad mode":
            grad = rank == 0
        elif case == "targets":
            rows = 4
        inputs, targets = batch(rows)
        if case == "targets":
            targets = targets[:4]
        try:
            with torch.set_grad_enabled(grad):
                if case == "autocast" and rank:
                    with context:
                        pipe.step(inputs, targets, count)
                else:
                    pipe.step(inputs, targets, count)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        program.step()  # nothing has been sent, and so this goes on
        return told, program.wrong


@pytest.mark.parametrize(
    "case, words",
    [
        (
            "shapes",
            "ValueError: the ranks of the pipeline disagree on what they were given: a "
            "micro-batch is torch.float32 (4, 8) on its rank 0, and torch.float32 (2, 8) on its "
            "rank 1",
        ),
        (
            "autocast",
            "ValueError: the ranks of the pipeline disagree on what they were given: autocast "
            "on cpu is False on its rank 0, and torch.bfloat16 on its rank 1",
        ),
        (
            "grad mode",
            "ValueError: the ranks of the pipeline disagree on what they were given: the "
            "grad mode is True on its rank 0, and False on its rank 1",
        ),
        (
            "targets",
            "ValueError: rank 1 of the pipeline: targets: 3 micro-batches of one size cannot "
            "be made of 4 rows",
        ),
    ],
)
def test_ranks_that_were_given_different_things(five, case, words):
    """Said on both, before anything is sent."""
    for told, wrong in five.call(known_elsewhere, case)[:2]:
        assert told == words
        assert wrong == []


class Switch(nn.Module):
    """Returns something else when an attribute says so."""

    def __init__(self):
        super().__init__()
        self.linear, self.wide = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        y = self.linear(x)
        return torch.cat([y, y], 1)[:, : WIDTH + 1] if self.wide else y


def switched():
    """On a rank: the error of a step after a change that nobody can foresee."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    inputs, targets = batch()
    model = [Switch(), nn.Linear(WIDTH, WIDTH)]
    try:
        with pipeline.Pipeline(
            model, schedules.gpipe(2, PARTS), squared_error, group=group, timeout=20.0
        ) as pipe:
            pipe.step(inputs, targets, 12)
            model[0].wide = True
            pipe.step(inputs, targets, 12)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_an_output_that_is_not_as_it_was_tried_is_an_error_that_names_the_layer(five):
    told = five.call(switched)
    assert told[0].startswith(
        "ValueError: layer 0 (Switch) returned torch.float32 (4, 9) requiring a gradient, and "
        "torch.float32 (4, 8) requiring a gradient when it was tried"
    )
    assert "make a new Pipeline" in told[0]
    assert told[1] is not None  # its peer is gone


def frozen_ties():
    """On a rank: whether copies that were frozen when the pipeline was made are tied later on."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    model = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model[2].weight = model[0].weight
    shared = model[0].weight.requires_grad_(False)
    expected = copy.deepcopy(model)
    inputs, targets = batch()
    found = []
    with pipeline.Pipeline(
        model, schedules.gpipe(2, PARTS), squared_error, group=group, timeout=20.0
    ) as pipe:
        pipe.step(inputs, targets, 12)
        found.append(shared.grad is None)
        for one in (shared, expected[0].weight):
            one.requires_grad_(True)
        pipe.step(inputs, targets, 12)
        plain(expected, inputs, targets)
        found.append(torch.allclose(shared.grad, expected[0].weight.grad, atol=1e-6))
        shared.requires_grad_(rank == 0)
        with pytest.raises(ValueError, match=r"requires_grad of 0\.weight is True on its rank 0"):
            pipe.step(inputs, targets, 12)
    return found


def test_frozen_copies_are_tied_when_they_are_unfrozen(five):
    assert five.call(frozen_ties)[:2] == [[True, True], [True, True]]


def closed():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    inputs, targets = batch()
    pipe = pipeline.Pipeline(layers(), schedules.gpipe(2, PARTS), squared_error, group=group)
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="this Pipeline is closed: make a new one"):
        pipe.step(inputs, targets, 12)
    return None


def test_a_closed_pipeline_says_so(five):
    five.call(closed)


def closed_by_one():
    """On a rank: what a step says that the middle rank takes no part in, and how long it waits."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return pipeline.join_group_creation()
    inputs, targets = batch()
    own = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    pipe = pipeline.Pipeline(own, schedules.gpipe(3, PARTS), squared_error, group=group)
    if rank == 1:
        pipe.close()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as told:
        pipe.step(inputs, targets, 12)
    pipe.close()
    return str(told.value), time.monotonic() - start


def test_the_others_hear_of_a_rank_that_has_closed_the_pipeline(five):
    for rank, (message, seconds) in enumerate(five.call(closed_by_one)[:3]):
        assert message.startswith("this Pipeline is closed" if rank == 1 else "another rank has")
        assert seconds < 20, "not the deadline of a message"


class Stopping:
    """A recorder that raises at an action."""

    def __init__(self, action):
        self.action = action

    def begin(self):
        pass

    def end(self, action):
        if str(action) == self.action:
            raise ArithmeticError(f"stop at {action}")


def after_a_failure():
    """The words of a step after one that failed midway, and its seconds."""
    group = first_ranks(2)
    if (rank := dist.get_rank()) >= 2:
        return pipeline.join_group_creation()
    x = torch.ones(8, 8)
    with pipeline.Pipeline(
        [nn.Linear(8, 8), nn.Linear(8, 8)],
        schedules.gpipe(2, 4),
        lambda output, target: (output - target).square().sum(),
        group=group,
        timeout=8.0,
    ) as pipe:
        pipe.step(x, x, 8)
        with pytest.raises(ArithmeticError):
            pipe.step(x, x, 8, Stopping(("0F3", "1F0")[rank]))
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            pipe.step(x, x, 8)
        return str(error.value), time.monotonic() - start


def test_after_an_error_midway_a_pipeline_takes_no_step(five):
    for words, seconds in five.call(after_a_failure)[:2]:
        assert words == "an earlier step has failed midway: close this Pipeline"
        assert seconds < 4.0
