"""The layers and parameters that a rank holds, by their names in the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from naranhi.autograd import Recompute
from naranhi.data_parallel import DDP
from naranhi.divergence.axes import Part
from naranhi.expert_parallel import MoE
from naranhi.pipeline import Pipeline
from naranhi.pipeline.dry_run import copied as copied_layers
from naranhi.tensor_parallel.shards import as_module
from naranhi.zero import Zero

Model = nn.Module | list[nn.Module] | Pipeline | Zero | DDP


def layers_of(model: Model) -> dict[str, nn.Module]:
    """Return {name in the unsplit model: module} of the layers that this rank runs.

    A layer in a `Recompute` has the same name as without the wrapper. Its recomputation is not
    recorded, so only its parameters' gradients are compared, not those of its outputs.
    """
    if isinstance(model, Pipeline):
        layers = {}  # by module: one that several layers share has the name of its first use
        for stage in model.stages.values():
            for number, layer in enumerate(stage.layers, stage.first):
                for name, module in _named_modules(layer):
                    layers.setdefault(module, f"{number}.{name}".rstrip("."))
        return {name: module for module, name in layers.items()}
    if isinstance(model, Zero | DDP):
        model = model.model
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return {
        name: module
        for name, module in _named_modules(as_module(model))
        if name or not isinstance(module, nn.Sequential | nn.ModuleList)
    }


def recorded_layers(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers whose outputs are compared, of those that `layers_of` returned.

    Inside a mixture of experts, rows may be tokens of other ranks. The mixture is compared by the
    output of the layer around it, and by the gradients of its router and experts.
    """
    inner = {one for layer in layers.values() if isinstance(layer, MoE) for one in layer.modules()}
    return {name: layer for name, layer in layers.items() if layer not in inner}


def copied(model: nn.Module | list[nn.Module]) -> nn.Module | list[nn.Module]:
    """Return a copy of a model that shares process groups and the state kept by a forward.

    Hooks and attributes of parameters, which `deepcopy` leaves out, are copied too. A random
    generator is shared: runs of copies would otherwise start with the same numbers again.
    """
    layers = model if isinstance(model, list) else [model]
    copies = copied_layers(layers)
    pairs = zip(as_module(layers).parameters(), as_module(copies).parameters(), strict=True)
    for param, copy in pairs:
        vars(copy).update(vars(param))
        copy._backward_hooks = param._backward_hooks
        copy._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    pairs = zip(as_module(layers).modules(), as_module(copies).modules(), strict=True)
    for module, copy in pairs:
        own = vars(module).items()
        vars(copy).update({k: value for k, value in own if isinstance(value, torch.Generator)})
    return copies if isinstance(model, list) else copies[0]


def _named_modules(model) -> Iterator[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    wrappers = [name for name, module in modules.items() if isinstance(module, Recompute)]
    for name, module in modules.items():
        if name in wrappers:
            continue
        for wrapper in reversed(wrappers):  # the innermost first
            inner = f"{wrapper}.layer".lstrip(".")
            if name == inner or name.startswith(f"{inner}."):
                name = (wrapper + name[len(inner) :]).lstrip(".")
        yield name, module


def parameters_of(model: Model) -> dict[str, nn.Parameter]:
    """Return {name in the unsplit model: parameter}; a tied parameter has several names."""
    return {
        f"{name}.{own}".lstrip("."): param
        for name, layer in layers_of(model).items()
        for own, param in layer.named_parameters(recurse=False)
    }


def shapes_of(model: Model) -> dict[str, torch.Size]:
    """Return {name in the unsplit model: the parameter's shape there} of this rank's parameters."""
    flats = [flat for unit in model.units for flat in unit.flats] if isinstance(model, Zero) else []
    held = {  # by ZeRO-3, whose parameters are empty between two steps
        param: shape
        for flat in flats
        for param, shape in zip(flat.parameters, flat.shapes, strict=True)
    }
    shapes = {}
    for name, layer in layers_of(model).items():
        splits = getattr(layer, "splits", {})
        for own, param in layer.named_parameters(recurse=False):
            shape = list(held.get(param, param.shape))
            if own in splits:
                shape[splits[own].dim] = splits[own].size
            shapes[f"{name}.{own}".lstrip(".")] = torch.Size(shape)
    return shapes


def weights_of(model: Model) -> dict[str, Part]:
    """Return the parameters of this rank as parts of the unsplit model's; collective for ZeRO."""
    if isinstance(model, Zero):
        with model.gathered():
            return {name: part._replace(value=part.value.clone()) for name, part in _params(model)}
    return dict(_params(model))


def gradients_of(model: Model) -> dict[str, Part]:
    """Return copies of the gradients of this rank as parts; zeros where there is no gradient."""
    named = dict(_params(model))
    if isinstance(model, Zero):
        return dict(_flat_gradients(model, named))
    return {
        name: part._replace(value=_gradient(param))
        for (name, part), param in zip(named.items(), parameters_of(model).values(), strict=True)
    }


def _params(model) -> Iterator[tuple[str, Part]]:
    for name, layer in layers_of(model).items():
        splits = getattr(layer, "splits", {})
        for own, param in layer.named_parameters(recurse=False):
            value, full = param.detach().cpu(), f"{name}.{own}".lstrip(".")
            if own in splits:
                yield full, Part(value, layer.rank, _shard(splits[own], layer.rank))
            else:
                yield full, Part(value, None, lambda whole: whole)


def _shard(split, rank):
    return lambda whole: split.shard(whole, rank)


def _gradient(param):
    return (torch.zeros_like(param) if param.grad is None else param.grad).detach().cpu().clone()


def _flat_gradients(zero, named):
    """Yield the shards of ZeRO's flat gradients: consecutive elements of each parameter."""
    zero.synchronize()
    name_of = {}  # without wrappers; a shared parameter has its first name
    for name, param in parameters_of(zero).items():
        name_of.setdefault(param, name)
    for flat in zero.flats:
        for param, place, part in zip(
            flat.parameters, flat.places, flat.gradient_parts(), strict=True
        ):
            name, start = name_of[param], max(flat.shard_slice.start - place.start, 0)
            own, slot = named[name].cut, (named[name].slot, start, len(part))
            value = part.detach().cpu().clone()

            yield name, Part(value, slot, _elements(own, start, len(part)))


def _elements(cut, start, length):
    return lambda whole: cut(whole).flatten()[start : start + length]
