"""The harness of `make bench`: what it measures, and that it cannot compare different results."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import sent
import torch
import torch.distributed as dist

from naranhi import collectives
from tests.benchmarks import (
    bench_collectives,
    bench_context_parallel,
    bench_data_parallel,
    bench_expert_parallel,
    bench_pipelines,
    bench_tensor_parallel,
    bench_zero,
    harness,
    memory,
)


def test_every_collective_in_the_table():
    works = harness.found()
    assert len({work.name for work in works}) == len(works)
    names = {work.name for work in works}
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        for size in ("4 KiB", "1 MiB", "64 MiB"):
            for ranks in (2, 4):
                assert f"{collective}, {size}, {ranks} ranks" in names


def test_rows_of_a_small_work(tmp_path):
    kernels = bench_collectives.all_reduce, bench_collectives.all_gather
    works = [harness.Work(kernel.__name__, 2, kernel, (2**12,)) for kernel in kernels]
    told = []
    rows = harness.measured(works, repeats=3, report=told.append)
    harness.write(rows, tmp_path / "new" / "bench.json")
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == rows
    assert [line.split()[-1] for line in told] == ["all_reduce", "all_gather"]
    assert len(rows) == 4
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"]
        assert row["limit_s"] > 0
        if row["contender"] == "gloo":  # the only peer
            assert row["ratio_to_best_peer"] == 1.0
        assert row["repetitions"] == 3
    (row, _) = harness.measured(works[1:], repeats=3, seconds=60.0)
    assert row["repetitions"] == harness.MOST  # each takes a millisecond or two
    text = harness.table(rows)
    assert len(text.splitlines()) == 1 + len(rows)
    assert f"{1000 * rows[0]['median_s']:.3f}" in text


def test_each_kind_of_work_has_processes_of_its_own(monkeypatch):
    """What an engine leaves in a process can keep another from starting there."""
    made, make = [], harness.Ranks
    monkeypatch.setattr(
        harness, "Ranks", lambda *given, **named: made.append(make(*given, **named)) or made[-1]
    )
    kinds = bench_collectives.all_reduce, bench_collectives.all_gather, bench_pipelines.gpipe
    harness.measured([harness.Work(kind.__name__, 2, kind, (64,)) for kind in kinds], repeats=1)
    assert len(made) == 2


def test_pipelines_agree_and_what_they_hold_is_counted():
    works = [harness.Work("small", 2, bench_pipelines.gpipe, (64,), memory=True)]
    rows = harness.measured(works, repeats=2)
    assert {row["contender"] for row in rows} == {"naranhi", "torch ScheduleGPipe", "torchgpipe"}
    assert all(row["peak_bytes"] > 0 for row in rows)


def test_data_parallel_and_zero_engines_agree():
    """In the same processes, as importing DeepSpeed takes long."""
    kinds = bench_data_parallel.contenders, bench_zero.contenders, bench_zero.both_joined
    rows = harness.measured([harness.Work("small", 2, kind, (16,)) for kind in kinds], repeats=1)
    assert [row["contender"] for row in rows] == [
        "naranhi",
        "torch DistributedDataParallel",
        "DeepSpeed stage 0",
        "naranhi, small blocks joined",
        "naranhi, a unit for each block",
        "torch fully_shard",
        "DeepSpeed stage 3, sharding all",
        "DeepSpeed stage 3",
        "naranhi",
        "torch fully_shard",
    ]


def test_mixtures_of_experts_agree_whatever_the_routing():
    kind = bench_expert_parallel.contenders
    works = [harness.Work(f"skew {skew}", 2, kind, (16, 32, skew)) for skew in (0.0, 9.0)]
    rows = harness.measured(works, repeats=1)
    assert [row["contender"] for row in rows] == 2 * ["naranhi", "DeepSpeed"]


def test_zero_3_holds_no_more_than_fully_shard():
    work = harness.Work("small", 2, bench_zero.contenders, (256,))
    peaks = {}
    for name in "naranhi, a unit for each block", "torch fully_shard":
        with harness.Ranks(2, deadline=120.0) as world:
            peaks[name] = max(world.call(harness.memory_on_a_rank, work, name))
    ours, theirs = peaks.values()
    assert ours <= theirs, peaks


def test_tensor_parallel_engines_agree():
    kinds = bench_tensor_parallel.mlp, bench_tensor_parallel.attention
    rows = harness.measured([harness.Work(kind.__name__, 2, kind, (16,)) for kind in kinds], 1)
    assert [row["contender"] for row in rows] == 2 * ["naranhi", "torch parallelize_module"]


def test_context_parallel_engines_agree():
    works = [harness.Work("small", 2, bench_context_parallel.contenders, (64,))]
    names = [row["contender"] for row in harness.measured(works, repeats=1)]
    assert names == ["naranhi ring", "naranhi gathered", "naranhi ulysses", "DeepSpeed Ulysses"]


def test_peak_bytes_counts_what_is_gone_in_the_end():
    with harness.Ranks(1) as world:
        assert world.call(peak_of_30_mb)[0] == pytest.approx(30e6, rel=0.005)


def peak_of_30_mb():
    """10 kept by the maker, 8 and 12 in a step, of which another thread frees 8: no sum of 38."""

    def make():
        torch.ones(20_000_000)  # gone before the steps
        kept = torch.ones(2_500_000)

        def run():
            box = [torch.ones(2_000_000)]
            torch.ones(3_000_000)
            with ThreadPoolExecutor(1) as other:
                other.submit(box.clear).result()
            return torch.ones(4_000_000).sum().item() + kept[0].item()

        return run

    return memory.peak_bytes(make)


def wrong(group):
    one = torch.ones(3)
    make = {"naranhi": lambda: lambda: one, "peer": lambda: lambda: one + 1}
    return harness.Contenders(make, limit=lambda: dist.barrier(group))


def refused():
    with pytest.raises(AssertionError, match="wrong: peer is not naranhi"):
        harness.on_a_rank(harness.Work("wrong", 5, wrong), repeats=1)
    return True


def test_contenders_that_disagree_are_not_compared(five):
    assert five.call(refused) == [True] * 5


def test_the_limit_moves_the_rings_bytes(five):
    for moved in five.call(limits_bytes)[:2]:
        assert moved == 2 * [2**20]


def limits_bytes():
    """Bytes handed to isend by the limit of a 1 MiB all-reduce on 2 ranks, and by the ring."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    contenders = bench_collectives.all_reduce(group, 2**20)
    with sent.messages() as by_the_limit:
        contenders.limit()
    with sent.messages() as by_the_ring:
        collectives.all_reduce(torch.ones(2**18), group)
    return [sum(one.nbytes for one in messages) for messages in (by_the_limit, by_the_ring)]
