"""The forecast of a step, and the words for its parts."""

from typing import NamedTuple

from naranhi.planning.cluster import GIB
from naranhi.planning.memory import Memory


class Forecast(NamedTuple):
    """The expected time and memory of a step.

    Attributes:
        step_seconds: Seconds of a training step.
        low: Nine runs in ten are expected to take from `low` to `high` seconds per step.
            `accuracy` says for what fraction of the published runs that is true.
        high: See `low`.
        parts: Where the seconds of a step go, by name (`PARTS`); their sum is `step_seconds`.
        memory: The `Memory` of each stage.
        capacity: Bytes of a GPU that training can fill.
        tokens_per_second_per_gpu: Tokens of the global batch over seconds and GPUs.
        tflops_per_gpu: Model operations in 10^12 per second per GPU, without recomputed ones, and
            with attention to all tokens (`Model.flops_per_token`): causal kernels compute half of
            that, so with long sequences the figure is higher than what is computed.
        mfu: The same as a fraction of the GPU's peak at the plan's precision.
    """

    step_seconds: float
    low: float
    high: float
    parts: dict[str, float]
    memory: tuple[Memory, ...]
    capacity: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max(memory.total for memory in self.memory)

    @property
    def reserved_bytes(self) -> float:
        """Bytes of the fullest rank, with free blocks that its allocator keeps."""
        return max(memory.reserved for memory in self.memory)

    @property
    def memory_by_stage(self) -> tuple[float, ...]:
        """Bytes of a rank of each stage."""
        return tuple(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return max(memory.needed for memory in self.memory) <= self.capacity

    def fits_with(self, margin: float) -> bool:
        """Return whether every rank fits and leaves the fraction `margin` of the capacity free.

        Cached blocks count only as far as the capacity has room for them: the allocator frees them
        before it fails.
        """
        return max(memory.wanted for memory in self.memory) <= self.capacity * (1 - margin)

    @property
    def verdict(self) -> str:
        """One sentence: whether the plan fits, or by how much it does not and its largest part."""
        stage = max(range(len(self.memory)), key=lambda s: self.memory[s].needed)
        fullest = self.memory[stage]
        needed, capacity = fullest.needed / GIB, self.capacity / GIB
        where = f"stage {stage}" if len(self.memory) > 1 else "each rank"
        if self.fits:
            return f"fits: {where} holds {needed:.1f} GiB of {capacity:.1f} GiB"
        parts = (name for name in fullest._fields if name != "cached")
        most = max(parts, key=lambda name: getattr(fullest, name))
        return (
            f"does not fit, by {needed - capacity:.1f} GiB: {where} needs {needed:.1f} GiB and "
            f"has {capacity:.1f} GiB; the largest part is {MEMORY[most]} "
            f"({getattr(fullest, most) / GIB:.1f} GiB)"
        )


# What is in memory, in words.
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "what one layer, the loss or the update needs for a moment",
    "cached": "free blocks that the allocator keeps until it needs them",
    "fragments": "free pieces too small for what is allocated next",
}
# What a part of a step is, in words.
PARTS = {
    "computing": "matmuls and what is between them, forward and backward, on the busiest stage",
    "attention": "scores and what is done with them, forward and backward",
    "recomputing": "forwards that its backwards repeat",
    "host": "waiting for the host to launch kernels",
    "tensor": "tensor parallel messages, as far as nothing hides them",
    "context": "keys and values of other ranks that arrive late",
    "expert": "tokens on their way to their experts and back",
    "sharding": "gathering parameters and reducing gradients, layer by layer",
    "bubble": "the busiest stage waits for other stages",
    "pipeline": "messages between stages",
    "data": "reducing gradients and gathering parameters, beyond what the backward hides",
    "optimizer": "updating this rank's parameters",
    "stragglers": "waiting for the slowest rank",
}
