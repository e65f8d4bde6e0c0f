"""Split the batch of a step into micro-batches: views of equal size along its first dimension."""

from collections.abc import Sequence

import torch


class Microbatches:
    """The inputs of a step, the targets, and the divisors of the losses, by micro-batch.

    Args:
        inputs: as `pipeline.Pipeline.step` takes them.
        targets: as `pipeline.Pipeline.step` takes them.
        count: as `pipeline.Pipeline.step` takes it.
        number: the number of micro-batches.
        with_targets: False where the targets are not needed.

    Raises:
        TypeError: the inputs or targets are not tensors with a first dimension, or tuples of such
            tensors.
        ValueError: `number` does not divide that dimension; a list of counts has a wrong length; or
            a tensor requires a gradient, which it would not receive.

    Attributes:
        inputs: a list of tensors for each micro-batch.
        counts: what the loss of each micro-batch is divided by.
    """

    inputs: list[tuple[torch.Tensor, ...]]
    counts: Sequence[float]

    def __init__(
        self,
        inputs: torch.Tensor | tuple[torch.Tensor, ...],
        targets: torch.Tensor | tuple[torch.Tensor, ...] | None,
        count: float | list[float] | tuple[float, ...],
        number: int,
        with_targets: bool,
    ) -> None:
        self.inputs, self._join_inputs = _split("inputs", inputs, number)
        self.counts = count if isinstance(count, (list, tuple)) else [count] * number
        if len(self.counts) != number:
            raise ValueError(f"count: {len(self.counts)} numbers for {number} micro-batches")
        if with_targets:
            self._targets, self._join_targets = _split("targets", targets, number)

    def first(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the first micro-batch as the first layer takes it."""
        return self._join_inputs(self.inputs[0])

    def target(self, microbatch: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the target of a micro-batch as the loss takes it."""
        return self._join_targets(self._targets[microbatch])


def _split(name, batch, number):
    """Return the parts of a batch as lists of tensors, and a function from a list to a part."""
    tensors = batch if isinstance(batch, tuple) else (batch,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            is_tensor = isinstance(tensor, torch.Tensor)
            kind = "a tensor without dimensions" if is_tensor else type(tensor).__name__
            raise TypeError(
                f"{name} must be a tensor with a first dimension to divide, or a tuple of such "
                f"tensors, not {kind}"
            )
        if len(tensor) != len(tensors[0]):
            raise ValueError(
                f"{name}: all tensors must have the same number of rows, not {len(tensors[0])} and "
                f"{len(tensor)}"
            )
        if not len(tensor) or len(tensor) % number:
            raise ValueError(
                f"{name}: {number} micro-batches of one size cannot be made of {len(tensor)} rows"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: a tensor {tuple(tensor.shape)} requires a gradient, and a pipeline gives "
                "it none: put the layers that made it into the pipeline, or detach() it"
            )
    # `.data` has a version counter of its own: a layer may change one part in place while
    # autograd has saved another.
    parts = [[part.data for part in tensor.chunk(number)] for tensor in tensors]
    join = tuple if isinstance(batch, tuple) else (lambda part: part[0])
    return list(zip(*parts, strict=True)), join
