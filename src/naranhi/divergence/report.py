"""The finder's result: the first place where ranks diverge from one process, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """The first tensor of a step that is wrong on some rank.

    Attributes:
        phase: "data", "mask", "forward", "backward", "gradient", "norm", "step" or "weights".
        layer: the name of the layer, or of the parameter, in the unsplit model.
        microbatch: the micro-batch's number on each rank; 0 for a tensor that a step has once.
        ranks: the ranks where it is wrong.
        axis: the mesh axis along which ranks differ (or miss a sum), whose size is the factor (or
            its inverse), or whose ranks, all wrong, compute the tensor together; None if no single
            axis explains the error.
        what: how the ranks differ, in words.
        error: the largest distance of an element from one process.
        allowed: the largest distance that rounding explains.
        factor: the constant factor between the ranks' tensors and one process's; None if none.
        wrong: how many of the phase's tensors are wrong on some rank.
        compared: how many of the phase's tensors were compared.
    """

    phase: str
    layer: str
    microbatch: int
    ranks: tuple[int, ...]
    axis: str | None
    what: str
    error: float = 0.0
    allowed: float = 0.0
    factor: float | None = None
    wrong: int = 1
    compared: int = 1

    def __str__(self) -> str:
        inside = self.phase in ("mask", "forward", "backward")
        place = f"{self.layer or 'the model'}, {MEANS[self.phase]}"
        place += f", micro-batch {self.microbatch}" * inside
        size = f"; off by {self.error:.1e}, allowed {self.allowed:.1e}" if self.error else ""
        more = f"; {self.wrong} of {self.compared} such tensors differ" * (self.wrong > 1)
        return f"{place}: {self.what}{size}{more}"


MEANS = {
    "data": "the batch",
    "mask": "random mask",
    "forward": "forward",
    "backward": "gradient of the output (computed by what follows)",
    "gradient": "gradient of the parameter",
    "norm": "gradient handed to the optimizer",
    "step": "the optimizer's step",
    "weights": "weight after the step",
}


@dataclass(frozen=True)
class Report:
    """The result of `find`, the same on every rank.

    Attributes:
        divergence: the first place where ranks diverge from one process; None if there is none.
        compared: how many tensors were compared, over all ranks.
        margin: the largest ratio of a tensor's distance to its bound: at most 1 if there is no
            divergence.
    """

    divergence: Divergence | None
    compared: int
    margin: float = 0.0

    def __str__(self) -> str:
        if self.divergence:
            return str(self.divergence)
        return f"no divergence: {self.compared} tensors compared"
