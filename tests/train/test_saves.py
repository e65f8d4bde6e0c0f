"""What a training does not save, and what its errors advise once there are checkpoints."""

import pytest
import small_gpt2
import torch
import torch.distributed as dist
from forked import Forked

from naranhi import train


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    options = small_gpt2.write(tmp_path_factory.mktemp("small"))
    return [*options, "--microbatches", "2", "--batch", "4"]


def told(options, changed=None):
    """What a training says that is refused in a step.

    changed: what of it is not finite: "parameter", "moment", or "gradient", on the last rank only.
    """

    def spoil(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["params"][0].grad.fill_(torch.nan)

    with train.Training(train.parse([*map(str, options)])) as training:
        kept = training.optimizer.state.values()
        for tensor in training.pipeline.parameters() if changed == "parameter" else ():
            tensor.data.fill_(torch.nan)
        for values in kept if changed == "moment" else ():
            values["exp_avg_sq"].fill_(torch.inf)  # every update is 0 from now on
        if changed == "gradient" and dist.get_rank() == dist.get_world_size() - 1:
            training.optimizer.register_step_pre_hook(spoil)
        with pytest.raises(train.UsageError) as error:
            list(training)
    return str(error.value)


@pytest.mark.parametrize("more", [[], ["--dp=2", "--zero=3"]])
def test_an_update_that_is_not_finite_is_not_saved(eight, small, tmp_path, more):
    """The loss of the step was finite: it was computed before the update."""
    options = [*small, "--save", tmp_path / "run", "--steps", 1, *more]
    first, second = eight(2, told, options, "gradient")
    assert first == second
    assert first == (
        "on rank 1: step 1 is not saved: its update left infinities or NaN in parameters or in the "
        "state of the optimizer: a lower --lr may help"
    )
    assert not [*(tmp_path / "run").glob("step-*")]


def trained(options):
    return train.losses(" ".join(map(str, options)))


def test_a_resumed_run_is_not_told_to_lower_the_rate(eight, small, tmp_path):
    """Which it keeps; another would be refused."""
    folder = tmp_path / "run"
    options = [*small, "--save", folder, "--save-every", 1]
    eight(2, trained, [*options, "--steps", 1])
    advice = f"begin another run, with a lower --lr and another --save, because {folder} keeps its"
    for changed, problem in [
        ("parameter", "the loss of step 1 is nan: "),
        ("moment", "step 2 is not saved: its update left infinities or NaN in parameters"),
    ]:
        first, second = eight(2, told, [*options, "--resume", "--steps", 2], changed)
        assert first == second
        assert problem in first and advice in first
        assert "delete the newest checkpoints and --resume from an earlier one" in first


DIES = """
import os, sys
import torch.distributed as dist
from naranhi.checkpoint.writing import Write
from naranhi.train.cli import main
finish = Write._finish
Write._finish = lambda *args: os._exit(0) if dist.get_rank() else finish(*args)
main(sys.argv[1:])
"""


def test_a_rank_that_dies_in_a_save_is_named(small, tmp_path):
    """As in a step: the ranks that are left cannot wait for it to agree on a message."""
    (tmp_path / "dies.py").write_text(DIES)
    options = [*small, "--save", tmp_path / "run", "--steps", 1]
    with Forked("datasets", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2") as forked:
        done = forked.run(2, tmp_path / "dies.py", *options)
    assert done.returncode == 1
    assert "rank 0 ends, because it has lost rank 1: a rank was lost, or did" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*(tmp_path / "run").glob("step-*")]
