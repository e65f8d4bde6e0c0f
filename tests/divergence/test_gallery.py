"""The finder names every bug of the gallery, and says nothing once it is fixed."""

import re

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks

from naranhi.divergence import gallery
from naranhi.divergence.gallery import toys


@pytest.fixture(scope="module")
def world():
    """`world(ranks, function, *args)`: its results on a world of so many ranks."""
    with Ranks(4, 300.0) as pool:
        yield pool.call_in_a_world


def hunted(names):
    """{name: (what the finder says of the bug, whether that is it, what it says of the fix)}."""
    answers = {}
    for name in names:
        bug = gallery.BUGS[name]
        report = bug.hunt()
        answers[name] = str(report), bug.expected.is_named_by(report), str(bug.hunt(fixed=True))
    return answers


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("half", [0, 1])
def test_every_bug_is_named_and_its_fix_is_silent(world, ranks, half):
    names = [*gallery.BUGS][half::2]
    answers = world(ranks, hunted, names)
    assert all(answer == answers[0] for answer in answers)  # one report on every rank
    for name, (report, is_named, fixed) in answers[0].items():
        assert is_named, f"{name}: {report}"
        assert re.fullmatch(r"no divergence: \d\d+ tensors compared", fixed), f"{name}: {fixed}"


def test_what_the_reports_say(world):
    says = {name: answer[0] for name, answer in world(2, hunted, [*SAYS])[0].items()}
    for name, words in SAYS.items():
        assert words in says[name], says[name]


SAYS = {
    "mean of means": "micro-batch 0: rank 1 (pipeline 1) differs from one process by a factor of ",
    "divided twice": "by a factor of 0.500, as by the 2 data ranks",
    "tied weight": "the pipeline ranks 0 and 1 differ among themselves, and must agree: their sum "
    "is what one process has",
    "same batch": "4 of 8 rows are taken more than once: row 0 by rank 0 (data 0) and rank 1 (data "
    "1); 4 rows by nobody",
    "fused columns": "all ranks differ from one process, along the tensor axis: they have the same "
    "elements in another order",
    "lonely skip": "the optimizer of rank 0 (tensor 0) stepped; one process did not",
}


def curves(names):
    return {
        name: [gallery.BUGS[name].losses(12, fixed=fixed) for fixed in (False, True)]
        for name in names
    }


def test_bugs_make_no_noise(world):
    names = ["divided twice", "stale blocks", "norm of a shard", "missing backward"]
    for name, (wrong, right) in world(2, curves, names)[0].items():
        assert wrong[0] == pytest.approx(right[0], rel=1e-6), name  # the first loss is right,
        assert wrong[-1] != pytest.approx(right[-1], rel=1e-4), name  # the last one is not,
        assert min(wrong[8:]) < wrong[0], name  # and all the same it falls


def test_each_bug_has_what_a_reader_needs():
    assert len(gallery.BUGS) >= 12
    for name, bug in gallery.BUGS.items():
        assert bug.name == name
        assert bug.wrong is not bug.right
        assert bug.symptom and bug.hint
        assert bug.reports
        for address in bug.reports:
            assert re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", address)


def worlds_of_three():
    assert dist.get_world_size() == 3
    try:
        gallery.BUGS["divided twice"].hunt()
    except ValueError as error:
        return str(error)


def test_another_number_of_ranks(world):
    (words,) = set(world(3, worlds_of_three))
    assert words == "the gallery's bugs are for 2 or 4 ranks, and this world has 3"


def test_models_and_batches_are_where_the_ranks_exchange_from(monkeypatch):
    """Another device than the CPU's, which has no values here, in the place of a GPU."""
    monkeypatch.setattr(toys, "device_of", lambda: torch.device("meta"))
    values = [
        *(param for layer in (*toys.mlp(), *toys.gpt2()) for param in layer.parameters()),
        *toys.regression(0),
        *toys.text(0)[:2],
    ]
    assert {value.device.type for value in values} == {"meta"}
