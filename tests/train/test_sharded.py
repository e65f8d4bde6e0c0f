"""`naranhi.train --zero`, `--bf16` and interleaved stages: the losses of one process, on a mesh."""

import math

import pytest
import small_gpt2
import torch
from in_float64 import in_float64
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from naranhi import schedules, train
from naranhi.train.saves import Saves
from naranhi.train.schedule import make_schedule

STEPS, RATE = 6, 3.0
RUNS = [  # {axis: size}, options
    ({"dp": 4}, "--zero 1"),
    ({"dp": 2, "pp": 2}, "--zero 1 --schedule 1F1B"),
    ({"dp": 2, "pp": 2}, "--zero 2 --schedule interleaved"),
    ({"dp": 2, "pp": 2}, "--zero 3 --schedule interleaved --chunks 2 --recompute"),
    ({"cp": 2, "pp": 2}, "--zero 3 --schedule ZBVZeroBubble"),
    ({"dp": 2, "tp": 2}, "--zero 2 --sequence-parallel"),
    ({"dp": 2, "tp": 2, "pp": 2}, "--zero 3 --sequence-parallel"),
    ({"pp": 2}, "--schedule interleaved --chunks 2"),
]
EXPERTS = "--experts 4 --top-k 2"
WITH_EXPERTS = [
    ({"ep": 2, "dp": 2}, "--zero 3"),
    ({"ep": 4}, "--zero 1 --recompute"),
    ({"ep": 2, "tp": 2}, "--zero 1"),
    ({"ep": 2, "pp": 2}, "--zero 3 --schedule interleaved"),
    ({"ep": 2, "tp": 2, "pp": 2}, "--zero 3 --sequence-parallel --schedule 1F1B"),
    ({"ep": 2, "dp": 2, "cp": 2}, "--zero 2"),
    ({"dp": 2, "tp": 2}, "--zero 2 --sequence-parallel"),
]


def words(sizes, options):
    return [*(f"--{axis}={size}" for axis, size in sizes.items()), *options.split()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A norm that is above what clipping allows, in every step."""
    folder = tmp_path_factory.mktemp("small")
    options = *small_gpt2.write(folder), "--batch=8", "--microbatches=2", "--clip=0.2"
    return [*options, "--untied"]


def by_sgd(arguments):
    """On a rank: losses, by SGD, which sees a gradient's size; and how much Adam would keep."""
    options = train.parse([*arguments, f"--steps={STEPS}"])
    with in_float64(), train.Training(options) as training:
        [group] = training.optimizer.param_groups
        training.optimizer = torch.optim.SGD(group["params"], lr=RATE)
        losses = [step.loss for step in training]
        return losses, sum(tensor.numel() for tensor in group["params"])


@pytest.fixture(scope="module")
def alone(eight, small):
    return eight(1, by_sgd, small)[0]


@pytest.mark.parametrize(("sizes", "options"), RUNS, ids=lambda value: str(value))
def test_losses_are_those_of_one_process_and_state_is_in_shards(
    eight, small, alone, sizes, options
):
    losses, parameters = alone
    assert losses[-1] < losses[0] - 0.3
    answers = eight(math.prod(sizes.values()), by_sgd, [*small, *words(sizes, options)])
    for found, _ in answers:
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
    shards = sum(held for _, held in answers)
    if "--zero" in options and "tp" not in sizes:  # each element once, but for padding
        assert parameters <= shards < 1.01 * parameters
    else:
        assert shards >= parameters


@pytest.fixture(scope="module")
def alone_with_experts(eight, small):
    return eight(1, by_sgd, [*small, *EXPERTS.split()])[0]


@pytest.mark.parametrize(("sizes", "options"), WITH_EXPERTS, ids=lambda value: str(value))
def test_experts_are_in_shards_on_the_ranks_with_copies_of_them(
    eight, small, alone_with_experts, sizes, options
):
    losses, parameters = alone_with_experts
    assert losses[-1] < losses[0] - 0.3
    arguments = [*small, *words(sizes, f"{EXPERTS} {options}")]
    answers = eight(math.prod(sizes.values()), by_sgd, arguments)
    for found, _ in answers:
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
    if "tp" not in sizes:  # each element once, but for padding
        assert parameters <= sum(held for _, held in answers) < 1.01 * parameters


def of_adam(arguments):
    """On a rank: losses by Adam, or what a user is told."""
    try:
        return train.losses(" ".join(map(str, arguments)))
    except train.UsageError as error:
        return str(error)


def test_a_run_goes_on_in_other_shards_and_whole(eight, small, tmp_path):
    base = [*small, "--lr=1e-3"]
    whole = eight(1, of_adam, [*base, "--steps=5"])[0]
    losses = []
    for steps, sizes, options in [
        (2, {"dp": 2, "pp": 2}, "--zero 3 --schedule interleaved"),
        (3, {"dp": 2, "tp": 2}, "--zero 1"),
        (4, {"dp": 1}, ""),
        (5, {"dp": 2}, "--zero 2"),
    ]:
        save = ["--save", str(tmp_path / "run"), "--resume", f"--steps={steps}"]
        found = eight(math.prod(sizes.values()), of_adam, [*base, *save, *words(sizes, options)])
        assert all(own == found[0] for own in found)
        losses += found[0]
    assert losses == pytest.approx(whole, rel=0, abs=1e-5)


def products(arguments):
    """On a rank: losses; the dtypes that layers compute in, of parameters, and of their shards."""
    computed = set()
    with train.Training(train.parse([*arguments, "--steps=3"])) as training:
        for module in training.pipeline.stages.values():
            for layer in module.modules():
                if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
                    layer.register_forward_hook(lambda *call: computed.add(call[-1].dtype))
        losses = [step.loss for step in training]
        kept = {p.dtype for p in training.pipeline.parameters()}
        kept |= {p.dtype for group in training.optimizer.param_groups for p in group["params"]}
    return losses, computed, kept


def test_bf16_computes_products_in_bf16_and_keeps_fp32(eight, small):
    exact, computed, _ = eight(1, products, small)[0]
    assert computed == {torch.float32}
    for ranks, options in [
        (1, []),
        (4, ["--dp=2", "--pp=2", "--zero=3", "--schedule=interleaved"]),
        (4, ["--cp=2", "--tp=2"]),
    ]:
        for losses, computed, kept in eight(ranks, products, [*small, "--bf16", *options]):
            assert losses != exact
            assert losses == pytest.approx(exact, rel=0, abs=5e-3)
            assert computed <= {torch.bfloat16} and kept == {torch.float32}


def without_a_note(arguments, option):
    """On a rank: as `of_adam`, by a version that did not note an option."""
    original = Saves.after

    def after(saves, *given):
        del saves.settings[option]
        original(saves, *given)

    Saves.after = after
    try:
        return of_adam(arguments)
    finally:
        Saves.after = original


def test_a_run_goes_on_in_the_precision_that_it_began_in(eight, small, tmp_path):
    """Those of older versions in fp32."""
    for name, begin in ("new", (of_adam,)), ("old", (without_a_note, "--bf16")):
        base = [*small, "--save", str(tmp_path / name), "--resume"]
        function, *more = begin
        assert len(eight(1, function, [*base, "--steps=1"], *more)[0]) == 1
        said = eight(1, of_adam, [*base, "--steps=2", "--bf16"])[0]
        assert "was saved with another --bf16 (False, now True)" in said
        assert len(eight(1, of_adam, [*base, "--steps=2"])[0]) == 1


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"), [(0, 0, 0), (1, 0, 1), (2, 0, 4), (3, 1, 1)]
)
@pytest.mark.parametrize("order", ["gpipe", "interleaved"])
def test_what_a_stage_of_zero_sends_in_a_step(order, zero, gathers, reductions):
    options = train.parse([f"--zero={zero}", "--schedule", order, "--microbatches=4"])
    for counted in schedules.transfers(make_schedule(options, 2)):
        assert counted == (gathers, reductions)


def test_a_model_that_is_untied_needs_no_option(eight, tmp_path):
    options = small_gpt2.write(tmp_path)
    config = GPT2Config.from_pretrained(tmp_path)
    config.tie_word_embeddings = False
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    mesh = ["--dp=2", "--pp=2", "--zero=3", "--batch=8", "--microbatches=2", "--steps=1"]
    assert len(eight(4, of_adam, [*options, *mesh])[0]) == 1


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, "--tp 2 --zero 1", "--zero 1 goes with --dp, --cp or --ep of 2 or more"),
        (2, "--export model --experts 2", "--export does not go with --experts"),
        (4, "--dp 2 --pp 2 --zero 2", "several stages goes with --untied"),
        (2, "--schedule interleaved --microbatches 3", "3 is no multiple of 2"),
        (1, "--chunks 2", "--chunks goes with --schedule interleaved"),
        (2, "--schedule interleaved --chunks 9", "more stages than layers: 18 stages, 14 layers"),
    ],
)
def test_what_does_not_go_together_is_refused_on_every_rank(eight, ranks, options, message):
    for said in eight(ranks, of_adam, [options, "--steps 1 --batch 24"]):
        assert message in said
