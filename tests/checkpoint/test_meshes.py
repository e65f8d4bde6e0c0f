"""Saved on one mesh, resumed on others: the same model, moments and losses as of one process."""

import pytest
import torch
import torch.distributed as dist
from checkpointed import Run, put_together, shapes_in
from torch import nn


def trained(kind, folder, first, last, method="save"):
    """Steps from the newest checkpoint, if there is to be one; then another checkpoint.

    Losses, what the rank has at first and in the end, and the steps that were found."""
    run = Run(kind)
    with run.checkpoints(folder, keep=9) as checkpoints:
        if first:
            assert run.load(checkpoints, first).step == first
        begin = run.boxes()
        rates = run.optimizer.param_groups[0]["lr"]
        losses = [run.step(step) for step in range(first, last)]
        run.save(checkpoints, last, method)
        checkpoints.wait()
        end = run.boxes()
    run.close()
    return losses, begin, end, rates, checkpoints.steps()


def alone(steps, kind="plain"):
    """One process without checkpoints: losses, and {name: tensor} after each step."""
    run, losses, states = Run(kind), [], []
    for step in range(steps):
        losses.append(run.step(step))
        state = {}
        for name, param in nn.ModuleList(run.model).named_parameters():
            state[f"parameters.{name}"] = param.detach().clone()
            for key in "exp_avg", "exp_avg_sq":
                state[f"optimizer.{key}.{name}"] = run.optimizer.state[param][key].clone()
        states.append(state)
    return losses, states


def begun(eight, folder, kind, plain="plain"):
    """Two steps on eight ranks, saved in the background; and four in one process."""
    ranks = eight(8, trained, kind, str(folder), 0, 2, "save_async")
    shapes = shapes_in(folder / "step-00000002")
    whole = put_together([end for _, _, end, *_ in ranks], shapes)
    return folder, shapes, whole, eight(1, alone, 4, plain)[0], ranks[0][0]


@pytest.fixture(scope="module")
def saved(eight, tmp_path_factory):
    return begun(eight, tmp_path_factory.mktemp("meshes") / "run", "2x2x2")


def require_that_of_one_process(saved):
    """Names, shapes and values."""
    _, shapes, whole, (losses, states), own = saved
    assert own == pytest.approx(losses[:2], abs=1e-6)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in states[1].items()}
    for name, tensor in states[1].items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_the_checkpoint_of_eight_ranks_is_that_of_one_process(saved):
    """Each element was written once."""
    require_that_of_one_process(saved)
    folder, _, whole, *_ = saved
    elements = sum(tensor.numel() for tensor in whole.values())
    files = list((folder / "step-00000002").glob("*.distcp"))
    assert len(files) == 8
    sizes = [file.stat().st_size for file in files]
    assert 4 * elements < sum(sizes) < 4 * elements + 8 * 40_000, "torch.save adds to each box"
    assert max(sizes) < 2 * min(sizes), "the ranks share the work"


@pytest.mark.parametrize(
    "ranks, kind",
    [
        (1, "plain"),
        (2, "1x1x2"),  # an interleaved schedule: two virtual stages on each rank
        (4, "1x2x2"),
        (4, "2x2x1"),
        (2, "zero1"),
        (3, "zero2"),
        (4, "zero3"),
        (4, "zero3 copied"),
        (1, "zero3"),
    ],
)
def test_any_mesh_goes_on_where_another_was(eight, saved, ranks, kind):
    """Element by element what was saved; then the losses of one process that was never stopped.

    What it then saves is loaded by one process, and is what it had."""
    folder, shapes, whole, (losses, _), _ = saved
    copy = folder.with_name(f"{kind} on {ranks}")
    copy.mkdir()
    (copy / "step-00000002").symlink_to(folder / "step-00000002")
    answers = eight(ranks, trained, kind, str(copy), 2, 4)
    own, begin, end, rate, steps = (list(answer) for answer in zip(*answers, strict=True))
    found = put_together(begin, shapes)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert {count for _, counts in begin for count in counts.values()} == {2.0}
    assert rate == [1e-3 * 0.9 * 0.9] * ranks, "and the schedule of the learning rate"
    for values in own:
        assert values == pytest.approx(losses[2:], abs=1e-6)
    assert steps == [[2, 4]] * ranks
    (_, again, *_) = eight(1, trained, "plain", str(copy), 4, 4 + 1)[0]
    later, mine = put_together([again], shapes), put_together(end, shapes)
    assert all(torch.equal(later[name], tensor) for name, tensor in mine.items())


def renewed(folder, kind, seed):
    """A number drawn after loading, where the ranks of a pair have been seeded alike."""
    run = Run(kind)
    torch.manual_seed(seed + dist.get_rank() // 2)
    with run.checkpoints(folder) as checkpoints:
        run.load(checkpoints, 2)
    run.close()
    return torch.rand(()).item()


def test_random_states_are_restored_on_the_same_mesh_and_new_on_another(eight, saved):
    folder, *_ = saved
    again = [eight(8, renewed, str(folder), "2x2x2", seed) for seed in (1, 2)]
    assert again[0] == again[1], "what a rank draws does not depend on what it was seeded with"
    first, other, same = (eight(4, renewed, str(folder), "1x2x2", seed) for seed in (1, 5, 1))
    assert first == same and not set(first) & set(other)
    assert first[0] == first[1] != first[2] == first[3], "equal where they were equal"
    plain = [torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 5, 6)]
    assert not set(first) & {value.item() for value in plain}, "not those of the beginning"
