"""Keep the weights of a stage in several versions, which a schedule without a flush needs.

The backward of a micro-batch must read the weights that its forward has read, even if the stage
has been updated in between. Therefore the forward reads a view of the weights, which belongs to its
version. If that version is still needed, an update moves the weights to new storage and leaves the
old one to the views. A version costs the bytes of the weights once, however many micro-batches read
it, and is freed when nothing needs it any more: `schedules.releases` says when.

Source:
    Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (2019), section
    3.3, "weight stashing".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from naranhi.autograd.parameter_hooks import has_hooks


class WeightStash:
    """The versions of a module's parameters, and the optimizer that makes the next one.

    Args:
        module: the module whose parameters are kept.
        optimizer: a function that makes a torch optimizer from a list of parameters; not called for
            a module without parameters.
        stash: with False, no version is kept, and a backward reads weights that its forward has not
            read: its gradients are wrong. Use it to see how wrong.
    """

    optimizer: torch.optim.Optimizer | None
    stash: bool

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        stash: bool = True,
    ) -> None:
        self.newest: list[nn.Parameter] = list(module.parameters())
        self.optimizer, self.stash = optimizer(self.newest) if self.newest else None, stash
        number = {id(parameter): n for n, parameter in enumerate(self.newest)}
        self._uses = [
            (owner, name, number[id(parameter)])
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self.begin()

    def begin(self) -> None:
        """Begin a step: the newest version becomes version 0."""
        self.versions: dict[int, list[nn.Parameter]] = {0: self._view()}

    def _view(self):
        # `.data` has a version counter of its own, so that autograd lets the storage change if
        # `stash` is False.
        return [nn.Parameter(param.data, param.requires_grad) for param in self.newest]

    @property
    def held(self) -> int:
        """Return how many versions of the weights are held now, counted by their storages."""
        first = [view[0].data_ptr() for view in self.versions.values() if view]
        return len(set(first)) or 1

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Make the module's parameters those of a version.

        Gradients computed inside are added to those of the newest version, for the next update.
        """
        view = self.versions[version]
        self._put(view)
        try:
            yield
        finally:
            self._put(self.newest)
        for param, newest in zip(view, self.newest, strict=True):
            if param.grad is not None and has_hooks(newest):
                torch.autograd.backward(newest.view_as(newest), param.grad)  # runs the hooks
            elif param.grad is not None and newest.grad is None:
                newest.grad = param.grad
            elif param.grad is not None:
                newest.grad += param.grad
            param.grad = None

    def _put(self, parameters):
        for owner, name, n in self._uses:
            setattr(owner, name, parameters[n])

    def update(self, version: int, last_use: bool) -> None:
        """Make a version from the previous one, by a step of the optimizer.

        The update is in place if this is the last use of the previous version. Without gradients
        (`no_grad`, `inference_mode`) both versions are the same.
        """
        if torch.is_grad_enabled():
            if self.stash and not last_use:
                for param in self.newest:
                    param.data = param.data.clone()
            if self.optimizer:
                self.optimizer.step()
                self.optimizer.zero_grad()
            torch.clear_autocast_cache()  # otherwise it keeps the casts of every version
        self.versions[version] = self._view()

    def release(self, version: int) -> None:
        """Drop a version that nothing needs any more."""
        del self.versions[version]
