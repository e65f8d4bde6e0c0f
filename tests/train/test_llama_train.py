"""`naranhi.train` with models of Llama's kind: the losses of one process, on a mesh, and back."""

import json
import math

import pytest
import small_corpus
import small_llama
import torch
from exported import loss_of, run
from in_float64 import in_float64
from transformers import AutoModelForCausalLM

from naranhi import data, train
from naranhi.checkpoint import consolidated_state_dict
from naranhi.expert_parallel import undivided_state
from naranhi.models import configuration, is_mixture, llama_model
from naranhi.models import loss as naranhi_loss

STEPS, RATE = 7, 4.0
MIXTURES = "mixtral", "qwen3_moe"
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
    ("mixtral", {"ep": 4}, ""),
    ("mixtral", {"ep": 2, "pp": 2}, "--schedule 1F1B --recompute"),
    ("mixtral", {"tp": 2, "cp": 2, "pp": 2}, "--sequence-parallel --schedule zero_bubble_v"),
    ("mixtral", {"dp": 2, "ep": 2, "cp": 2}, "--zero 2"),
    ("qwen3_moe", {"ep": 2, "tp": 2, "pp": 2}, "--sequence-parallel --schedule zero_bubble_h1"),
    ("qwen3_moe", {"ep": 2, "dp": 2, "tp": 2}, "--zero 3 --recompute"),
    ("qwen3_moe", {"pp": 2, "cp": 2}, "--schedule interleaved --chunks 2"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for kind in small_llama.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        # Rows of a micro-batch go to all ranks of dp and ep.
        microbatches = 2 if kind in MIXTURES else 4
        options = ["--batch=8", f"--microbatches={microbatches}"]
        found[kind] = [*small_llama.write(folder, kind), *options]
    several = small_llama.config("qwen3_moe", num_experts_per_tok=9)
    several.save_pretrained(folder := tmp_path_factory.mktemp("several"))
    return found | {"several": ["--config", str(folder)]}


def by_sgd(arguments):
    """On a rank: losses, by SGD, which sees a gradient's size, after clipping."""
    options = train.parse([*arguments, f"--steps={STEPS}", "--clip=0.5"])
    with in_float64(), train.Training(options) as training:
        [group] = training.optimizer.param_groups
        training.optimizer = torch.optim.SGD(group["params"], lr=RATE)
        return [step.loss for step in training]


@pytest.fixture(scope="module")
def alone(eight, models):
    return {kind: eight(1, by_sgd, models[kind])[0] for kind in small_llama.KINDS}


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


def step_beside_transformers(arguments, folder):
    """How far weights are after a step of SGD from those of transformers, and how far they went."""
    options = train.parse([*arguments, "--steps=1"])
    with in_float64(), train.Training(options) as training:
        training.optimizer = torch.optim.SGD(training.pipeline.parameters(), lr=RATE)
        list(training)
        ours = consolidated_state_dict(training.pipeline)
    tokenizer = data.tokenizer(folder)
    sequences = data.encode(tokenizer, data.unique(data.contexts()), 32)
    batch = next(data.stream(sequences, 8, pad=tokenizer.pad_token_id, multiple=8))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # its kernels have no float64
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    halves = [model(tokens, output_router_logits=True) for tokens in batch.tokens.chunk(2)]
    logits = torch.cat([half.logits for half in halves])
    loss = naranhi_loss(logits, batch.targets) / batch.count
    auxiliary = sum(half.aux_loss for half in halves) / 2
    (loss + model.config.router_aux_loss_coef * auxiliary).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    found = llama_model(undivided_state(ours), model.config).state_dict()
    apart = max((found[n] - param).abs().max().item() for n, param in model.named_parameters())
    router = "model.layers.1.mlp.gate.weight"
    model.zero_grad()
    return apart, (dict(model.named_parameters())[router] - before[router]).abs().max().item()


def test_a_step_is_that_of_transformers(eight, tmp_path):
    """Its coefficient of the auxiliary loss, too; of one sparse block, because it has one loss."""
    torch.manual_seed(0)
    options = small_llama.write(tmp_path, "qwen3_moe", router_aux_loss_coef=3.0)
    base = [*options[:2], "--batch=8", "--microbatches=2"]
    apart, far = eight(1, step_beside_transformers, base, str(tmp_path))[0]
    assert apart < 1e-6 < 1e-3 < far, "but for its rounding to float32"


@pytest.mark.parametrize(
    "change",
    [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}, {"router_aux_loss_coef": 0.5}],
)
def test_a_run_does_not_go_on_with_other_gates(eight, tmp_path, change):
    base = ["--config", tmp_path, *small_corpus.write(tmp_path)]
    base += ["--save", tmp_path / "run", "--resume", "--steps=1"]
    small_llama.config("qwen3_moe").save_pretrained(tmp_path)
    eight(1, run, base)
    small_llama.config("qwen3_moe", **change).save_pretrained(tmp_path)
    [(name, value)] = change.items()
    said = eight(1, run, base)[0]
    assert "was saved with another model (" in said and f"{name} {value}" in said
    assert "--top-k" not in said


def test_a_qwen3_moe_may_be_dense(eight, tmp_path):
    """And is then trained as one, on a tensor group with its MLPs."""
    losses = []
    for options in {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}, {"num_experts": 0}:
        small_llama.config("qwen3_moe", **options).save_pretrained(tmp_path)
        assert not is_mixture(configuration(str(tmp_path)))
        base = ["--config", tmp_path, *small_corpus.write(tmp_path)]
        found = eight(2, run, [*base, "--tp=2", "--steps=2"])[0][0]
        losses.append(found)
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2


def test_a_run_goes_on_with_the_same_model_in_another_form(eight, tmp_path):
    """As published configurations have it, and as transformers saves it."""
    config = small_llama.config("llama").to_dict()
    angles = config.pop("rope_parameters")
    published = {"rope_theta": angles["rope_theta"]}
    published["rope_scaling"] = {k: v for k, v in angles.items() if k != "rope_theta"}
    base = ["--config", tmp_path / "config.json", *small_corpus.write(tmp_path)]
    base += ["--save", tmp_path / "run", "--resume"]
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
        (1, "llama", "--dropout=0.1", "is a llama, which has no dropout: do not set it to 0.1"),
        (2, "llama", "--experts=2 --ep=2", "--experts goes with a GPT-2"),
        (2, "llama", "--ep=2", "--ep goes with --experts N, the number of experts, or with a mix"),
        (1, "mixtral", "--experts=4", "is a mixture of 4 experts, 2 for each token"),
        (1, "mixtral", "--top-k=1", "--top-k goes with a GPT-2"),
        (3, "qwen3_moe", "--ep=3 --batch=12", "--ep 3 does not divide the 8 experts of the model"),
        (8, "mixtral", "--cp=8", "and the routers of experts see the padding"),
        (1, "llama", "--config=nowhere", "--config is for random weights, and --model for"),
        (1, "several", "", "has 9 experts for each token (num_experts_per_tok), and only 8 in all"),
    ],
)
def test_what_such_a_model_has_not_is_refused_on_every_rank(
    eight, models, ranks, kind, options, message
):
    for said in eight(ranks, run, [*models[kind], *options.split()]):
        assert message in said
