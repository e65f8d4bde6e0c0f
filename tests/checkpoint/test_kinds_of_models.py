"""What a model may be made of: what is saved, where, and what is refused."""

import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpointed import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from naranhi import models, schedules
from naranhi.checkpoint import Checkpoints, consolidated_state_dict, rest
from naranhi.checkpoint.state import State
from naranhi.distributed import Mesh
from naranhi.pipeline import Pipeline
from naranhi.zero import Zero, ZeroStages


@pytest.fixture(scope="module")
def one(eight):
    """`one(function, *args)`: its result on a world of one rank."""
    return lambda function, *args: eight(1, function, *args)[0]


def in_columns(folder, options):
    """How far weights that are not row-major get from those of a training without a break."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4, 5))
        model.to(memory_format=torch.channels_last)
        model[3].weight.data = model[3].weight.data.t().contiguous().t()
        return model, torch.optim.Adam(model.parameters(), lr=0.01, **options)

    def train(model, optimizer, steps):
        for seed in steps:
            inputs = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    whole, resumed = made(), made()
    train(*whole, range(2))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(2, *whole)
        checkpoints.load(*resumed)
    train(*whole, range(2, 4))
    train(*resumed, range(2, 4))
    pairs = zip(whole[0].parameters(), resumed[0].parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_adam_goes_on_with_weights_that_are_not_row_major(one, tmp_path, options):
    assert one(in_columns, str(tmp_path), options) == 0


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, output, target):
        return (self.weight * (output - target)).square().sum()


def sharded_by_zero(folder):
    """What is said of a module, and of a pipeline's loss, whose parameters a Zero trains."""
    torch.manual_seed(0)
    answers, mesh = {}, Mesh(data=2, pipeline=2)
    layers = models.mlp(4, 3, 3)
    with Checkpoints(folder) as checkpoints:
        for stage in 1, 3:
            module = nn.Sequential(*models.mlp(2, 3))
            zero = Zero(module, stage)
            answers[f"module, {stage}"] = refusal(lambda: checkpoints.save(1, module))  # noqa: B023
            answers[f"part, {stage}"] = refusal(lambda: checkpoints.save(1, [module[0]]))  # noqa: B023
            zero.close()
        schedule = schedules.with_sharding(schedules.gpipe(2, 2), 3)
        with Pipeline(
            layers,
            schedule,
            WeightedLoss(),
            group=mesh.pipeline,
            replicas=mesh.data,
            sharding=ZeroStages,
        ) as pipeline:
            sharded = pipeline.sharded
            optimizer = torch.optim.AdamW(sharded.param_groups, lr=0.1)
            losses = []
            for step in range(3):
                if step == 1:
                    checkpoints.save(1, sharded, optimizer)
                if step == 2:
                    checkpoints.load(sharded, optimizer)
                loss = pipeline.step(torch.ones(4, 3), torch.zeros(4, 3), 4)
                losses.append(loss and loss.item())
                sharded.step(optimizer)
    mesh.close()
    return answers, losses


def test_what_zero_trains_is_saved_by_the_zero(eight, tmp_path):
    results = eight(4, sharded_by_zero, str(tmp_path))
    answers = results[0][0]
    assert all(other == answers for other, _ in results)
    assert all(losses[1] == losses[2] for _, losses in results)
    assert any(losses[0] != losses[1] for _, losses in results), "it has been trained"
    assert len(answers) == 4
    for words in answers.values():
        assert words.endswith("of this model: pass that Zero instead of the model")


def with_its_loss(folder, kind):
    """How far losses after a load are from those that followed the save; the names that were saved,
    as the first rank sees them; groups that a rule was asked for."""
    torch.manual_seed(0)
    named, schedule, options = [], schedules.gpipe(2, 2), {}
    mesh = Mesh(data=2, pipeline=2)
    if kind == "sharded":
        schedule = schedules.with_sharding(schedule, 3)

        def rule(pairs):
            pairs = list(pairs)
            named.extend(name for name, _ in pairs)
            return [{"params": [param for _, param in pairs], "weight_decay": 0.1}]

        options = {"sharding": partial(ZeroStages, param_groups=rule)}
    losses = []
    with (
        Checkpoints(folder) as checkpoints,
        Pipeline(
            models.mlp(4, 3, 3),
            schedule,
            WeightedLoss(),
            group=mesh.pipeline,
            replicas=mesh.data,
            **options,
        ) as pipe,
    ):
        sharded = pipe.sharded
        trained = sharded.param_groups if sharded else pipe.parameters()
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        for step in range(5):
            if step == 1:
                checkpoints.save(1, pipe, optimizer)
            if step == 3:
                checkpoints.load(pipe, optimizer)
            optimizer.zero_grad()
            loss = pipe.step(torch.ones(4, 3), torch.zeros(4, 3), 4)
            losses.append(loss and loss.item())
            sharded.step(optimizer) if sharded else optimizer.step()
        whole = consolidated_state_dict(pipe)
    mesh.close()
    return losses, whole and sorted(whole), named


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_the_weights_of_a_loss_are_saved_with_the_pipeline(eight, tmp_path, kind):
    results = eight(4, with_its_loss, str(tmp_path), kind)
    for losses, _, named in results:
        assert losses[1:3] == losses[3:]
        assert kind == "whole" or ("loss_fn.weight" in named) == (losses[0] is not None)
    assert any(losses[1] != losses[2] for losses, *_ in results), "it has been trained"
    assert "loss_fn.weight" in results[0][1] and len(results[0][1]) > 3


def of_torch(folder):
    """What is said of models that torch has sharded evenly."""
    mesh = init_device_mesh("cpu", (2,))
    fsdp, split = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(4, 8))
    fully_shard(fsdp, mesh=mesh)
    parallelize_module(split, mesh, {"0": ColwiseParallel()})
    with Checkpoints(folder) as checkpoints:
        return [refusal(lambda: checkpoints.save(1, model)) for model in (fsdp, split)]  # noqa: B023


def test_what_torch_has_sharded_is_refused(eight, tmp_path):
    expected = "0.weight is a DTensor, of FSDP2 or torch's tensor parallelism: use "
    for answers in eight(2, of_torch, str(tmp_path)):
        assert len(answers) == 2
        assert all(expected in words for words in answers)


def equal_values(folder):
    """Values that are equal on both ranks, although their pickles are not."""
    rank, model, tensor = dist.get_rank(), nn.Linear(2, 2), torch.arange(1000.0)
    word, same = "".join(["ab", "c"]), "".join(["a", "bc"])
    names = [f"shard {number}" for number in range(9)]
    serialized = rest.serialized

    def on_gpus(content):
        location_tag = torch.serialization.location_tag
        torch.serialization.location_tag = lambda storage: f"cuda:{rank}"
        try:
            return serialized(content)
        finally:
            torch.serialization.location_tag = location_tag

    rest.serialized = on_gpus
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(
            1,
            model,
            words=[word, word] if rank else [word, same],
            done=set(names if rank else names[::-1]),
            table={"a": 1, "b": {2: tensor}} if rank else {"b": {2: tensor}, "a": 1},
            view=tensor[:3] if rank else torch.arange(3.0),
        )
        rest.serialized = serialized
        state = checkpoints.load(model).state
        assert state["done"] == {*names} and torch.equal(state["view"], torch.arange(3.0))
        unequal = (
            [{1, 2}, {1, 3}],
            [{"a": 1}, {"a": 2}],
            [1, True],
            [[1], (1,)],
            [tensor, tensor + 1],
        )
        return [refusal(lambda: checkpoints.save(2, model, x=pair[rank])) for pair in unequal]  # noqa: B023


def test_equal_values_are_equal_whatever_their_pickles(eight, tmp_path):
    for answers in eight(2, equal_values, str(tmp_path)):
        assert len(answers) == 5
        assert all(words.startswith("x differs between the ranks") for words in answers)


class Calibrated(nn.Linear):
    """A layer that keeps its scale as TransformerEngine's layers do: beside its buffers."""

    def __init__(self):
        super().__init__(4, 4)
        self.amax, self.updates = torch.zeros(3), 0

    def get_extra_state(self):
        return {"amax": self.amax, "updates": self.updates}

    def set_extra_state(self, state):
        self.amax, self.updates = state["amax"], state["updates"]


class Unreadable(nn.Linear):
    def get_extra_state(self):
        return Calibrated


def extra_states(folder):
    """Saved from two stages, loaded on each rank; and what is refused."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Calibrated(), nn.Tanh(), nn.Sequential(Calibrated())]
    layers[1].amax, layers[1].updates = torch.arange(3.0), 5
    layers[3][0].amax, layers[3][0].updates = torch.ones(3), 6
    with Checkpoints(folder) as checkpoints:
        loss_fn = nn.MSELoss(reduction="sum")
        with Pipeline(layers, schedules.gpipe(2, 2), loss_fn) as pipeline:
            checkpoints.save_async(1, pipeline)
        whole = [nn.Linear(4, 4), Calibrated(), nn.Tanh(), nn.Sequential(Calibrated())]
        checkpoints.load(whole)
        loaded = [(one.amax.tolist(), one.updates) for one in (whole[1], whole[3][0])]
        without = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4))]
        refused = [refusal(lambda: checkpoints.load(without))]
        whole[1].amax = torch.full((3,), float(dist.get_rank()))
        refused.append(refusal(lambda: checkpoints.save(2, whole)))
        refused.append(refusal(lambda: checkpoints.save(2, Unreadable(4, 4))))
    return loaded, refused


def test_extra_states_of_modules_are_saved(eight, tmp_path):
    for loaded, refused in eight(2, extra_states, str(tmp_path)):
        assert loaded == [([0.0, 1.0, 2.0], 5), ([1.0, 1.0, 1.0], 6)]
        assert refused[0] == "the model has no extra state of 1: load into the model that was saved"
        assert refused[1].startswith("the extra state of 1 is not the same on rank 0 and rank 1")
        assert "Calibrated, which cannot be read safely" in refused[2]


class Shifted(nn.Linear):
    def __init__(self, offset):
        super().__init__(4, 4)
        self.register_buffer("offset", offset)


def shared_buffers(folder):
    """Layers of one buffer on two stages are saved, and loaded as a list; and the other way."""

    def made(value):
        offset = torch.full((4,), value)
        return [Shifted(offset), nn.Linear(4, 4), nn.Linear(4, 4), Shifted(offset)]

    loss_fn, values = nn.MSELoss(reduction="sum"), []
    with (
        Checkpoints(folder) as checkpoints,
        Pipeline(made(1.0), schedules.gpipe(2, 2), loss_fn) as pipeline,
    ):
        checkpoints.save(1, pipeline)
        whole = made(2.0)
        checkpoints.load(whole)
        values += [whole[0].offset[0].item(), whole[3].offset[0].item()]
        checkpoints.save(2, made(3.0))
        checkpoints.load(pipeline)
        values += [
            layer.offset[0].item()
            for stage in pipeline.stages.values()
            for layer in stage.layers
            if isinstance(layer, Shifted)
        ]
    return values


def test_a_buffer_of_several_layers_crosses_between_a_list_and_a_pipeline(eight, tmp_path):
    assert eight(2, shared_buffers, str(tmp_path)) == [[1.0, 1.0, 3.0]] * 2


class Mixed(torch.optim.Optimizer):
    """Keeps a weight in fp32, and something in 8 bits."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            kept = self.state[param]
            kept.setdefault("master", param.detach().float() + 1e-4)
            kept.setdefault("coded", torch.full_like(param, 200, dtype=torch.uint8))


def kept_in_other_formats(folder):
    """What an optimizer of bf16 parameters keeps, before and after a checkpoint."""
    kept = []
    for resumed in False, True:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer = Mixed(model.parameters())
        with Checkpoints(folder) as checkpoints:
            if resumed:
                checkpoints.load(model, optimizer)
            else:
                optimizer.step()
                checkpoints.save(1, model, optimizer)
        kept.append([*optimizer.state[model.weight].values()])
    return kept


def test_what_an_optimizer_keeps_has_its_own_format(one, tmp_path):
    """Torch casts it to the parameter's."""
    saved, loaded = one(kept_in_other_formats, str(tmp_path))
    for one_of, other in zip(saved, loaded, strict=True):
        assert torch.equal(one_of, other) and one_of.dtype == other.dtype


def statistics(folder):
    """Of batch norms that no rank's forward shares: each rank's, and what all load."""
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3)))
    for norm in model:
        norm.running_mean.fill_(rank)
        norm.running_var.fill_(10 + rank)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.load(model)
    return [(norm.running_mean[0].item(), norm.running_var[0].item()) for norm in model]


def test_statistics_are_those_of_one_rank(eight, tmp_path):
    assert eight(2, statistics, str(tmp_path)) == [[(0.0, 10.0)] * 3] * 2


def compiled(folder):
    """From a compiled model, and one with a compiled layer, into the others."""
    found = []

    def made(kind):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if kind == "layer":
            model[0] = torch.compile(model[0], backend="eager")
        return torch.compile(model, backend="eager") if kind == "whole" else model

    for step, kinds in enumerate((("whole", "plain"), ("plain", "layer"), ("layer", "whole")), 1):
        saved, loaded = map(made, kinds)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(step, saved)
            checkpoints.load(loaded)
        pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
        found.append(all(torch.equal(a, b) for a, b in pairs))
    return found


def test_a_compiled_model_is_the_same_model(one, tmp_path):
    assert one(compiled, str(tmp_path)) == [True] * 3


def test_what_ranks_tell_each_other_is_small():
    """All ranks get it from all: a tensor for each parameter's number of steps was half of it."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scalars = State(model, optimizer).summary().scalars
    assert len(scalars) == 100 and len(pickle.dumps(scalars)) < 50 * len(scalars)
    optimizer.state[model[7].bias]["step"] += 1.0
    scalars = State(model, optimizer).summary().scalars
    assert scalars["7.bias"]["step"] == 2.0 and scalars["7.weight"]["step"] == 1.0
