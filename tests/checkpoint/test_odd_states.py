"""States that are rare: they are saved as they are, or an error says what cannot be saved."""

import errno
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpointed import refusal
from torch import nn

from naranhi import models, schedules
from naranhi.checkpoint import Checkpoints, consolidated_state_dict, storage
from naranhi.pipeline import Pipeline
from naranhi.zero import Zero


class Keeping(torch.optim.Optimizer):
    """It keeps what it is told for each parameter, and does nothing."""

    def __init__(self, params, **kept):
        super().__init__(params, {})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(kept)


def saved(folder, model, optimizer=None, step=1):
    with Checkpoints(folder) as checkpoints:
        return refusal(lambda: checkpoints.save(step, model, optimizer))


def differing(folder):
    """Replicas that have gone apart: what rank 0 warns of, and that equal ones are no news."""
    rank, told = dist.get_rank(), []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model.requires_grad_(False)
    for step, values in enumerate((1, rank, 1), 1):
        for param in model.parameters():
            param.fill_(values)
        with Checkpoints(folder) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoints.save(step, model)
        told.append([str(one.message) for one in caught])
    return told


def test_replicas_that_differ_are_told(eight, tmp_path):
    first, second = eight(2, differing, str(tmp_path))
    assert second == [[], [], []] and first[0] == first[2] == []
    (words,) = first[1]
    assert words.startswith(
        "parameter 0.weight is not the same on rank 0 and rank 1 (and 3 more parameters): the "
    )


def unnamed(folder):
    answers = []
    for kept in {"exp.avg": torch.ones(2, 2)}, {5: torch.ones(2, 2)}:
        model = nn.Linear(2, 2, bias=False)
        optimizer = Keeping(model.parameters())
        optimizer.state[model.weight].update(kept)
        answers.append(saved(folder, model, optimizer))
    optimizer = Keeping(model.parameters(), m=torch.ones(2, 2))
    optimizer.state["global"] = {"k": 5}
    return [*answers, saved(folder, model, optimizer)]


def test_state_that_would_not_come_back_is_refused(eight, tmp_path):
    for answers in eight(2, unnamed, str(tmp_path)):
        for words, answer in zip(
            ("keeps 'exp.avg' for weight: only", "keeps 5 for weight: only", "for 'global'"),
            answers,
            strict=True,
        ):
            assert words in answer


class Shared(nn.Module):
    def __init__(self, buffer, persistent):
        super().__init__()
        self.register_buffer("values", buffer, persistent=persistent)


class OwnState(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = torch.tensor(5)


def buffers(folder):
    def made(value):
        buffer = torch.full((2,), value)
        return nn.Sequential(nn.Linear(1, 1), Shared(buffer, False), Shared(buffer, True))

    one, other = made(1.0), made(2.0)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, one)
        checkpoints.load(other)
    own = nn.Sequential(nn.Linear(1, 1), OwnState(1, 1))
    expanded = nn.Sequential(nn.Linear(1, 1), Shared(torch.ones(1, 1).expand(1, 4), True))
    row = nn.Sequential(nn.Linear(1, 1), Shared(torch.arange(4).expand(1, -1), True))
    refused = [saved(folder, own, step=2), saved(folder, expanded, step=2)]
    return other[1].values.tolist(), refused, saved(folder, row, step=2)


def test_buffers_that_are_shared_or_expanded(eight, tmp_path):
    for loaded, (own, expanded), row in eight(2, buffers, str(tmp_path)):
        assert loaded == [1.0, 1.0]  # as torch keeps what one of two modules keeps
        assert "1, a OwnState, overrides _save_to_state_dict: define" in own
        assert "1.values is an expanded tensor: its elements share memory" in expanded
        assert row is None


def drawn(folder):
    rank = dist.get_rank()
    torch.manual_seed(0)
    random.seed(rank)
    np.random.seed(rank)
    model = nn.Linear(2, 2)
    larger = nn.Linear(2, 2)
    larger.more = nn.Linear(1, 1)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.load(larger, strict=False)
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_each_generator_goes_on_from_its_own_state(eight, tmp_path):
    (python, numpy, torchs), (python_1, numpy_1, torchs_1) = eight(2, drawn, str(tmp_path))
    assert python != python_1 and numpy != numpy_1 and torchs == torchs_1


def exchanged(folder):
    """On one of two ranks, NumPy's generator is another one."""
    own = np.random.get_bit_generator()
    if dist.get_rank():
        np.random.set_bit_generator(np.random.PCG64(0))
    try:
        return saved(folder, nn.Linear(2, 2))
    finally:
        np.random.set_bit_generator(own)


def test_another_generator_of_numpy_is_refused_on_every_rank(eight, tmp_path):
    for answer in eight(2, exchanged, str(tmp_path)):
        assert "NumPy's global generator is a PCG64: only its own MT19937 can be" in answer


def options(folder):
    """Options and counts that are tensors of several elements, not a number, or functions."""
    answers = []
    for step, (option, kept) in enumerate(
        (
            (torch.ones(3), torch.tensor(float("nan"))),
            (torch.full((3,), float(dist.get_rank())), None),
            (1.0, [torch.ones(2), {"a": torch.ones(3)}]),
            (lambda: 1, None),
        ),
        1,
    ):
        model = nn.Linear(2, 2)
        optimizer = Keeping([{"params": [*model.parameters()], "scale": option}], m=kept)
        answer = saved(folder, model, optimizer, step)
        if answer is None:
            with Checkpoints(folder) as checkpoints:
                checkpoints.load(model, optimizer)
        answers.append(answer)
    return answers


def test_options_and_counts_of_any_plain_kind(eight, tmp_path):
    for fine, differ, lists, function in eight(2, options, str(tmp_path)):
        assert fine is None and lists is None
        assert "give all ranks the same" in differ
        assert "lambda" in function or "function" in function


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return (self.first * inputs).sum()


def unused(folder):
    """A parameter without a gradient yet, into ZeRO, which would give it its neighbour's steps."""
    model = Late()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3)).backward()
    optimizer.step()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model, optimizer)
        zero = Zero(Late(), 1)
        return refusal(lambda: checkpoints.load(zero, torch.optim.Adam(zero.param_groups, lr=0.1)))


def test_zero_does_not_count_steps_that_a_parameter_has_not_taken(eight, tmp_path):
    for answer in eight(2, unused, str(tmp_path)):
        assert "first and late have step 1.0 and none, and ZeRO keeps one for both" in answer


def named(folder):
    """Of a pipeline whose stages are unequal, with an optimizer that knows names."""
    torch.manual_seed(0)
    with Pipeline(models.mlp(3, 3, 3), schedules.gpipe(2, 2), nn.MSELoss(reduction="sum")) as p:
        own = [pair for stage in p.stages.values() for pair in stage.named_parameters()]
        optimizer = torch.optim.Adam(own)
        p.step(torch.ones(4, 3), torch.zeros(4, 3), 4)
        optimizer.step()
        names = [*optimizer.param_groups[0]["param_names"]]
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, p, optimizer)
            checkpoints.load(p, optimizer)
    return names == optimizer.param_groups[0]["param_names"], names


def test_names_of_parameters_are_each_ranks_own(eight, tmp_path):
    (same, names), (same_1, names_1) = eight(2, named, str(tmp_path))
    assert same and same_1 and len(names) != len(names_1)


def of_one_element(folder):
    """Views of one element, whose stride is not 1."""
    model = nn.Linear(1, 1)
    model.other = nn.Parameter(torch.arange(6.0).view(1, 6)[:, 1])
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model, x=torch.ones(1, 3)[:, 1])
        state = checkpoints.load(model)
    whole = consolidated_state_dict(model)
    return state.state["x"].tolist(), whole and whole["other"].tolist()


def test_one_element_with_any_stride(eight, tmp_path):
    assert eight(2, of_one_element, str(tmp_path)) == [([1.0], [1.0]), ([1.0], None)]


def other_names(folder):
    model, found = nn.Linear(2, 2), []
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.save(2, model)
    shutil.copytree(f"{folder}/step-00000002", f"{folder}/step-000000002")
    Path(folder, "step-00000009").write_text("a file")
    with Checkpoints(folder, keep=2) as checkpoints:
        found.append(checkpoints.load(model).step)
        checkpoints.save(3, model)
    return found, sorted(path.name for path in Path(folder).glob("step-*"))


def test_what_only_looks_like_a_checkpoint_is_none(eight, tmp_path):
    found, names = eight(1, other_names, str(tmp_path))[0]
    assert found == [2]
    assert names == ["step-000000002", "step-00000002", "step-00000003", "step-00000009"]


def unsynced(folder):
    """The folder cannot be made to last, once; then it can."""
    model, sync = nn.Linear(2, 2), storage.sync

    def failing(path):
        if path == Path(folder):
            raise OSError(errno.EIO, "Input/output error", str(path))
        sync(path)

    storage.sync = failing
    first = saved(folder, model)
    storage.sync = sync
    names = [path.name for path in Path(folder).glob("step-*")]
    return first, names, saved(folder, model)


def test_a_checkpoint_that_may_not_last_is_not_committed(eight, tmp_path):
    first, names, second = eight(1, unsynced, str(tmp_path))[0]
    assert "Input/output error" in first and names == [] and second is None
