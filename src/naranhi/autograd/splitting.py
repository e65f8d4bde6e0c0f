"""Turn the layers of a model into layers whose backward can be split (see `split_backward`)."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from torch import nn

from naranhi.autograd.module_hooks import is_compiled
from naranhi.autograd.split_backward import Splittable, SplittableLinear
from naranhi.autograd.weight_gradients import Sharing


def splittable(layers: list[nn.Module]) -> list[nn.Module]:
    """Make each module that holds weights directly `Splittable`, in place.

    A module stays the same object, with its names, attributes, hooks and parameters; its class is
    replaced by a derived class, as `torch.distributed.fsdp.fully_shard` does. Two kinds of modules
    are replaced by other modules: a compiled or scripted module is wrapped, and a module with a
    method `as_splittable()` is replaced by its result, which splits in a better way.

    Args:
        layers: the layers of a model, whose modules are changed.

    Returns:
        The layers, for a `Pipeline`.
    """
    replaced = {}
    layers = [
        _made_splittable(layer, f"layer {number}", replaced) for number, layer in enumerate(layers)
    ]
    users = defaultdict(set)
    for layer in layers:
        for module in layer.modules():
            for param in module.parameters() if isinstance(module, Splittable) else ():
                users[param].add(module)
    for modules in users.values():
        if len(modules) > 1:
            others = {module._sharing for module in modules if module._sharing}
            together = {
                module
                for some in users.values()
                for module in some
                if module in modules or module._sharing in others
            }
            sharing = Sharing()
            for module in together:
                module._sharing = sharing
    return layers


def _made_splittable(module, path, replaced):
    """Return the module's replacement, and record it in `replaced`."""
    if isinstance(module, Splittable):
        return module
    if module in replaced:
        return replaced[module]
    name = f"{path} ({type(module).__name__})"
    has_weights = "parametrizations" in module._modules or any(
        True for _ in module.parameters(recurse=False)
    )
    if is_compiled(module) or (has_weights and "forward" in vars(module)):
        new = Splittable(module)
    elif hasattr(type(module), "as_splittable"):
        new = module.as_splittable()
    elif has_weights:
        is_linear = type(module).forward is nn.Linear.forward
        new = as_kind(SplittableLinear if is_linear else Splittable, module)
    else:
        for child, inner in list(module._modules.items()):
            if inner is not None:
                setattr(module, child, _made_splittable(inner, f"{path}.{child}", replaced))
        return module
    new._path = name
    replaced[module] = new
    return new


def as_kind(kind: type[Splittable], module: nn.Module) -> nn.Module:
    """Turn a module into this kind of `Splittable`, whose node runs the module's own forward."""
    module._path = type(module).__name__
    module.__class__ = _derived(kind, type(module))
    return module


@cache
def _derived(kind, own):
    """Return a class of this kind that takes everything else from `own`, not from `Wrapper`."""
    return type(
        f"Splittable{own.__name__}",
        (kind, own),
        {
            "_own_forward": own.forward,
            "__init__": own.__init__,
            "__getattr__": own.__getattr__,
            "__module__": own.__module__,
            "__doc__": own.__doc__,
        },
    )


def not_splittable(layer: nn.Module) -> list[str]:
    """Return the names of a layer's weights whose gradient cannot be left for later."""
    covered = {
        id(weight)
        for module in layer.modules()
        if isinstance(module, Splittable)
        for weight in module.parameters()
    }
    return [
        name
        for name, weight in layer.named_parameters()
        if weight.requires_grad and id(weight) not in covered
    ]
