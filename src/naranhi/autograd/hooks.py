"""Hooks that do not keep their owner alive, are not copied with a model, and run in order.

A hook on a parameter is held by C++, where Python's garbage collector does not look: a parameter
whose hook held the object that holds the parameter would never be freed. So hooks hold their owner
weakly. An owner that has to live as long as its model is in use is held by one hook of a module,
which is ordinary Python.
"""

import weakref

import torch


class Hook:
    """A bound method as a hook of a parameter or a graph. Once the method's object is gone, it does
    nothing; args are passed before the hook's own arguments."""

    def __init__(self, method, *args):
        self._owner, self._function, self._args = (
            weakref.ref(method.__self__),
            method.__func__,
            args,
        )

    @property
    def owner(self):
        """The method's object, or None."""
        return self._owner()

    def __call__(self, *args, **kwargs):
        owner = self._owner()
        if owner is not None:
            return self._function(owner, *self._args, *args, **kwargs)


class ModuleHook(Hook):
    """A hook of a module. In a compiled module, it runs as ordinary Python.

    keep: whether it keeps the method's object alive.
    copying: called when the hook is copied with its module (`copy.deepcopy`, pickle); it may raise.
        The copy does nothing.
    """

    def __init__(self, method, *args, keep=False, copying=None):
        super().__init__(method, *args)
        self._kept, self._copying = method.__self__ if keep else None, copying

    # torch.compiler.disable, without its import of seconds where nothing is compiled.
    __call__ = torch._disable_dynamo(Hook.__call__)

    def __reduce__(self):
        if self._copying:
            self._copying()
        return Silent, ()


class Silent:
    """What a copied hook becomes."""

    def __call__(self, *args, **kwargs):
        pass


def _nothing():
    pass


class Handles:
    """Handles of hooks: of those that have to run before all others of their module, of those that
    have to run after all others of their module or parameter, and the rest."""

    def __init__(self, first=(), last=(), others=()):
        self.first, self.last, self.others = [*first], [*last], [*others]

    def order(self):
        """Have them run so, whatever was registered since."""
        for handle in self.first:
            hooks = handle.hooks_dict_ref()
            if next(iter(hooks)) != handle.id:
                hooks.move_to_end(handle.id, last=False)
        for handle in self.last:
            hooks = handle.hooks_dict_ref()
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # C++ does not see OrderedDict.move_to_end

    def remove(self):
        for handle in self.first + self.last + self.others:
            handle.remove()


def owner_of(parameter):
    """The living owner of a `Hook` on the parameter's gradient, or None."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    owners = (hook.owner for hook in hooks.values() if isinstance(hook, Hook))
    return next((owner for owner in owners if owner is not None), None)


class Backward:
    """Whether a backward that began is running, has come to its end, or has failed.

    Autograd calls what was queued when nothing has failed, and drops it otherwise.
    """

    def __init__(self):
        self._queued = None

    def begin(self, method):
        """Have a bound method called at the end of the backward that is running now. None: what
        runs is none of autograd's; it has failed unless it comes to `end`."""
        if method is None:
            self._queued = _nothing
            return
        call = Hook(method)
        self._queued = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def end(self):
        """Forget it: its end was reached, or its failure was dealt with."""
        self._queued = None

    @property
    def running(self):
        return (
            self._queued is not None
            and self._queued() is not None
            and torch._C._current_graph_task_id() != -1
        )

    @property
    def failed(self):
        return self._queued is not None and not self.running
