"""A cluster as it was measured, in place of data sheets: `predict` takes either.

Only the cost of a layer, a message and an action is measured. `predict` works out how the layers
are cut, in which schedule they run and who waits for whom, as for any cluster.
Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from naranhi.costs import collective_seconds
from naranhi.planning.arguments import check_real
from naranhi.planning.cluster import GIB, Cluster, Engine, Gpu
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.stages import StageTimes, cut

VALUE = 4  # bytes of an element: a machine without GPUs trains in fp32


class Line(NamedTuple):
    """Seconds that are linear in a size: `start` + size x `rate`."""

    start: float
    rate: float

    def seconds(self, size: float) -> float:
        """Return the seconds for a size."""
        return self.start + size * self.rate


class Layer(NamedTuple):
    """A layer's seconds; a size of 1 is the whole layer for one whole sequence.

    Attributes:
        forward: Of its forward.
        backward: Of its backward.
        attention: The fraction of both that is attention, which can hide keys and values.
    """

    forward: Line
    backward: Line
    attention: float


@dataclass(frozen=True)
class Machine(Cluster):
    """Two groups of ranks with a slow link between them, as they were measured.

    The kernels are this book's: all-reduces by doubling in a layer and around a ring for gradients,
    a ring of keys and values, and a pipeline of layers without embedding and head.

    Args:
        layer: What a layer costs.
        near: What a message costs within a group, by its bytes.
        far: What a message costs between the groups.
        action: Seconds of an action of a schedule besides its layers.
        peak: Operations per second of a rank that computes all the time; the MFU is relative to it.

    Raises:
        TypeError: As for `Cluster`, or if `peak` is not a number.
        ValueError: As for `Cluster`, or if `layer`, `near`, `far` or `peak` is missing.
    """

    gpu: str = "measured"
    layer: Layer | None = None
    near: Line | None = None
    far: Line | None = None
    action: float = 0.0
    peak: float = 0.0

    def __post_init__(self) -> None:
        missing = [name for name in ("layer", "near", "far") if getattr(self, name) is None]
        check_real("peak", self.peak)
        if missing or not self.peak > 0:
            raise ValueError(
                f"a Machine is what was measured; give {', '.join(missing) or 'peak, above 0'}"
            )
        super().__post_init__()

    def refuses(self, plan: Plan) -> str | None:
        """Return what in a plan this machine was not measured with; None if it can run the plan."""
        measured = {"zero": 0, "ep": 1, "recompute": "none", "precision": "fp32"}
        measured |= {"sequence_parallel": False} if plan.tp > 1 else {}
        for name, value in measured.items():
            if getattr(plan, name) != value:
                return f"{name} = {getattr(plan, name)!r}: this machine was measured with {value!r}"
        return None

    def _known_gpus(self):
        return ("measured",)

    @property
    def calibrated(self) -> bool:
        """True: the seconds of its arithmetic were measured on the machine itself."""
        return True

    @property
    def sheet(self) -> Gpu:
        """The stand-in for a data sheet; its memory is `memory_gib`, or 1 GiB if that is None."""
        memory = (self.memory_gib or 1.0) * GIB
        flops = dict.fromkeys(("bf16", "fp8", "fp32"), self.peak)
        speed = 1 / self.near.rate if self.near.rate else float("inf")
        ranks = (self.peak,) * 3
        return Gpu("measured", memory, flops, speed, speed, speed, self.gpus, ranks, "measured")

    @property
    def runs(self) -> Engine:
        """Its engine, in which nothing hides behind a backward or waits for a host."""
        return super().runs._replace(overlap=0.0, gather_overlap=0.0, host_seconds=0.0)

    def line(self, ranks: int, stride: int) -> Line:
        """Return the slowest link of all groups of ranks whose members are `stride` apart."""
        return self.far if self.spans_nodes(ranks, stride) else self.near

    def doubling_seconds(self, bytes: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-reduce with partners at distances 1, 2, 4, ..."""
        levels = (ranks - 1).bit_length()
        return sum(self.line(2, stride << level).seconds(bytes) for level in range(levels))

    def stage_times(self, model: Model, plan: Plan, sequence_length: int) -> list[StageTimes]:
        """Return the seconds of each virtual stage for one micro-batch."""
        part = plan.microbatch / plan.tp / plan.cp
        forward, backward = self.layer.forward.seconds(part), self.layer.backward.seconds(part)
        whole = VALUE * plan.microbatch * sequence_length / plan.cp * model.hidden
        tensor = 2 * self.doubling_seconds(whole, plan.tp, 1)  # and as much in the backward
        ring = (plan.cp - 1) * self.line(plan.cp, plan.tp).seconds(2 * whole / plan.tp)
        hidden = self.layer.attention  # the part behind which blocks travel
        late = max(0.0, ring - hidden * forward), max(0.0, 2 * ring - hidden * backward)
        result = []
        for layers in cut(model, plan.pp * plan.chunks).layers:
            count = len(layers)
            computing = count * (forward + backward) + 2 * self.action
            parts = {"tensor": 2 * count * tensor, "context": count * sum(late)}
            result.append(
                StageTimes(
                    count * (forward + tensor + late[0]) + self.action,
                    count * (backward + tensor + late[1]) + self.action,
                    {"computing": computing, **parts},
                )
            )
        return result

    def hop_seconds(self, model: Model, plan: Plan, sequence_length: int) -> float:
        """Return the mean seconds of a message from one stage to the next."""
        if plan.pp == 1:
            return 0.0
        message = VALUE * plan.microbatch * sequence_length / plan.cp * model.hidden
        stride, node = plan.ranks // plan.pp, self.gpus_per_node
        crossings = [(s + 1) * stride // node != s * stride // node for s in range(plan.pp - 1)]
        return mean((self.far if far else self.near).seconds(message) for far in crossings)

    def gradient_seconds(self, plan: Plan, parameters: float) -> float:
        """Return the seconds of the all-reduce of gradients, around a ring."""
        line = self.line(plan.replicas, plan.tp)
        return collective_seconds(
            "all_reduce", VALUE * parameters, plan.replicas, line.start, line.rate
        )
