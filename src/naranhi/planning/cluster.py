"""A cluster for the planner: GPUs with data-sheet figures, links, and a few fitted efficiencies.

Units: bytes, seconds, bytes per second, operations per second.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from naranhi.planning.arguments import check_real, make_whole
from naranhi.planning.engine import Engine, engines
from naranhi.planning.tables import rows

if TYPE_CHECKING:  # `plan` imports this module
    from naranhi.planning.plan import Plan

GIB = 2**30


class Gpu(NamedTuple):
    """A GPU's data sheet: dense operations, one direction of its links.

    Attributes:
        name: Its name in `gpus.csv`.
        memory: Bytes that a process can allocate.
        flops: Operations per second by precision ("bf16", "fp8", "fp32"); without "fp8" if the GPU
            has no fp8 matmuls. "fp32" is IEEE fp32, torch's default, not TF32.
        bandwidth: Bytes per second between the GPU and its memory.
        nvlink: Bytes per second that it sends to the GPUs of its node.
        network: Bytes per second that it sends to other nodes, as nodes are usually built.
        gpus_per_node: GPUs within one NVLink domain, as nodes are usually built.
        flash: Operations per second of each generation of FlashAttention, causal, forward and
            backward.
        source: Where the figures are from.
    """

    name: str
    memory: float
    flops: dict[str, float]
    bandwidth: float
    nvlink: float
    network: float
    gpus_per_node: int
    flash: tuple[float, float, float]
    source: str


@lru_cache(maxsize=1)
def gpus() -> dict[str, Gpu]:
    """Return the table of GPUs, by name."""
    return {
        row["gpu"]: Gpu(
            row["gpu"],
            float(row["memory_gib"]) * GIB,
            {
                precision: float(row[f"{precision}_tflops"]) * 1e12
                for precision in ("bf16", "fp8", "fp32")
                if row[f"{precision}_tflops"]
            },
            float(row["memory_gb_s"]) * 1e9,
            float(row["nvlink_gb_s"]) * 1e9,
            float(row["network_gbit_s"]) * 1e9 / 8,
            int(row["gpus_per_node"]),
            tuple(float(row[f"flash{n}_tflops"]) * 1e12 for n in (1, 2, 3)),
            row["source"],
        )
        for row in rows("gpus.csv")
    }


@lru_cache(maxsize=1)
def calibrations() -> dict[tuple[str, str], float]:
    """Return the matmul efficiency of each (GPU, engine) that one published run has calibrated."""
    return {
        (row["gpu"], row["engine"]): float(row["efficiency"]) for row in rows("calibrations.csv")
    }


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal nodes.

    Args:
        gpus: The number of GPUs.
        gpus_per_node: GPUs that NVLink joins; if None, as this GPU is usually built in. In racks
            with more than eight, a job uses equally many per rack, in whole trays: the most that
            divide `gpus`, such as 64 of 72 for 128 GPUs.
        gpu: The GPU: A100, A100-40GB, A800, H100, H100-96GB, H800, H200, B200 or GB200.
        network: Gbit/s between nodes for each GPU; if None, as this GPU is usually built in.
        engine: The training engine, one of `engines()`, which decides the kernels and the overlap.
        memory_gib: GiB of a GPU's memory that training may use; all of it, if None.
        efficiency: The fraction of the peak that a large matmul reaches; if None, as calibrated
            on a published run of this GPU and engine, or else of the nearest GPU and engine.

    Raises:
        TypeError: If a number of GPUs is not a whole number, or another value is not a number.
        ValueError: If a name is unknown, a number is out of range, or nodes are not full.
    """

    gpus: int
    gpus_per_node: int | None = None
    gpu: str = "H100"
    network: float | None = None
    engine: str = "megatron"
    memory_gib: float | None = None
    efficiency: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str) or self.gpu not in self._known_gpus():
            raise ValueError(f"gpu {self.gpu!r} is not in the table; choose one of {_list(gpus())}")
        if not isinstance(self.engine, str) or self.engine not in engines():
            raise ValueError(f"engine {self.engine!r} is unknown; choose one of {_list(engines())}")
        make_whole(self, "gpus", optional=("gpus_per_node",))
        if self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", _node(self.gpus, self.sheet.gpus_per_node))
        for name, most in (("gpus", MOST_GPUS), ("gpus_per_node", MOST_IN_NODE)):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is at least 1, not {value}")
            if value > most:
                raise ValueError(f"{name} = {value} cannot be right: it is at most {most:,}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus} GPUs are not whole nodes of {self.gpus_per_node}: give gpus as a "
                "multiple of gpus_per_node, or less than one node"
            )
        for name, value, most, unit in (
            ("network", self.network, 10_000, "Gbit/s for each GPU, such as 400"),
            ("memory_gib", self.memory_gib, 2_000, "GiB for each GPU, such as 79.1"),
            ("efficiency", self.efficiency, 1, "a part of the peak, such as 0.7"),
        ):
            if value is None:
                continue
            check_real(name, value)
            if not 0 < value <= most:
                raise ValueError(f"{name} = {value!r} cannot be right: it is in {unit}")

    def spans_nodes(self, ranks: int, stride: int) -> bool:
        """Return whether any group of ranks whose members are `stride` apart is on several nodes.

        If whole groups do not fill a node (groups of 3 or 6 in a node of 8), some are on two nodes.
        """
        return self.gpus > self.gpus_per_node and self.gpus_per_node % (ranks * stride) > 0

    def refuses(self, plan: "Plan") -> str | None:
        """Return why this cluster cannot run a plan with any model or batch; None if it can."""
        if plan.precision not in self.sheet.flops:
            return (
                f"precision = {plan.precision!r}: {self.gpu} does not multiply in it; choose one "
                f"of {_list(self.sheet.flops)}"
            )
        schedules = self.runs.schedules
        if plan.pp > 1 and schedules and plan.schedule not in schedules:
            return (
                f"schedule = {plan.schedule!r}: {self.engine} does not have it; choose one of "
                f"{_list(schedules)}"
            )
        return None

    def _known_gpus(self):
        return gpus()

    @property
    def calibrated(self) -> bool:
        """Whether a published run of this GPU and engine calibrates the matmul efficiency."""
        return (self.gpu, KERNELS.get(self.engine, self.engine)) in calibrations()

    @property
    def sheet(self) -> Gpu:
        """The data sheet of its GPUs."""
        return gpus()[self.gpu]

    @property
    def runs(self) -> Engine:
        """The engine that trains on it."""
        return engines()[self.engine]

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second between nodes, for each GPU: `network`, or else the data sheet's."""
        return self.sheet.network if self.network is None else self.network * 1e9 / 8

    @property
    def memory(self) -> float:
        """Bytes of each GPU that training may use."""
        return self.sheet.memory if self.memory_gib is None else self.memory_gib * GIB

    @property
    def capacity(self) -> float:
        """Bytes of each GPU that its engine can fill with tensors."""
        return self.memory * (1 - self.runs.headroom)

    @property
    def matmul_efficiency(self) -> float:
        """The fraction of the peak that a large matmul reaches: given, or else calibrated."""
        if self.efficiency is not None:
            return self.efficiency
        return _efficiency(self.gpu, self.engine)


@lru_cache(maxsize=256)
def _efficiency(gpu, engine):
    return nearest_efficiency(gpu, engine, calibrations())


def nearest_efficiency(gpu: str, engine: str, table: dict[tuple[str, str], float]) -> float:
    """Return the efficiency calibrated for a GPU and an engine, or the nearest ones' median.

    An engine with another engine's kernels counts as that engine. The nearest are, in this order:
    the engine on GPUs of the same family, any engine on that family, the engine on any GPU, and
    everything in the table.

    Args:
        gpu: A GPU's name.
        engine: An engine's name.
        table: Efficiencies by (GPU, engine), such as `calibrations()`.

    Raises:
        ValueError: If the table is empty.
    """
    engine = KERNELS.get(engine, engine)
    if (gpu, engine) in table:
        return table[gpu, engine]
    family = FAMILIES.get(gpu, gpu)
    near = {key: value for key, value in table.items() if FAMILIES.get(key[0], key[0]) == family}
    for same in (
        [value for key, value in near.items() if key[1] == engine],
        list(near.values()),
        [value for key, value in table.items() if key[1] == engine],
        list(table.values()),
    ):
        if same:
            return median(same)
    raise ValueError("the table of efficiencies is empty")


# Engines that all use Megatron-Core's matmuls, so that a run of "nemo" calibrates each of them.
KERNELS = dict.fromkeys(("megatron", "megatron-deepep", "megatron-2024", "nemo-2024"), "nemo")
# Above the largest cluster that anybody has, and above the largest switch domain: a number beyond
# these was meant in another unit, or mistyped.
MOST_GPUS, MOST_IN_NODE = 2**20, 1024
# GPUs of a box, which are used together, and of each tray of a larger NVLink domain.
BOX, TRAY = 8, 4
# GPUs with the same chip. (The H100 with 96 GB has another power limit, so other clocks.)
FAMILIES = {"A100-40GB": "A100", "A800": "A100", "H800": "H100", "H200": "H100", "GB200": "B200"}


def _node(gpus, most):
    """Return how many GPUs of each node a job uses, where a node has `most`."""
    if most <= BOX or gpus <= most:
        return most
    return next((used for used in range(most, 0, -TRAY) if gpus % used == 0), most)


def _list(names):
    return ", ".join(names)
