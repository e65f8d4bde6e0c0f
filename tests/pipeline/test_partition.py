"""Where to cut: the dynamic program against all splits there are, and profiles of real layers."""

import subprocess
import sys
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from naranhi import models, pipeline, schedules
from naranhi.autograd import SavedTensors
from naranhi.pipeline import LayerProfile, profile
from naranhi.pipeline.partition import as_list
from naranhi.pipeline.tied_weights import check_max_norm
from naranhi.schedules import simulate


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layers_of(*times, output_bytes=0, parameter_bytes=0):
    """A profile of layers named a, b, c, ..., with these forwards and backwards twice as long."""
    return [
        LayerProfile(chr(97 + place), time, 2 * time, output_bytes, 0, parameter_bytes)
        for place, time in enumerate(times)
    ]


def all_balances(layers, stages):
    """Every way to cut: which of the places between two layers are cut."""
    for cuts in combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        yield [end - start for start, end in pairwise(ends)]


def pace(found, balance, bandwidth, latency):
    """The slowest of all stages and links, written from the definition."""
    rest, stages, links = list(found), [], []
    for size in balance:
        part, rest = rest[:size], rest[size:]
        stages.append(sum(layer.forward + layer.backward for layer in part))
        if rest:
            one_way = (part[-1].output_bytes / bandwidth if bandwidth else 0) + latency
            links.append(2 * one_way)
    return max(stages + links)


# --- the dynamic program -------------------------------------------------------------------------

profiles = st.lists(
    st.builds(
        LayerProfile,
        st.just("layer"),
        st.integers(1, 20).map(Fraction),
        st.integers(1, 40).map(Fraction),
        st.integers(0, 100),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200)
@given(st.data(), profiles)
def test_as_good_as_the_best_of_all_splits(data, found):
    stages = data.draw(st.integers(1, len(found)))
    bandwidth = data.draw(st.sampled_from([None, Fraction(1), Fraction(4), Fraction(100)]))
    latency = data.draw(st.sampled_from([0, Fraction(1, 2), Fraction(30)]))
    balance = pipeline.balanced(found, stages, bandwidth, latency)
    best = min(pace(found, one, bandwidth, latency) for one in all_balances(len(found), stages))
    assert pace(found, balance, bandwidth, latency) == best
    assert pipeline.slowest(found, balance, bandwidth, latency) == best
    assert len(balance) == stages and sum(balance) == len(found) and min(balance) >= 1

    def largest(balance):
        rest = [layer.parameter_bytes for layer in found]
        return max(sum(rest.pop(0) for _ in range(size)) for size in balance)

    sized = pipeline.by_size(found, stages)
    assert largest(sized) == min(map(largest, all_balances(len(found), stages)))
    assert sorted(pipeline.uniform(found, stages), reverse=True) == pipeline.uniform(found, stages)
    assert max(pipeline.uniform(found, stages)) - min(pipeline.uniform(found, stages)) <= 1


def test_by_hand():
    found = layers_of(1, 1, 1, 1, 4, 4)
    assert pipeline.uniform(found, 3) == [2, 2, 2]
    assert pipeline.balanced(found, 3) == [4, 1, 1]
    assert pipeline.slowest(found, [2, 2, 2]) == 24
    assert pipeline.slowest(found, [4, 1, 1]) == 12
    assert pipeline.stage_times(found, [4, 1, 1]) == ([4, 4, 4], [8, 8, 8])
    assert pipeline.uniform(found, 4) == [2, 2, 1, 1]
    assert pipeline.balanced(found, 1) == [6]
    assert pipeline.balanced(found, 6) == [1] * 6
    assert pipeline.slowest(found, [6]) == 36


def test_a_cut_is_moved_away_from_a_large_activation():
    """12 s of stages each where 1000 bytes would cross; one layer further only 10 do."""
    found = [
        LayerProfile("wide", 4, 8, 1000, 0, 0),
        LayerProfile("narrow", 1, 2, 10, 0, 0),
        LayerProfile("last", 3, 6, 10, 0, 0),
    ]
    assert pipeline.balanced(found, 2) == [1, 2]
    assert pipeline.balanced(found, 2, bandwidth=1000) == [1, 2]  # 2 s, while stages take 12 s
    assert pipeline.balanced(found, 2, bandwidth=100) == [2, 1]  # 20 s, but for 15 s and 9 s
    assert pipeline.slowest(found, [1, 2], bandwidth=100) == 20
    assert pipeline.slowest(found, [2, 1], bandwidth=100) == 15
    assert pipeline.slowest(found, [2, 1], bandwidth=100, latency=8) == 2 * (0.1 + 8)


def test_no_pipeline_is_faster_than_its_slowest_stage():
    """Many micro-batches in: the time of one more is that of the slowest stage."""
    found = layers_of(1, 1, 1, 1, 4, 4)
    for balance in ([2, 2, 2], [4, 1, 1], [1, 2, 3]):
        forward, backward = pipeline.stage_times(found, balance)
        costs = [
            max(
                row[-1].end
                for row in simulate(schedules.one_f_one_b(3, m), forward, backward, latency=0)
            )
            for m in (10, 11)
        ]
        assert costs[1] - costs[0] == pipeline.slowest(found, balance)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 0.0, -1.0, nan, inf, None, "1"])
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_a_time_that_is_none_is_named(what, wrong):
    found = layers_of(1, 1, 1)
    found[1] = found[1]._replace(**{what: wrong})
    message = rf"layer 1 \(b\): {what} must be a time above 0 s, not {wrong!r}"
    for call in (
        lambda: pipeline.balanced(found, 2),
        lambda: pipeline.slowest(found, [1, 2]),
        lambda: pipeline.stage_times(found, [1, 2]),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert pipeline.uniform(found, 2) == [2, 1]  # needs no times


@pytest.mark.parametrize("wrong", [-1, None, 1.5])
def test_bytes_that_are_none_are_named(wrong):
    found = layers_of(1, 1, 1)
    found[1] = found[1]._replace(output_bytes=wrong, parameter_bytes=wrong)
    with pytest.raises(ValueError, match=r"layer 1 \(b\): output_bytes must be a number of bytes"):
        pipeline.balanced(found, 2, bandwidth=1e9)
    with pytest.raises(ValueError, match=r"layer 1 \(b\): parameter_bytes must be a number of by"):
        pipeline.by_size(found, 2)
    assert pipeline.balanced(found, 2) in ([1, 2], [2, 1])  # needs no bytes


@pytest.mark.parametrize("split", [pipeline.balanced, pipeline.by_size, pipeline.uniform])
def test_stages_that_there_cannot_be_are_refused(split):
    with pytest.raises(ValueError, match="more stages than layers: 3 stages, 2 layers"):
        split(layers_of(1, 1), 3)
    with pytest.raises(ValueError, match="more stages than layers: 1 stages, 0 layers"):
        split([], 1)
    for wrong in (0, -1, 2.0):
        with pytest.raises(ValueError, match=f"stages must be a whole number .* not {wrong}"):
            split(layers_of(1, 1), wrong)


def test_links_and_balances_that_make_no_sense_are_refused():
    found = layers_of(1, 1, 1)
    for wrong in (0, -1.0, nan, "fast"):
        with pytest.raises(ValueError, match="bandwidth is in bytes per second"):
            pipeline.balanced(found, 2, bandwidth=wrong)
    for wrong in (-1.0, nan, None):
        with pytest.raises(ValueError, match="latency is a time"):
            pipeline.balanced(found, 2, latency=wrong)
    for wrong in ([1, 1], [3, 0], [4, -1], []):
        with pytest.raises(ValueError, match="does not cut 3 layers"):
            pipeline.slowest(found, wrong)


def test_the_split_needs_no_torch():
    code = "import sys, naranhi.schedules.balance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- profiles of real layers ---------------------------------------------------------------------


def test_a_layer_of_sixteen_times_the_work_takes_longer():
    blocks = [models.MLPBlock(128, inner) for inner in (128, 2048, 128, 128, 2048, 128)]
    found = profile(blocks, torch.randn(256, 128), repeats=5)
    assert [layer.name for layer in found] == [f"{place} MLPBlock" for place in range(6)]
    for what in ("forward", "backward"):
        times = [getattr(layer, what) for layer in found]
        light = [time for place, time in enumerate(times) if place not in (1, 4)]
        assert min(times[1], times[4]) > 2 * max(light)
    assert pipeline.balanced(found, 2) in ([2, 4], [3, 3], [4, 2])  # the two are apart
    assert [layer.output_bytes for layer in found] == [256 * 128 * 4] * 6
    assert [layer.parameter_bytes for layer in found] == [
        4 * (2 * 128 * inner + inner + 128) for inner in (128, 2048, 128, 128, 2048, 128)
    ]


def test_times_are_those_that_pass():
    """Of layers that wait until a set time has passed, in forward and in backward."""
    paced = [models.Paced(block, 0.004, 0.008) for block in models.mlp(4, 8)]
    paced[0].times.update(forward=0.03, backward=0.02)
    found = profile(paced, torch.randn(2, 8), repeats=5, warmup=1)
    assert found[0].forward >= 0.03 and found[0].backward >= 0.02
    for layer in found[1:]:
        assert layer.forward >= 0.004 and layer.backward >= 0.008
    assert found[0].forward > found[0].backward and found[1].forward < found[1].backward
    assert pipeline.balanced(found, 2) == [1, 3]


def test_every_storage_is_counted_once():
    """What a ReLU has kept as its result, the Linear after it does not keep again as its input."""
    x = torch.randn(3, 8)
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    found = profile(layers, x, repeats=1, warmup=0)
    assert [layer.saved_bytes for layer in found] == [3 * 8 * 4, 3 * 8 * 4, 0]
    with SavedTensors(layers) as saved:
        y = nn.Sequential(*layers)(x)
    assert sum(layer.saved_bytes for layer in found) == saved.bytes
    assert [layer.output_bytes for layer in found] == [3 * 8 * 4, 3 * 8 * 4, 3 * 4 * 4]
    assert [layer.parameter_bytes for layer in found] == [4 * 72, 0, 4 * 36]
    assert all(layer.forward > 0 and layer.backward > 0 for layer in found)
    del y


class Twice(nn.Module):
    """The same weights under two names, and a part of them under a third."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.again = self.weight
        self.part = nn.Parameter(self.weight.detach()[:2])

    def forward(self, x):
        return x @ self.weight @ self.again


def test_shared_parameters():
    """Once in a layer; in each of two layers that share them, which may be cut apart."""
    assert profile([Twice()], torch.randn(3, 8), 1, 0)[0].parameter_bytes == 8 * 8 * 4
    config = models.gpt2_config(vocabulary=96, positions=16, hidden=32, heads=2, blocks=2)
    tokens = torch.randint(0, 96, (2, 16))
    found = profile(models.gpt2(config, tied=True), tokens, repeats=1)
    words = 96 * 32 * 4
    assert found[0].parameter_bytes == words + 16 * 32 * 4
    assert found[-1].parameter_bytes == words + 2 * 32 * 4
    assert found[-1].output_bytes == 2 * 16 * 96 * 4


def test_tuples_are_handed_on():
    config = models.gpt2_config(vocabulary=96, positions=16, hidden=32, heads=2, blocks=2)
    tokens, mask = torch.randint(0, 96, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    found = profile(models.gpt2(config), (tokens, mask), repeats=1)
    assert found[1].output_bytes == 2 * 16 * 32 * 4 + 2 * 16 * 8
    assert pipeline.balanced(found, 4) == [1] * 4


def test_a_profile_leaves_no_gradient():
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    frozen = nn.Linear(8, 8).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    found = profile([frozen, *layers], x, repeats=1)
    assert x.grad is None
    assert all(p.grad is None for layer in layers for p in layer.parameters())
    with torch.no_grad():  # a profile is of training, wherever it is called
        again = profile([frozen, *layers], x, repeats=1)
    assert [layer.saved_bytes for layer in again] == [layer.saved_bytes for layer in found]


def test_profiles_that_cannot_be_are_refused():
    for layers, options in (
        ([], {}),
        ([nn.Linear(2, 2)], {"repeats": 0}),
        ([nn.Linear(2, 2)], {"warmup": -1}),
    ):
        with pytest.raises(ValueError, match="layers and repeats must be at least 1"):
            profile(layers, torch.randn(1, 2), **options)


def test_an_embedding_with_max_norm_needs_to_be_the_only_copy():
    table, head = nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4, bias=False)
    check_max_norm([[table], [head]], (0, 1), has_replicas=False)
    with pytest.raises(ValueError, match="an embedding has max_norm"):
        check_max_norm([[table], [head]], (0, 1), has_replicas=True)
    head.weight = table.weight
    check_max_norm([[table], [head]], (0, 0), has_replicas=False)
    with pytest.raises(ValueError, match=r"0\.weight has max_norm"):
        check_max_norm([[table], [head]], (0, 1), has_replicas=False)


def test_a_model_that_is_no_list_is_told_from_one():
    layers = [nn.Linear(2, 2), nn.ReLU()]
    assert as_list(nn.Sequential(*layers)) == as_list(nn.ModuleList(layers)) == layers
    assert as_list(iter(layers)) == layers
    with pytest.raises(TypeError, match=r"a pipeline takes a list of layers, .* not a Linear: "):
        as_list(layers[0])
