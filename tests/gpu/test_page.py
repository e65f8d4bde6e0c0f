"""What the page "On a GPU" says about its tables is in them, and the planner says what it says."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from naranhi import models
from naranhi.planning.cluster import Cluster, gpus
from naranhi.planning.compute import layer_work
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.prediction import layer_times

ROOT = Path(__file__).parents[2]
UNITS = {"GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12, "PFLOP/s": 1e15, "µs": 1e-6, "ms": 1e-3}
UNITS |= {"MiB": 2**20, "GiB": 2**30, "": 1, "element": 1}


def table(name):
    """The rows of a recorded table, as lists of texts."""
    record = json.loads((ROOT / "book/recorded/h100/one_gpu.json").read_text())
    _, rule, *lines = record["cells"][name]["outputs"][0]["text"].splitlines()
    columns = [column.span() for column in re.finditer("-+", rule)]
    return [[line[a:b].strip() for a, b in columns] for line in lines]


def value(text):
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * UNITS[unit]


@pytest.fixture(scope="module")
def pages():
    return [(ROOT / f"book/{language}/on_a_gpu.md").read_text() for language in ("en", "ko")]


def test_rates_beside_the_data_sheet(pages):
    best = {row[0]: value(row[2]) for row in table("limits")}
    sheet = gpus()["H100"]
    for rate, limit in (
        (best["copy in memory"], sheet.bandwidth),
        (best["product, bfloat16"], sheet.flops["bf16"]),
        (best["product, e4m3"], sheet.flops["fp8"]),
    ):
        assert all(f"{rate / limit:.0%}" in page for page in pages)
    assert round(best["product, bfloat16"] / best["product, fp32"]) == 15
    multiplied = (best["launch of a kernel"] * best["product, bfloat16"] / 2) ** (1 / 3)
    assert round(multiplied, -2) == 1400


EAGER = Cluster(1, gpu="H100", engine="fsdp")  # PyTorch without a compiler


def planned(width, seconds=layer_times):
    """Forward and backward of the block, in milliseconds, by the planner of chapter 23."""
    model = Model(1, width, width // 64, positions=1024, biases=True)
    times = seconds(model, EAGER, Plan(1, microbatch=4), 1024, sparse=False)
    return 1e3 * times.forward, 1e3 * times.backward


class Launched(TorchDispatchMode):
    """Counts the operations that launch a kernel: those that do not only look at a tensor anew."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_the_planner_beside_a_measured_block(pages):
    measured = {row[0]: [1e3 * value(part) for part in row[1:4]] for row in table("block-parts")}
    forward, backward = planned(8192)
    inputs_and_weights = sum(measured["8,192"][1:])
    for told in (forward, backward, measured["8,192"][0], inputs_and_weights):
        assert all(f"{told:.1f}" in page for page in pages)
    parts = measured["4,096"]
    for said, took in zip(planned(4096), (parts[0], sum(parts[1:])), strict=True):
        assert all(f"{took / said - 1:.0%}" in page for page in pages)
        assert all(f"{said:.1f} ms" in page for page in pages)
    assert measured["2,048"][0] < 1.5 * measured["512"][0]


def test_the_planner_has_a_lower_bound_where_the_gpu_waits(pages):
    for width in 512, 1024:
        assert all(f"{sum(planned(width, layer_work)):.2f} ms" in page for page in pages)
    assert sum(planned(512)) == pytest.approx(1.5)
    assert all("1.5 ms" in page for page in pages)
    alone = ["data parallelism, width 1,024", "the model alone"]
    [run] = (row[2] for row in table("beside") if row[:2] == alone)
    each = 1e3 * value(run) / 8
    assert all(f"{each:.1f} ms" in page for page in pages)
    assert sum(planned(1024)) == pytest.approx(each, rel=0.15)


def test_launches_alone_take_a_fraction_of_what_the_host_takes(pages):
    _, block, _ = models.gpt2(models.gpt2_config(16, 32, 128, 2, 1), attention="sdpa", dropout=0.0)
    x = torch.randn(2, 32, 128, requires_grad=True)
    with Launched() as forward:
        y = block(x)
    with Launched() as backward:
        y.backward(torch.ones_like(y))
    assert (forward.count, backward.count) == (17, 30)
    launch = next(value(row[2]) for row in table("limits") if row[0] == "launch of a kernel")
    assert all(f"{1e3 * 47 * launch:.2f} ms" in page for page in pages)


def test_counted_bytes_are_the_allocators():
    for _, _, counted, allocated, *_ in table("attention-memory"):
        assert counted == allocated
    rows = table("recomputation")
    for _, formula, counted, allocated, *_ in rows:
        assert formula == counted == allocated
    assert round(100 * value(rows[2][5]) / value(rows[0][5])) == 137


def test_engines_beside_each_other(pages):
    rows = {(row[0], row[1]): row[2:] for row in table("beside")}

    def times(work, engine, other):
        return value(rows[work, engine][0]) / value(rows[work, other][0])

    for width in ("1,024", "2,048"):
        ratio = times(f"ZeRO-3, width {width}", "naranhi", "torch fully_shard")
        for page, told in zip(pages, (f"{ratio:.0%}", f"{ratio:.2f}"), strict=True):
            assert told in page
        work = f"data parallelism, width {width}"
        cost = times(work, "naranhi", "the model alone") - 1
        assert all(f"{cost:.0%}" in page for page in pages)
    cost = times(
        "data parallelism, width 2,048", "torch DistributedDataParallel", "the model alone"
    )
    assert all(f"{cost - 1:.0%}" in page for page in pages)
    assert times("1F1B, 4 micro-batches", "naranhi", "torch Schedule1F1B") == pytest.approx(
        1, abs=0.01
    )
    assert times("recomputation, width 2,048", "naranhi", "torch checkpoint") < 1.02
    ways = [
        float(rows["attention, 32,768 tokens", f"naranhi {way}"][1]) - 1
        for way in ("ring", "gathered", "Ulysses")
    ]
    assert all(re.search(rf"{min(ways):.0%}".rstrip("%") + r"( to |~)", page) for page in pages)
    assert all(f"{max(ways):.0%}" in page for page in pages)
    added = {
        work: [
            1e3 * (value(rows[work, f"naranhi {way}"][0]) - value(rows[work, "torch, fused"][0]))
            for way in ("ring", "gathered", "Ulysses")
        ]
        for work in ("attention, 1,024 tokens", "attention, 32,768 tokens")
    }
    for least, most in ((min(times), max(times)) for times in added.values()):
        assert all(re.search(f"{least:.1f}( to |~){most:.1f} ms", page) for page in pages)
    for few, many in zip(*added.values(), strict=True):
        assert few / many == pytest.approx(2 / 3, rel=0.12)
    assert value(rows["cross-entropy", "naranhi"][2]) < 0.51 * value(
        rows["cross-entropy", "torch"][2]
    )
