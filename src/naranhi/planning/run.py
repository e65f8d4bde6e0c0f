"""A published training run, as the arguments of `predict`."""

from typing import NamedTuple

from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan


class Run(NamedTuple):
    """A published run, or one of a sweep that failed.

    Attributes:
        source: Where it was published.
        name: The model's name there, and what distinguishes the run from others.
        model: The model.
        cluster: The cluster.
        plan: The plan.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        seconds: Of a step; None if not published.
        memory: Bytes of the fullest rank; None if not published.
        failed: Whether it ended with an error.
        counted: What `memory` counts: "in use" at the fullest moment; "reserved" with the free
            blocks that the allocator keeps; "first" the same of the first stage, not of the
            fullest; or "kept" without temporary memory.
        activations: The activations in flight that the run may have kept, in multiples of what its
            plan's schedule keeps: a schedule found by search may fill its memory limit, where a
            handmade one does not.
        crashed: Whether the error was something other than running out of memory.
        flawed: Whether its pipeline is known to have run before a defect of its engine was fixed.
    """

    source: str
    name: str
    model: Model
    cluster: Cluster
    plan: Plan
    sequence_length: int
    global_batch: int
    seconds: float | None
    memory: float | None
    failed: bool = False
    counted: str = "in use"
    activations: float = 1.0
    crashed: bool = False
    flawed: bool = False
