"""The weights of a stage in several versions: what a schedule without a flush needs.

A micro-batch's backward must read the weights that its forward has read, although the stage has
been updated meanwhile. So the forward reads a view of the weights, which belongs to its version;
and an update, where a version is still needed, moves the weights to new storage and leaves the old
one to the views. A version costs the bytes of the weights, once, however many read it, and goes
when nobody needs it: `schedules.releases` says when.

Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (2019),
section 3.3, "weight stashing".
"""

from contextlib import contextmanager

import torch
from torch import nn


class WeightStash:
    """The versions of a module's parameters, and the optimizer that makes one from another.

    optimizer: a function that makes a torch optimizer of a list of parameters. Not called for a
        module without any.
    stash: with False, no version is kept, and a backward reads weights that its forward has not
        seen: its gradients are wrong. For seeing how wrong.
    """

    def __init__(self, module, optimizer, stash=True):
        self.newest = list(module.parameters())
        self.optimizer, self.stash = optimizer(self.newest) if self.newest else None, stash
        number = {id(parameter): n for n, parameter in enumerate(self.newest)}
        self._uses = [
            (owner, name, number[id(parameter)])
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self.begin()

    def begin(self):
        """The newest version is version 0 of a new step."""
        self.versions = {0: self._view()}

    def _view(self):
        # .data: with a version counter of its own, so that autograd lets the storage change if
        # `stash` is False.
        return [nn.Parameter(one.data, one.requires_grad) for one in self.newest]

    @property
    def held(self):
        """How many versions of the weights are held now: storages, counted."""
        first = [view[0].data_ptr() for view in self.versions.values() if view]
        return len(set(first)) or 1

    @contextmanager
    def reading(self, version):
        """The module's parameters are those of that version. Gradients found meanwhile are added to
        those of the newest version, for the next update."""
        view = self.versions[version]
        self._put(view)
        try:
            yield
        finally:
            self._put(self.newest)
        for one, newest in zip(view, self.newest, strict=True):
            if one.grad is not None and _has_hooks(newest):
                torch.autograd.backward(newest.view_as(newest), one.grad)  # which calls them
            elif one.grad is not None and newest.grad is None:
                newest.grad = one.grad
            elif one.grad is not None:
                newest.grad += one.grad
            one.grad = None

    def _put(self, parameters):
        for owner, name, n in self._uses:
            setattr(owner, name, parameters[n])

    def update(self, version, last_use):
        """Make that version of the one before it: in place if this is the last use of that. Without
        gradients (`no_grad`, `inference_mode`) both are the same."""
        if torch.is_grad_enabled():
            if self.stash and not last_use:
                for one in self.newest:
                    one.data = one.data.clone()
            if self.optimizer:
                self.optimizer.step()
                self.optimizer.zero_grad()
            torch.clear_autocast_cache()  # or it keeps what it has cast of every version
        self.versions[version] = self._view()

    def release(self, version):
        """Nobody needs that version any more."""
        del self.versions[version]


def _has_hooks(parameter):
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
