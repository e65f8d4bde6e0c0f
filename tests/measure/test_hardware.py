"""What a machine says of itself, from made-up /proc and /sys trees, and how measuring behaves."""

import os
import stat
import time

import pytest
import torch

from naranhi import measure
from naranhi.measure.hardware import Part


@pytest.fixture
def machine(tmp_path):
    """Two cores, each with its L1 and L2, one L3 for both; one InfiniBand port and one of RoCE."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    write("proc/meminfo", "MemTotal:       1024 kB\nMemFree:        12 kB")
    write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Abacus 3000\n")
    caches = [
        (1, "Data", "48K"),
        (1, "Instruction", "32K"),
        (2, "Unified", "2048K"),
        (3, "Unified", "32768K"),
    ]
    for core in (0, 1):
        for index, (level, kind, size) in enumerate(caches):
            folder = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            for name, text in (
                ("level", str(level)),
                ("type", kind),
                ("size", size),
                ("shared_cpu_list", "0-1" if level == 3 else str(core)),
            ):
                write(f"{folder}/{name}", text)
    for card, rate, layer in (
        ("mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "100 Gb/sec (4X EDR)", "Ethernet"),
    ):
        write(f"sys/class/infiniband/{card}/ports/1/rate", rate)
        write(f"sys/class/infiniband/{card}/ports/1/link_layer", layer)
    return tmp_path


def test_caches_are_counted_once_however_many_cores_share_them(machine):
    assert measure.caches(root=machine) == [
        Part("L1 cache", 2, 48 * 1024),  # the instruction caches hold no data
        Part("L2 cache", 2, 2 * 2**20),
        Part("L3 cache", 1, 32 * 2**20),
    ]


def test_parts_come_nearest_first_and_ports_in_bytes_a_second(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cores, *caches, memory, infiniband, roce = measure.parts(machine)
    assert cores == Part("core", len(os.sched_getaffinity(0)), detail="Abacus 3000")
    assert caches == measure.caches(root=machine)
    assert memory == Part("memory", 1, 2**20)
    assert infiniband == Part("InfiniBand port", 1, None, 50e9, "mlx5_0")
    assert roce == Part("Ethernet port", 1, None, 12.5e9, "mlx5_1")


def test_a_core_with_two_hardware_threads_is_one_core(machine):
    ours = sorted(os.sched_getaffinity(0))
    pairs = [ours[first : first + 2] for first in range(0, len(ours), 2)]
    for pair in pairs:
        for cpu in pair:
            topology = machine / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(",".join(map(str, pair)) + "\n")
    assert measure.parts(machine)[0].count == len(pairs)


def test_what_the_system_hides_is_left_out(tmp_path):
    assert measure.caches(root=tmp_path) == []
    assert measure.rdma_ports(tmp_path) == []


def test_this_machine_has_the_memory_that_its_operating_system_counts():
    memory = next(part for part in measure.parts() if part.name == "memory")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.bytes == pytest.approx(pages, rel=0.01)


def test_gpus_of_a_kind_are_one_part(monkeypatch):
    class H100:
        name, L2_cache_size, total_memory = "NVIDIA H100", 50 * 2**20, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    assert measure.gpus() == [
        Part("GPU's L2 cache", 8, 50 * 2**20),
        Part("GPU's memory", 8, 80 * 2**30, detail="NVIDIA H100"),
    ]
    assert measure.caches("cuda:3") == [Part("GPU's L2 cache", 1, 50 * 2**20)]


def test_topology_is_what_nvidia_smi_prints_without_its_colours(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nprintf "\\033[4mGPU0\\tGPU1\\033[0m\\n$*\\n"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert measure.topology() == "GPU0    GPU1\ntopo -m"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert measure.topology() is None


def test_the_best_of_the_repetitions_counts():
    pauses = iter([0.0, *[0.03] * 3, *[0.03, 0.03, 0.005, 0.03]])
    best = measure.best_seconds({"nap": lambda: time.sleep(next(pauses))}, repeats=4)
    assert 0.005 <= best["nap"] < 0.03


def test_short_runs_are_repeated_until_the_clock_does_not_matter_and_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    measure.best_seconds(runs, repeats=2, span=1e-3)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == list("ababab")
    assert order.count("a") > 100


@pytest.mark.parametrize("runs, repeats", [({}, 3), ({"a": list}, 0)])
def test_measuring_nothing_is_refused(runs, repeats):
    with pytest.raises(ValueError, match="at least"):
        measure.best_seconds(runs, repeats=repeats)


def test_more_bytes_and_more_rows_take_longer():
    """8,000 times the bytes, and 1,000 times the rows: far more than any noise."""
    copies = measure.copy_seconds([2**12, 2**25])
    assert 0 < 10 * copies[2**12] < copies[2**25]
    products = measure.product_seconds([1, 1024], 512, 512)
    assert 0 < 3 * products[1] < products[1024]
