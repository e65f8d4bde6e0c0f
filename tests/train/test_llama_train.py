"""`naranhi.train` with models of Llama's kind: the losses of one process, on a mesh, and back."""

import json
import math

import pytest
import small_llama
import torch
from exported import loss_of, run
from in_float64 import in_float64
from transformers import AutoModelForCausalLM

from naranhi import data, train

STEPS, RATE = 12, 1.0
RUNS = [  # kind, {axis: size}, options
    ("llama", {"tp": 2}, ""),
    ("llama", {"tp": 2, "pp": 2}, "--sequence-parallel --schedule 1F1B"),
    ("llama", {"cp": 4}, ""),
    ("llama", {"cp": 2, "tp": 2, "pp": 2}, "--sequence-parallel --schedule ZBVZeroBubble"),
    ("llama", {"dp": 2, "tp": 2}, "--zero 3 --recompute"),
    ("qwen2", {"pp": 2, "dp": 2}, "--schedule interleaved --chunks 2"),
    ("qwen2", {"tp": 2, "cp": 2}, "--recompute"),
    ("qwen3", {"tp": 2, "dp": 2}, "--zero 2"),
    ("qwen3", {"tp": 2, "pp": 2}, "--sequence-parallel --schedule zero_bubble_h1"),
    ("qwen3", {"tp": 2, "cp": 2, "dp": 2}, "--sequence-parallel --zero 1 --untied"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for kind in small_llama.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = [*small_llama.write(folder, kind), "--batch=8", "--microbatches=4"]
    return found


def by_sgd(arguments):
    """On a rank: losses, by SGD, which sees a gradient's size, after clipping."""
    options = train.parse([*arguments, f"--steps={STEPS}", "--clip=2"])
    with in_float64(), train.Training(options) as training:
        [group] = training.optimizer.param_groups
        training.optimizer = torch.optim.SGD(group["params"], lr=RATE)
        return [step.loss for step in training]


@pytest.fixture(scope="module")
def alone(eight, models):
    return {kind: eight(1, by_sgd, options)[0] for kind, options in models.items()}


@pytest.mark.parametrize(("kind", "sizes", "options"), RUNS, ids=lambda value: str(value))
def test_losses_are_those_of_one_process(eight, models, alone, kind, sizes, options):
    expected = alone[kind]
    assert expected[-1] < expected[0] - 0.4
    axes = [f"--{axis}={size}" for axis, size in sizes.items()]
    for losses in eight(
        math.prod(sizes.values()), by_sgd, [*models[kind], *axes, *options.split()]
    ):
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize("kind", small_llama.KINDS)
def test_transformers_reads_what_a_mesh_has_trained(eight, models, tmp_path, kind):
    """Saved on one mesh, resumed and exported on another, as of one process without a stop."""
    passage, base = data.contexts()[0], [*models[kind], "--lr=1e-2", "--steps=4"]
    eight(1, run, [*base, "--export", tmp_path / "alone"])
    saves = ["--save", tmp_path / "run", "--resume"]
    eight(4, run, [*base, *saves, "--tp=2", "--pp=2", "--steps=2", "--sequence-parallel"])
    answers = eight(2, run, [*base, *saves, "--cp=2", "--export", tmp_path / "mesh"])
    assert len(answers[0][0]) == 2
    expected = loss_of(tmp_path / "alone", passage)
    assert loss_of(tmp_path / "mesh", passage) == pytest.approx(expected, abs=1e-5)
    assert expected < loss_of(models[kind][1], passage) - 0.1
    config = json.loads((tmp_path / "mesh" / "config.json").read_text())
    assert config["model_type"] == kind
    assert config["tie_word_embeddings"] == (kind == "qwen2")


def test_a_run_goes_on_with_the_same_model_in_another_form(eight, tmp_path):
    """As published configurations have it, and as transformers saves it."""
    config = small_llama.config("llama").to_dict()
    angles = config.pop("rope_parameters")
    published = {"rope_theta": angles["rope_theta"]}
    published["rope_scaling"] = {k: v for k, v in angles.items() if k != "rope_theta"}
    base = ["--config", tmp_path / "config.json", "--save", tmp_path / "run", "--resume"]
    for steps, form in (1, published), (2, {"rope_parameters": angles}):
        (tmp_path / "config.json").write_text(json.dumps(config | form))
        losses, _ = eight(1, run, [*base, f"--steps={steps}"])[0]
        assert len(losses) == 1


def test_a_configuration_alone_begins_with_random_weights(eight, tmp_path):
    """A file, or its folder, with the book's tokenizer, for there is none beside it."""
    small_llama.config("qwen3", dtype="bfloat16").save_pretrained(tmp_path)
    losses = []
    for name in tmp_path, tmp_path / "config.json":
        base = ["--config", name, "--steps=2", "--export", tmp_path / f"of {name.name}"]
        losses.append(eight(2, run, [*base, "--tp=2"])[0][0])
        assert loss_of(tmp_path / f"of {name.name}", data.contexts()[0]) < losses[-1][0] + 1
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"of {name.name}", dtype="auto")
        assert found.dtype == torch.float32
        assert (found.config.bos_token_id, found.config.pad_token_id) == (None, None)
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(512), abs=0.7)


@pytest.mark.parametrize(
    ("ranks", "kind", "options", "message"),
    [
        (4, "llama", "--tp=4", "4 ranks do not divide 2 heads of keys and values"),
        (1, "llama", "--dropout=0.1", "is a llama, which has no dropout, not 0.1"),
        (2, "llama", "--experts=2 --ep=2", "--experts goes with a GPT-2"),
        (1, "llama", "--config=config.json", "--config is for random weights, and --model for"),
    ],
)
def test_what_such_a_model_has_not_is_refused_on_every_rank(
    eight, models, ranks, kind, options, message
):
    for said in eight(ranks, run, [*models[kind], *options.split()]):
        assert message in said
