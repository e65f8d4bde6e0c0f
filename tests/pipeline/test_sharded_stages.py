"""ZeRO in a pipeline's schedule, on ranks: gradients, bytes sent and held, what is refused."""

import copy
import gc
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torchs
from gloo_ranks import Ranks
from replicas import grid, make
from sent import messages
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from naranhi import costs, pipeline, schedules
from naranhi.autograd import splittable
from naranhi.schedules import with_sharding
from naranhi.zero import ZeroStages

M = 4
RATE = 0.1
ORDERS = {
    "gpipe": schedules.gpipe(2, M),
    "1F1B": schedules.one_f_one_b(2, M),
    "interleaved": schedules.interleaved(2, M, 2),
    "zero-bubble V": schedules.zero_bubble_v(2, M),
    "DualPipeV": schedules.dualpipe_v(2, M),
}
WAYS = {
    "gradients": {"stage": 2},
    "gradients, each": {"stage": 2, "reduce_each": True},
    "kept for the step": {"stage": 3},
    "one kept": {"stage": 3, "keep": 1},
    "none kept": {"stage": 3, "keep": 0},
    "none kept, each": {"stage": 3, "keep": 0, "reduce_each": True},
}


@pytest.fixture(scope="module")
def four():
    with Ranks(4, deadline=40.0) as ranks:
        yield ranks


def work(name, schedule):
    """(layers, loss, this replica's inputs and targets, count), layers as the schedule needs."""
    layers, loss, inputs, targets, count = make(name)
    if any(action.kind == "I" for row in schedule for action in row):
        layers = splittable(layers)
    place = dist.get_rank() % 2
    return layers, loss, inputs.chunk(2)[place], targets.chunk(2)[place], count


def alone(name, microbatches, steps):
    """By step: the gradients of each layer in one process; the weights at the end."""
    layers, loss, inputs, targets, count = make(name)
    model, found = nn.Sequential(*layers), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        total = None
        for share in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            model.zero_grad()
            for x, y in zip(*(part.chunk(microbatches) for part in share), strict=True):
                (loss(model(x), y) / count).backward()
            mine = [one.grad for one in model.parameters()]
            total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
        for one, grad in zip(model.parameters(), total, strict=True):
            one.grad = grad
        found.append([[one.grad.clone() for one in layer.parameters()] for layer in layers])
        optimizer.step()
    return found, [[one.detach() for one in layer.parameters()] for layer in layers]


def whole_gradients(sharded):
    """{parameter: its gradient}, gathered from the shards."""
    found = {}
    for flat in sharded.flats:
        rows = torch.empty(flat.ranks, flat.size)
        dist.all_gather(list(rows), flat.gradient, group=flat.group)
        found |= zip(flat.parameters, flat.cut(rows.flatten()), strict=True)
    return found


def largest(pairs):
    return max(float((one - two).abs().max()) for one, two in pairs)


def trained(name, schedule, steps=2):
    """How far gradients of each step, and then the weights, are from one process at most."""
    along, across = grid()
    layers, loss, inputs, targets, count = work(name, schedule)
    expected, weights = alone(name, schedule.microbatches, steps)
    gaps = []
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        mine = [
            (number, place, parameter)
            for stage in pipe.stages.values()
            for number, layer in enumerate(stage.layers, stage.first)
            for place, parameter in enumerate(layer.parameters())
        ]
        optimizer = torch.optim.SGD(pipe.sharded.param_groups, lr=RATE)
        for step in range(steps):
            with torch.no_grad():
                pipe.step(inputs, targets, count)
            pipe.step(inputs, targets, count)
            found = whole_gradients(pipe.sharded)
            gaps.append(largest((found[p], expected[step][n][place]) for n, place, p in mine))
            pipe.sharded.step(optimizer)
        with pipe.sharded.gathered():
            gaps.append(largest((p, weights[n][place]) for n, place, p in mine))
    return gaps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_of_one_process(four, order, way):
    schedule = with_sharding(ORDERS[order], **WAYS[way])
    for gaps in four.call(trained, "mlp", schedule):
        if "each" in way:  # another order of sums
            assert 0 < max(gaps) <= 1e-6
        else:
            assert gaps == [0, 0, 0]


@pytest.mark.parametrize("order, way", [("1F1B", "kept for the step"), ("interleaved", "one kept")])
def test_gpt2_too(four, order, way):
    schedule = with_sharding(ORDERS[order], **WAYS[way])
    for gaps in four.call(trained, "gpt2", schedule):
        assert max(gaps) <= 1e-6


def test_the_norm_is_that_of_the_whole_model(four):
    schedule = with_sharding(ORDERS["interleaved"], 3)
    for norm, expected in four.call(norms, "mlp", schedule):
        assert norm == pytest.approx(expected, rel=1e-6)


def norms(name, schedule):
    along, across = grid()
    layers, loss, inputs, targets, count = work(name, schedule)
    [gradients], _ = alone(name, schedule.microbatches, 1)
    expected = torch.cat([one.flatten() for layer in gradients for one in layer]).norm().item()
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        pipe.step(inputs, targets, count)
        return pipe.clip_grad_norm_(1e9), expected


# --- bytes ---------------------------------------------------------------------------------------


def traffic(schedule):
    """Bytes handed to the backend for the replicas in a step, and what is held; both predicted."""
    along, across = grid()
    layers, loss, inputs, targets, count = work("mlp", schedule)
    held = []

    def note(event, unit):
        """What is allocated for parameters after each event."""
        flats = [flat for unit in pipe.sharded.units for flat in unit.flats] if made else []
        held.append(sum(t.untyped_storage().nbytes() for f in flats for t in {f.whole, f.shard}))

    made = False
    sharding = partial(ZeroStages, on_event=note)
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=sharding
    ) as pipe:
        made = True
        sizes = {
            number: 2 * unit.flats[0].size
            for number, unit in zip(pipe.stages, pipe.sharded.units, strict=False)
        }
        pipe.step(inputs, targets, count)  # the one that tries the layers
        pipe.sharded.zero_grad()
        held.clear()
        with messages() as handed:
            pipe.step(inputs, targets, count)
        sent = sum(one.nbytes for one in handed if one.group == across)
        flags = len(pipe.sharded.names)  # a byte each: who has a gradient
    counts = schedules.transfers(schedule)
    expected = sum(
        costs.pipeline_zero_bytes_sent(size, 2, *counts[number], "fp32")
        for number, size in sizes.items()
    )
    whole = max(
        sum(sizes[number] for number in stages)
        for stages in schedules.gathered(schedule)[dist.get_rank(along)]
    )
    return (
        sent - flags,
        expected,
        max(held),
        costs.pipeline_zero_bytes(sum(sizes.values()), 2, whole, "fp32"),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["1F1B", "interleaved", "zero-bubble V"])
def test_bytes_sent_and_held_are_the_formulas(four, order, way):
    schedule = with_sharding(ORDERS[order], **WAYS[way])
    for sent, expected, held, most in four.call(traffic, schedule):
        assert sent == expected
        if WAYS[way]["stage"] == 3:
            assert held == most


# --- what is refused -----------------------------------------------------------------------------


def refusal(what):
    """The error of each rank."""
    along, across = grid()
    schedule = schedules.gpipe(2, 2)
    if what != "plain":
        schedule = with_sharding(schedule, 3)
    layers, loss, *_ = work("tied gpt2" if what == "tied" else "mlp", schedule)
    if what == "frozen":
        for parameter in nn.ModuleList(layers[-4:]).parameters():
            parameter.requires_grad_(False)
    options = {"replicas": across, "sharding": ZeroStages}
    options |= {"trial": "data"} if what == "data" else {}
    options |= {"sharding": None} if what == "without" else {}
    options |= {"replicas": None} if what == "alone" else {}
    with pytest.raises(ValueError) as caught:
        pipeline.Pipeline(layers, schedule, loss, group=along, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, words",
    [
        ("plain", "sharding is given, but the schedule has no action that gathers or reduces"),
        ("without", "0UNSHARD cannot be run: pass sharding, such as zero.ZeroStages, and replicas"),
        ("alone", "the ranks over which stages are sharded (replicas is None)"),
        ("tied", "stages 0 and 1 share a tied parameter, and would shard it differently: untie"),
        ("data", 'at stage 3 a rank has only shards: use trial="shapes"'),
        ("frozen", "stage 1 has no parameter to train, so nothing to shard"),
    ],
)
def test_what_cannot_be_sharded_is_refused_on_every_rank(four, what, words):
    for told in four.call(refusal, what):
        assert words in told


def grouped(named):
    """Whole-model names of this rank's parameters; a rule that only the first stage allows."""
    names = [name for name, _ in named]
    if "0.up.weight" not in names:
        raise ValueError(f"no rule for {names[0]}")
    return []


def groups_of_some():
    along, across = grid()
    schedule = with_sharding(schedules.gpipe(2, 2), 3)
    layers, loss, *_ = work("mlp", schedule)
    sharding = partial(ZeroStages, param_groups=grouped)
    with pytest.raises(ValueError) as caught:
        pipeline.Pipeline(layers, schedule, loss, group=along, replicas=across, sharding=sharding)
    return str(caught.value)


def test_an_error_in_the_sharding_of_a_stage_is_told_on_all(four):
    for told in four.call(groups_of_some):
        assert "on rank 1: no rule for 4.up.weight" in told


def no_gradients_yet():
    along, across = grid()
    schedule = with_sharding(schedules.gpipe(2, 2), 3)
    layers, loss, inputs, targets, count = work("mlp", schedule)
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.sharded.param_groups, lr=RATE)
        with pytest.raises(RuntimeError, match="there are no gradients of these stages: run"):
            pipe.sharded.step(optimizer)
        pipe.step(inputs, targets, count)
        with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) of the pipeline's"):
            pipe.step(inputs, targets, count)
        pipe.sharded.zero_grad()
        pipe.step(inputs, targets, count)


def test_a_step_has_its_gradients_once(four):
    four.call(no_gradients_yet)


def evaluated_before_the_update(stage):
    """The first evaluation stands between a step and its update."""
    along, across = grid()
    schedule = with_sharding(schedules.gpipe(2, 2), stage)
    layers, loss, inputs, targets, count = work("mlp", schedule)
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.sharded.param_groups, lr=RATE)
        trained = pipe.step(inputs, targets, count)
        with torch.no_grad():
            evaluated = pipe.step(inputs, targets, count)
        pipe.sharded.step(optimizer)
        with torch.no_grad():
            later = pipe.step(inputs, targets, count)
    return trained is None or (trained.item() == evaluated.item() > later.item())


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_may_stand_before_the_update(four, stage):
    assert four.call(evaluated_before_the_update, stage) == [True] * 4


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


def without_gradients(stage):
    """By how much each stage moves where the first one's output is detached."""
    along, across = grid()
    schedule = with_sharding(schedules.gpipe(2, 2), stage)
    layers, loss, inputs, targets, count = work("mlp", schedule)
    half = len(layers) // 2
    layers.insert(half, Detached())
    with pipeline.Pipeline(
        layers,
        schedule,
        loss,
        balance=[half + 1, len(layers) - half - 1],
        group=along,
        replicas=across,
        sharding=ZeroStages,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.sharded.param_groups, lr=RATE, weight_decay=0.5)
        with pipe.sharded.gathered():
            before = [param.detach().clone() for param in pipe.parameters()]
        for _ in range(2):
            pipe.step(inputs, targets, count)
            assert pipe.clip_grad_norm_(1e9) > 0
            pipe.sharded.step(optimizer)
        with pipe.sharded.gathered():
            moved = [(a - b).abs().max() for a, b in zip(pipe.parameters(), before, strict=True)]
    return max(moved).item()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_without_gradients_stays_where_others_are_updated(four, stage):
    """Its weights do not even decay."""
    moved = sorted(four.call(without_gradients, stage))
    assert moved[:2] == [0, 0] and min(moved[2:]) > 0.01


# --- torch ---------------------------------------------------------------------------------------


def on_torch(path, schedule):
    """How far torch's gradients are from one process, where its runtime runs our file with
    `fully_shard`; they are means over the replicas."""
    along, across = grid()
    layers, loss, inputs, targets, count = make("mlp")
    [expected], _ = alone("mlp", schedule.microbatches, 1)
    rank, place = dist.get_rank(along), dist.get_rank() % 2
    sharded = DeviceMesh.from_group(across, "cpu")
    parts = []
    for number, part in enumerate(pipeline.cut(layers, schedule.virtual_stages)):
        if schedule.placement[number] == rank:
            module = fully_shard(nn.Sequential(*part), mesh=sharded)
            stages = number, schedule.virtual_stages, torch.device("cpu")
            parts.append(PipelineStage(module, *stages, group=along))
    runtime = torchs._PipelineScheduleRuntime(
        parts,
        schedule.microbatches,
        loss_fn=lambda output, target: loss(output, target) / count,
        scale_grads=False,
    )
    runtime._load_csv(path, format="compute_comms")
    mine = [part.stage_index for part in parts]
    last = schedule.virtual_stages - 1
    runtime.step(
        *[inputs.chunk(2)[place]] * (0 in mine),
        **{"target": targets.chunk(2)[place], "losses": []} if last in mine else {},
    )
    gaps = []
    for part in parts:
        first = sum(map(len, pipeline.cut(layers, schedule.virtual_stages)[: part.stage_index]))
        wanted = [grad for layer in expected[first:] for grad in layer]
        for parameter, grad in zip(part.submod.parameters(), wanted, strict=False):
            gaps.append((2 * parameter.grad.full_tensor(), grad))
    return largest(gaps)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 has other actions")
@pytest.mark.parametrize("way", ["kept for the step", "one kept"])
@pytest.mark.parametrize("order", ["1F1B", "interleaved", "zero-bubble V"])
def test_torchs_runtime_and_fully_shard_run_ours(four, tmp_path, order, way):
    schedule = with_sharding(ORDERS[order], **WAYS[way])
    schedules.write_csv(schedule, tmp_path / "ours.csv")
    assert schedules.read_csv(tmp_path / "ours.csv", sharding=True) == schedule
    for gap in four.call(on_torch, str(tmp_path / "ours.csv"), schedule):
        assert gap <= 1e-6


def evaluated_inside_of_gathered(stage):
    """The words of a step inside the block, and the shapes of what is read in it after that."""
    along, across = grid()
    schedule = with_sharding(schedules.gpipe(2, M), stage)
    layers, loss, inputs, targets, count = work("mlp", schedule)
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        with pipe.sharded.gathered():
            with torch.no_grad(), pytest.raises(RuntimeError) as error:
                pipe.step(inputs, targets, count)
            shapes = [tuple(value.shape) for value in pipe.parameters()]
        with torch.no_grad():
            pipe.step(inputs, targets, count)
    return str(error.value), shapes


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_inside_of_gathered_is_refused(four, stage):
    for words, shapes in four.call(evaluated_inside_of_gathered, stage):
        assert words == "Pipeline.step() inside of a gathered() block: leave the block first"
        assert (0,) not in shapes


def left_alone(stage):
    """What is said when layers are read, copied and pickled after their pipeline is gone."""
    along, across = grid()
    layers, loss, inputs, targets, count = make("mlp")

    def run():
        schedule = with_sharding(schedules.gpipe(2, M), stage)
        with pipeline.Pipeline(
            layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
        ) as pipe:
            pipe.step(*(part.chunk(2)[dist.get_rank() % 2] for part in (inputs, targets)), count)
            own = [layer for part in pipe.stages.values() for layer in part.layers]
            pipe.sharded.step(torch.optim.SGD(pipe.sharded.param_groups, lr=RATE))
        return next(layer for layer in own if [*layer.parameters()])

    layer = run()
    gc.collect()
    said = []
    for use in nn.Module.state_dict, copy.deepcopy, pickle.dumps:
        try:
            use(layer)
            said.append(min(param.numel() for param in layer.parameters()))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_layers_that_outlive_their_pipeline_are_not_read_without_values(four):
    for said in four.call(left_alone, 3):
        assert all("this model is sharded: read it inside of Zero.gathered()" in x for x in said)
    for said in four.call(left_alone, 2):
        assert said[0] > 0 and said == said[:1] * 3


def unfrozen(stage):
    """What is said of a step with a layer that is unfrozen after its stage was made; then again."""
    along, across = grid()
    layers, loss, inputs, targets, count = make("mlp")
    frozen = next(p for layer in layers[1:] for p in layer.parameters())
    frozen.requires_grad_(False)
    schedule = with_sharding(schedules.gpipe(2, M), stage)
    own = [part.chunk(2)[dist.get_rank() % 2] for part in (inputs, targets)]
    said = []
    with pipeline.Pipeline(
        layers, schedule, loss, group=along, replicas=across, sharding=ZeroStages
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.sharded.param_groups, lr=RATE)
        for train in False, True, False:
            frozen.requires_grad_(train)
            try:
                pipe.step(*own, count)
                pipe.sharded.step(optimizer)
                said.append(None)
            except RuntimeError as error:
                said.append(str(error))
        with torch.no_grad():
            frozen.requires_grad_(True)
            pipe.step(*own, count)
    return said


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_is_unfrozen_later_is_refused_on_every_rank(four, stage):
    words = "was unfrozen, added or replaced after the pipeline's `sharded` was made"
    for first, second, third in four.call(unfrozen, stage):
        assert first is None and words in second and third is None
