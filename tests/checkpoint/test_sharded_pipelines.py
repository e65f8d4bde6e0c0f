"""Pipelines whose stages are sharded by ZeRO: what one saves, any other mesh goes on with."""

import pytest
import torch
from checkpointed import put_together
from test_meshes import begun, require_that_of_one_process, trained

MESHES = [
    (1, "plain untied"),
    (4, "1x2x2 untied"),
    (4, "2x1x2 zero2 untied"),
    (3, "3x1x1 zero3 untied"),  # one stage
    (8, "2x2x2 zero3 untied"),  # again, on the same
    (4, "zero3 untied"),  # without a pipeline
]


@pytest.fixture(scope="module")
def saved(eight, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "run"
    return begun(eight, folder, "2x2x2 zero3 untied", "plain untied")


def test_it_is_the_checkpoint_of_one_process(saved):
    require_that_of_one_process(saved)


@pytest.mark.parametrize("ranks, kind", MESHES)
def test_any_mesh_goes_on_where_it_was(eight, saved, ranks, kind):
    """Element by element what was saved; then the losses of one process that was never stopped.

    What it then saves, the sharded stages go on with."""
    folder, shapes, whole, (losses, _), _ = saved
    copy = folder.with_name(f"{kind} on {ranks}")
    copy.mkdir()
    (copy / "step-00000002").symlink_to(folder / "step-00000002")
    answers = eight(ranks, trained, kind, str(copy), 2, 3)
    own, begin, end, *_ = (list(answer) for answer in zip(*answers, strict=True))
    found = put_together(begin, shapes)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    for values in own:
        assert values == pytest.approx(losses[2:3], abs=1e-6)
    again = eight(8, trained, "2x2x2 zero3 untied", str(copy), 3, 4)
    values, begin, *_ = (list(answer) for answer in zip(*again, strict=True))
    later, mine = put_together(begin, shapes), put_together(end, shapes)
    assert all(torch.equal(later[name], tensor) for name, tensor in mine.items())
    for value in values:
        assert value == pytest.approx(losses[3:], abs=1e-6)
