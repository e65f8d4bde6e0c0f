"""What goes from one stage of a pipeline to the next: known before anything is sent.

A stage is run once on tensors that have a shape and nothing in them. That costs no memory, draws no
random numbers and changes no running mean.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call


class Spec(NamedTuple):
    """A tensor without what is in it. With requires_grad, a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


class Boundary(NamedTuple):
    """What a stage takes: a tensor, or a tuple of them."""

    specs: tuple[Spec, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value):
        """That of a tensor or a tuple of tensors."""
        tensors = value if isinstance(value, tuple) else (value,)
        return cls(tuple(Spec(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors),
                   isinstance(value, tuple))

    def __str__(self):
        return ", ".join(f"{spec.dtype} {spec.shape}" for spec in self.specs)

    def value(self, tensors):
        """The tensors as a layer takes them."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def message(self, kind):
        """What travels: (shape, dtype) of each tensor of the "activation", or of the "gradient"."""
        return [spec[:2] for spec in self.specs if kind == "activation" or spec.requires_grad]


def after(layers, boundary, first=0):
    """The Boundary after some layers, the first of which is the model's layer number `first`.

    Raises TypeError for a layer that returns anything but a tensor or a tuple of tensors, and
    ValueError, with the cause, for one that does not take what it is given.
    """
    device = next((one.device for layer in layers
                   for one in chain(layer.parameters(), layer.buffers())), "cpu")
    # With single numbers, such as a batch norm's count of batches, the mode computes for real.
    numbers = [{name: one.clone() for name, one in layer.named_buffers() if one.numel() == 1}
               for layer in layers]
    # Hooks of its own: those outside, which may count what is saved, are not told of this.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), \
            saved_tensors_hooks(_same, _same):
        value = boundary.value([
            torch.empty(spec.shape, dtype=spec.dtype, device=device,
                        requires_grad=spec.requires_grad) for spec in boundary.specs])
        for number, (layer, copies) in enumerate(zip(layers, numbers, strict=True), first):
            name, taken = f"layer {number} ({type(layer).__name__})", Boundary.of(value)
            try:
                value = functional_call(layer, copies, (value,)) if copies else layer(value)
            except Exception as error:
                raise ValueError(f"{name} fails on {taken}: {error}") from error
            tensors = value if isinstance(value, tuple) else (value,)
            wrong = next((one for one in tensors if not isinstance(one, torch.Tensor)), None)
            if wrong is not None or not tensors:
                what = f"a tuple with {type(wrong).__name__} in it" if tensors else "an empty tuple"
                what = what if isinstance(value, tuple) else type(value).__name__
                raise TypeError(f"{name} returned {what}, not a tensor or a tuple of tensors")
        return Boundary.of(value)


def _same(tensor):
    return tensor
