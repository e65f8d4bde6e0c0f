"""`naranhi.train` with context and expert parallelism beside the other axes: 8 ranks at most."""

import itertools
import math

import pytest
import small_gpt2
import torch
from in_float64 import in_float64

from naranhi import train
from naranhi.context_parallel import partial_attention, ring, split_sequence
from naranhi.expert_parallel import expert_parameters, experts_mlp, gradients, moe, sum_over_copies
from naranhi.pipeline import gradient_sums
from naranhi.train import build, part, trainer

STEPS, RATE = 6, 3.0
EXPERTS = ["--experts", "4", "--top-k", "2"]
AXES = "dp", "pp", "tp", "cp", "ep"
SCHEDULES = "gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_v"


def meshes(ranks):
    """Every mesh with context or experts that this GPT-2 allows: four layers, two heads, four
    experts, four rows in a micro-batch, sequences of multiples of 8."""
    for sizes in itertools.product((1, 2, 4, 8), repeat=5):
        dp, pp, tp, cp, ep = sizes
        if math.prod(sizes) != ranks or cp * ep == 1:
            continue
        if pp <= 4 and tp <= 2 and cp <= 4 and ep <= 4 and dp * ep <= 4 and cp * tp <= 8:
            yield sizes


def options_of(sizes, number=0):
    """A mesh's options, with another schedule, and so on, from mesh to mesh."""
    _, pp, tp, _, ep = sizes
    options = [f"--{axis}={size}" for axis, size in zip(AXES, sizes, strict=True)]
    if pp > 1:
        fits = SCHEDULES[:3] if pp == 4 else SCHEDULES  # four layers, and a V takes eight
        options.append(f"--schedule={fits[number % len(fits)]}")
    if tp > 1 and number % 2:
        options.append("--sequence-parallel")
    if number % 3 == 0:
        options.append("--recompute")
    return options + (EXPERTS if ep > 1 or number % 2 else [])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    # Eight rows in two micro-batches; a norm that is above what clipping allows in every step.
    return [*small_gpt2.write(folder), "--batch=8", "--microbatches=2", "--clip=0.2"]


def by_sgd(runs):
    """On a rank: the losses of each run, by SGD, which sees a gradient's size."""
    found = []
    for arguments in runs:
        options = train.parse([*arguments, f"--steps={STEPS}"])
        with in_float64(), train.Training(options) as training:
            training.optimizer = torch.optim.SGD(training.pipeline.parameters(), lr=RATE)
            found.append([step.loss for step in training])
    return found


@pytest.fixture(scope="module")
def alone(eight, small):
    """One process's losses: without experts, and with."""
    dense, sparse = eight(1, by_sgd, [small, [*small, *EXPERTS]])[0]
    assert dense[-1] < dense[0] - 0.3 and sparse[-1] < sparse[0] - 0.3
    assert abs(dense[-1] - sparse[-1]) > 1e-3
    return {False: dense, True: sparse}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, sizes",
    [*enumerate(meshes(4)), *enumerate(meshes(8))],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_losses_are_those_of_one_process_on_every_mesh(eight, small, alone, number, sizes):
    options = options_of(sizes, number)
    expected = alone[EXPERTS[0] in options]
    for found in eight(math.prod(sizes), by_sgd, [[*small, *options]]):
        assert found[0] == pytest.approx(expected, rel=0, abs=1e-9)


def test_every_two_axes_meet_on_a_mesh():
    met = set()
    for sizes in meshes(8):
        used = [axis for axis, size in zip(AXES, sizes, strict=True) if size > 1]
        met |= {frozenset(pair) for pair in itertools.combinations(used, 2)}
    assert met == {frozenset(pair) for pair in itertools.combinations(AXES, 2)}


def told(runs):
    """On a rank: the losses of each run, or its error."""
    found = []
    for arguments in runs:
        try:
            found.append(train.losses(" ".join(arguments)))
        except train.UsageError as error:
            found.append(str(error))
    return found


def test_a_checkpoint_goes_on_with_other_axes(eight, small, tmp_path):
    """With Adam, whose moments are saved: eight ranks, then four, then one, and eight again."""
    base = [*small, *EXPERTS, "--lr=1e-3"]
    whole = eight(1, told, [[*base, "--steps=8"]])[0][0]
    save, losses = ["--save", str(tmp_path / "run"), "--resume"], []
    for steps, sizes, *more in [
        (2, (1, 2, 1, 2, 2)),
        (4, (1, 1, 2, 1, 2), "--zero=2"),
        (6, (1, 1, 1, 1, 1)),
        (8, (2, 1, 2, 1, 2), "--zero=3"),
    ]:
        options = [*base, *save, *options_of(sizes), *more, f"--steps={steps}"]
        losses += eight(math.prod(sizes), told, [options])[0][0]
    assert losses == pytest.approx(whole, rel=0, abs=1e-5)


# --- wrong ways are seen -------------------------------------------------------------------------


def own_balance(monkeypatch):
    """Each rank balances its own tokens; the mean over ranks."""
    counted, count_choices = [], moe.count_choices

    def counting(experts, number):
        counted[:] = [count_choices(experts, number).sum(1)]
        return count_choices(experts, number)

    def balance(choices, probabilities, tokens):
        own = counted[0].sum() / 2  # tokens, of two choices each
        mean = probabilities / own * (own / tokens)  # of its own gradient, over the ranks
        return len(choices) * (counted[0] / counted[0].sum() * mean).sum()

    monkeypatch.setattr(moe, "count_choices", counting)
    monkeypatch.setattr(moe, "balancing_loss", balance)


def other_micro_batches(monkeypatch):
    """Each rank has consecutive rows of the batch: its micro-batches are not one process's."""

    def share(batch, options, mesh):
        places = mesh.place.data * mesh.sizes.expert + mesh.place.expert
        tokens, _, targets = (x.chunk(mesh.sizes.data * mesh.sizes.expert)[places] for x in batch)
        return tokens, split_sequence(targets, mesh.context, order="head_tail")

    monkeypatch.setattr(trainer, "share_of", share)


def stale_blocks(monkeypatch):
    around = ring.around

    def stale(block, cut):
        for owner, _ in around(block, cut):
            yield owner, block

    monkeypatch.setattr(ring, "around", stale)


def no_merge(monkeypatch):
    def averaged(output, lse, new_output, new_lse):
        output.lerp_(new_output.view_as(output), 0.5)
        lse.copy_(torch.logaddexp(lse, new_lse.view_as(lse)))

    monkeypatch.setattr(partial_attention, "merge", averaged)


WRONG = {
    "nothing": lambda patch: None,
    "an auxiliary loss per rank": own_balance,
    "other micro-batches": other_micro_batches,
    "experts summed over all else": lambda patch: patch.setattr(
        gradients, "expert_parameters", lambda model: {}
    ),
    "experts summed over nothing": lambda patch: patch.setattr(
        gradients, "expert_parameters", lambda model: dict.fromkeys(expert_parameters(model))
    ),
    "routers of a part of the tokens": lambda patch: patch.setattr(
        experts_mlp, "mark_sequence_module", lambda module, group: None
    ),
    "targets in plain order": lambda patch: patch.setattr(
        build, "split_sequence", lambda x, group, order: split_sequence(x, group)
    ),
    "layers summed over nothing": lambda patch: patch.setattr(
        gradient_sums, "sum_over_copies", lambda model, _: sum_over_copies(model, None)
    ),
    "stale blocks": stale_blocks,
    "no merge by log-sum-exp": no_merge,
}


def wrong_ways(arguments, names):
    """On a rank: three losses by SGD of each wrong way."""
    found = {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, "COEFFICIENT", 1.0)  # seen in three steps
            WRONG[name](patch)
            with train.Training(train.parse([*arguments, "--steps=3"])) as training:
                training.optimizer = torch.optim.SGD(training.pipeline.parameters(), lr=RATE)
                found[name] = [step.loss for step in training]
    return found


def test_wrong_ways_are_seen(eight, small):
    arguments = [*small, *EXPERTS, "--clip=100"]
    (right,) = eight(1, wrong_ways, arguments, ["nothing"])[0].values()
    mesh, found = [*arguments, *options_of((1, 1, 2, 2, 2))], {}
    names = list(WRONG)
    for first in range(0, len(names), 5):  # a call has a few minutes
        found |= eight(8, wrong_ways, mesh, names[first : first + 5])[0]
    for name, losses in found.items():
        apart = max(abs(one - other) for one, other in zip(losses, right, strict=True))
        assert (apart < 1e-5) == (name == "nothing"), (name, apart)


# --- what cannot be ------------------------------------------------------------------------------

REFUSED = [
    (
        ["--cp=4", "--ep=4", *EXPERTS],
        "--dp 1, --tp 1, --cp 4 and --ep 4 cannot share 8 ranks: they are for 16, or a multiple",
    ),
    (
        ["--cp=2", "--pp=2"],
        "a mesh of data 1 x pipeline 2 x tensor 1 x context 2 has 4 ranks, the world has 8",
    ),
    (
        ["--cp=8", *EXPERTS],
        "with --cp 8 and --tp 1 sequences are padded to multiples of 16, in one process to "
        "multiples of 8, and the routers of experts see the padding",
    ),
    (
        ["--cp=4", "--tp=2", "--dropout=0.1"],
        "--cp 4 goes with --dropout 0, not 0.1: each rank would draw masks of its own",
    ),
    (
        ["--cp=4", "--tp=4", "--pp=1", *EXPERTS],
        "with --cp 4 and --tp 4 sequences are padded to multiples of 16, in one process to",
    ),
    (["--ep=2"], "--ep goes with --experts N, the number of experts"),
    (["--top-k=2"], "--top-k goes with --experts N, the number of experts"),
    (["--ep=8", "--experts=12"], "--ep 8 does not divide --experts 12"),
    (["--experts=2", "--top-k=3"], "--top-k 3 is more than --experts 2"),
    (
        ["--dp=2", "--ep=4", *EXPERTS],
        "--batch 8 cannot be divided into 8 shares of 2 micro-batches of one size",
    ),
]


def test_sequences_are_padded_for_any_number_of_ranks(eight, tmp_path):
    """Three ranks, and eight, which do not divide a multiple of 8 into heads and tails."""
    base = [
        *small_gpt2.write(tmp_path, positions=48),
        "--batch=8",
        "--microbatches=2",
        "--clip=0.2",
    ]
    alone = eight(1, by_sgd, [base])[0][0]
    for ranks, *options in (
        (3, "--cp=3"),
        (8, "--cp=8"),
        (6, "--cp=3", "--tp=2", "--sequence-parallel"),
    ):
        for found in eight(ranks, by_sgd, [[*base, *options]]):
            assert found[0] == pytest.approx(alone, rel=0, abs=1e-9)


def test_padding_needs_positions(eight, tmp_path):
    base = small_gpt2.write(tmp_path, positions=40)
    words = (
        "with --cp 8 and --tp 1 sequences are padded to multiples of 16: the longest has 40 tokens"
    )
    for (said,) in eight(8, told, [[*base, "--cp=8"]]):
        assert words in said and said.endswith("has 40 positions")


def test_what_cannot_work_is_refused_on_every_rank(eight, small):
    answers = eight(8, told, [[*small, *options] for options, _ in REFUSED])
    for found in answers:
        for (options, words), text in zip(REFUSED, found, strict=True):
            assert isinstance(text, str) and words in text, (options, text)


def test_experts_and_micro_batches_stay_what_they_were(eight, small, tmp_path):
    folder = tmp_path / "run"
    base = [*small, "--save", str(folder)]
    eight(1, told, [[*base, *EXPERTS, "--steps=1"]])
    others = [
        ["--experts=4", "--top-k=1"],
        [*EXPERTS, "--microbatches=4"],
        ["--experts=8", "--top-k=2"],
    ]
    found = eight(1, told, [[*base, "--resume", "--steps=2", *other] for other in others])[0]
    for text, words in zip(
        found,
        [
            "saved with another --top-k (2, now 1)",
            "saved with another --microbatches (2, now 4)",
            "has shape [",
        ],
        strict=True,
    ):
        assert words in text, found
