"""Run layers only to see what they return, and leave them unchanged.

Copies of the layers run, so what they set, count and cache goes away with the copies.
"""

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tried(trial: Callable[[bool], Any]) -> Any:
    """Return `trial(True)`, with hiding, or `trial(False)` if a layer uses `torch.func`.

    The transforms of `torch.func` do not support hooks for saved tensors.
    """
    try:
        return trial(True)
    except ValueError as error:
        if "support saved tensor hooks" not in str(error.__cause__):
            raise
    return trial(False)


@contextmanager
def without_a_trace(hiding: bool = True) -> Iterator[None]:
    """Shield Python's random state, autocast, the compiler and saved-tensor hooks from a trial.

    Args:
        hiding: whether to shield hooks for saved tensors, by pushing other such hooks.
    """
    random_state = random.getstate()
    with ExitStack() as stack:
        # Autocast keeps its cache of cast weights until its block ends.
        stack.callback(torch.clear_autocast_cache)
        stack.callback(random.setstate, random_state)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # These hooks hide what is saved from the caller's hooks, which may count it. They save
        # detached tensors: an operation that saves its own output would otherwise refer to itself
        # through C++, which the garbage collector cannot see, and would never be freed.
        if hiding:
            stack.enter_context(saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor))
        yield


def copied(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return copies of the layers, which share among themselves what the layers share.

    An object outside the layers is shared with the original if one of its methods is a hook, and so
    is an attribute that cannot be copied, such as a process group or a lock.

    Raises:
        Exception: whatever copying a layer raises.
    """
    layers = list(layers)
    modules = list(nn.ModuleList(layers).modules())
    memo = {id(owner): owner for owner in _hook_owners(modules)}
    for module in modules:
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                try:
                    deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
    return [deepcopy(layer, memo) for layer in layers]


def _hook_owners(modules):
    """Yield the objects other than the modules whose bound methods are hooks."""
    for module in modules:
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for hook in hooks.values():
                    owner = getattr(hook, "__self__", None)
                    if owner is not None and not any(owner is module for module in modules):
                        yield owner


def storages(layers: Iterable[nn.Module]) -> set[torch.UntypedStorage]:
    """Return the storages of all tensors that the layers keep, in any attribute."""
    return {
        leaf.untyped_storage()
        for module in nn.ModuleList(layers).modules()
        for leaf in tree_leaves(vars(module))
        if isinstance(leaf, torch.Tensor)
    }


class CreatedTensors(TorchDispatchMode):
    """Record the tensors that operations create while the mode is entered, by weak references.

    Args:
        creator: the name of what runs the operations; set the attribute again when that changes.
    """

    creator: str

    supports_higher_order_operators = True

    def __init__(self, creator: str) -> None:
        super().__init__()
        self.creator, self._references = creator, []

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.record(tree_leaves(result))
        return result

    def record(self, values: Iterable[object]) -> None:
        """Record the tensors among some values."""
        self._references += [
            (ref(value), self.creator) for value in values if isinstance(value, torch.Tensor)
        ]

    def record_layers(self, layers: Sequence[nn.Module]) -> None:
        """Record the parameters and buffers of some layers."""
        module = nn.ModuleList(layers)
        self.record(chain(module.parameters(), module.buffers()))

    def survivor(self) -> tuple[torch.Tensor, str] | None:
        """Return the last recorded tensor that is still alive, and its creator, or None.

        The last one is returned because its graph may keep earlier ones alive.
        """
        if any(reference() is not None for reference, _ in self._references):
            gc.collect()
        alive = ((reference(), creator) for reference, creator in reversed(self._references))
        return next(((tensor, creator) for tensor, creator in alive if tensor is not None), None)
