"""Hooks that do not keep their owner alive, are not copied with a model, and run in order.

C++ holds the hooks of a parameter, and Python's garbage collector does not look there. If a hook
held the object that holds its parameter, the parameter would never be freed. So hooks reference
their owner weakly. An owner that must live as long as its model is in use is held by one hook of a
module, which is ordinary Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from naranhi.autograd.dispatch_modes import unseen_by_checkpoints


class Attached:
    """Base class of objects attached to a model by hooks; the model itself is called, as before."""

    def __call__(self, *inputs: Any, **options: Any) -> NoReturn:
        """Raise TypeError: users of wrappers, such as torch's DDP, will try to call this object."""
        kind = type(self).__name__
        raise TypeError(
            f"{kind} cannot be called: call the model that it was made with, whose hooks do the "
            "rest"
        )


class Hook:
    """A bound method as a hook of a parameter or a graph.

    Once the method's object is gone, the hook does nothing.

    Args:
        method: the bound method, whose object the hook does not keep alive.
        *args: passed before the hook's own arguments.
    """

    def __init__(self, method: MethodType, *args: Any) -> None:
        self._owner, self._function, self._args = (
            weakref.ref(method.__self__),
            method.__func__,
            args,
        )

    @property
    def owner(self) -> object | None:
        """The method's object, or None once it is gone."""
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method if its object is still alive."""
        owner = self._owner()
        if owner is not None:
            return self._function(owner, *self._args, *args, **kwargs)


class ModuleHook(Hook):
    """A hook of a module. In a compiled module, it runs as ordinary Python.

    In a selective checkpoint, what it does is not part of the region that is recomputed.

    Args:
        method: the bound method.
        *args: passed before the hook's own arguments.
        keep: whether the hook keeps the method's object alive.
        copying: called when the hook is copied with its module (`copy.deepcopy`, pickle); it may
            raise. The copy does nothing.
    """

    def __init__(
        self,
        method: MethodType,
        *args: Any,
        keep: bool = False,
        copying: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(method, *args)
        self._kept, self._copying = method.__self__ if keep else None, copying

    def _unseen(self, *args, **kwargs):
        with unseen_by_checkpoints():
            return super().__call__(*args, **kwargs)

    # torch.compiler.disable without its import, which takes seconds even if nothing is compiled.
    __call__: Callable[..., Any] = torch._disable_dynamo(_unseen)

    def __reduce__(self) -> tuple[type[Silent], tuple[()]]:
        if self._copying:
            self._copying()
        return Silent, ()


class Silent:
    """A hook that does nothing: what a copied `ModuleHook` becomes."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
        pass


def _nothing():
    pass


class Handles:
    """Handles of hooks, some of which must run first or last.

    Args:
        first: handles of hooks that must run before all others of their module.
        last: handles of hooks that must run after all others of their module or parameter.
        others: the rest.
    """

    first: list[RemovableHandle]
    last: list[RemovableHandle]
    others: list[RemovableHandle]
    removed: bool

    def __init__(
        self,
        first: Iterable[RemovableHandle] = (),
        last: Iterable[RemovableHandle] = (),
        others: Iterable[RemovableHandle] = (),
    ) -> None:
        self.first, self.last, self.others = [*first], [*last], [*others]
        self.removed = False

    def order(self) -> None:
        """Restore this order, whatever has been registered since."""
        for handle in self.first:
            hooks = handle.hooks_dict_ref()
            if next(iter(hooks)) != handle.id:
                hooks.move_to_end(handle.id, last=False)
        for handle in self.last:
            hooks = handle.hooks_dict_ref()
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # C++ does not see OrderedDict.move_to_end

    def remove(self) -> None:
        """Remove all hooks."""
        self.removed = True
        for handle in self.first + self.last + self.others:
            handle.remove()


def owner_of(parameter: torch.Tensor) -> object | None:
    """Return the living owner of a `Hook` on the parameter's gradient, or None."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    owners = (hook.owner for hook in hooks.values() if isinstance(hook, Hook))
    return next((owner for owner in owners if owner is not None), None)


def owner_of_state(module: nn.Module) -> object | None:
    """Return the living owner of a `Hook` before the module's state is read, or None."""
    hooks = module._state_dict_pre_hooks.values()
    owners = (hook.owner for hook in hooks if isinstance(hook, Hook))
    return next((owner for owner in owners if owner is not None), None)


class Backward:
    """The state of a backward that began: running, ended or failed.

    Autograd calls the queued method at the end if nothing has failed, and drops it otherwise.
    """

    def __init__(self) -> None:
        self._queued = None

    def begin(self, method: MethodType | None) -> None:
        """Queue a bound method for the end of the backward that is running now.

        Args:
            method: the bound method; None for a backward that autograd does not run, which counts
                as failed until `end` is called.
        """
        if method is None:
            self._queued = _nothing
            return
        call = Hook(method)
        self._queued = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def end(self) -> None:
        """Forget the backward: it has reached its end, or its failure was dealt with."""
        self._queued = None

    @property
    def running(self) -> bool:
        """Whether autograd is running the backward."""
        return (
            self._queued is not None
            and self._queued() is not None
            and torch._C._current_graph_task_id() != -1
        )

    @property
    def failed(self) -> bool:
        """Whether a backward began that neither is running nor has reached its end."""
        return self._queued is not None and not self.running
