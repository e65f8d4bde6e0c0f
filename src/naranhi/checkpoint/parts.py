"""What a rank holds of a model and of its optimizer: parts of named tensors of the whole model.

A parameter is named as in the whole model, unsplit and as one list of layers:
"3.attn.c_attn.weight" is the same parameter on every mesh. A tied parameter has the name of its
first use, and the name of a parameter of a pipeline's loss begins with "loss_fn.".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from naranhi.autograd.hooks import ModuleHook
from naranhi.autograd.wrapper import unwrapped_name
from naranhi.checkpoint.boxes import Boxes, views_of_run
from naranhi.checkpoint.storage import CheckpointError
from naranhi.data_parallel import DDP
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel.shards import Split, as_module, splits_of
from naranhi.zero import Zero
from naranhi.zero.whole import Whole

Model = nn.Module | list[nn.Module] | Pipeline | Zero | DDP


@dataclass(eq=False)
class Part:
    """The elements of a parameter or buffer that are on this rank.

    Args:
        name: its name in the whole model.
        values: the elements, as the optimizer works on them: this rank's shard in its shape, or a
            run of the flattened shard.
        local_shape: the shape of the shard; without `split`, that of the whole tensor.
        start: where in the flattened shard the run begins.
        split: how the whole tensor is sharded; None if it is not.
        rank: whose shard it is.
    """

    name: str
    values: torch.Tensor
    local_shape: tuple[int, ...]
    start: int = 0
    split: Split | None = None
    rank: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        shape = list(self.local_shape)
        if self.split:
            shape[self.split.dim] = self.split.size
        return tuple(shape)

    def boxes(self, memory: torch.Tensor) -> Boxes:
        """Return the boxes of the whole tensor that are in `memory`, as views of it.

        Args:
            memory: 1-D, as long as `values`: the elements, or what an optimizer keeps for each.
        """
        views = views_of_run(memory, self.local_shape, self.start, self.split, self.rank)
        return Boxes(self.shape, memory.dtype, views)


@dataclass(eq=False)
class OptimizerPart:
    """A tensor that an optimizer works on, and the parts of parameters that it consists of.

    Args:
        optimizer: the optimizer.
        group: the number of its parameter group.
        tensor: the parameter as the optimizer has it; for ZeRO a shard of several parameters.
        parts: [(part, where in the flattened tensor it begins)].
    """

    optimizer: torch.optim.Optimizer
    group: int
    tensor: torch.Tensor
    parts: list[tuple[Part, int]] = field(default_factory=list)


def require_own_parameters(model: Model) -> None:
    """Raise CheckpointError if the model's parameters are not themselves the tensors to save.

    ZeRO frees them between two steps, or keeps them as copies of the masters that it trains. A
    DTensor is a shard whose place only torch knows. Nothing can be loaded into an expanded tensor.
    State that a module adds to its `state_dict` itself is in no parameter, buffer or extra state.
    """
    zeros = {
        hook.owner.zero
        for module in _modules(model).modules()
        for hook in module._state_dict_pre_hooks.values()
        if isinstance(hook, ModuleHook) and isinstance(hook.owner, Whole)
    }
    if zeros - {zero_of(model)}:
        raise CheckpointError(
            "a Zero trains the parameters of this model: pass that Zero instead of the model"
        )
    for method in "named_parameters", "named_buffers":
        for name, tensor in _named(model, method):
            if isinstance(tensor, DTensor):
                raise CheckpointError(
                    f"{name} is a DTensor, of FSDP2 or torch's tensor parallelism: use "
                    "torch.distributed.checkpoint"
                )
            strides = tensor.stride() if tensor.layout is torch.strided else ()
            if any(not s and n > 1 for s, n in zip(strides, tensor.shape, strict=False)):
                raise CheckpointError(
                    f"{name} is an expanded tensor: its elements share memory, so nothing can be "
                    "loaded into it; replace it by its clone()"
                )
    for name, module in _named(model, "named_modules"):
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            raise CheckpointError(
                f"{name.rstrip('.') or 'the model'}, a {type(module).__name__}, overrides "
                "_save_to_state_dict: define get_extra_state and set_extra_state instead"
            )


def zero_of(model: Model) -> Zero | None:
    """Return the Zero that shards a model: itself, or that of a pipeline's stages; else None."""
    zero = model.sharded if isinstance(model, Pipeline) else model
    return zero if isinstance(zero, Zero) else None


def parameters_of(model: Model) -> list[Part]:
    """Return this rank's parts of parameters, including those without elements."""
    if zero := zero_of(model):
        names, splits = _names_of(zero, model), splits_of(zero.model)
        flats = [flat for unit in zero.units for flat in unit.flats]
        return [part for flat in flats for part in _of(flat, splits, names)]
    splits, parts = splits_of(_modules(model)), {}
    for name, param in _named(model, "named_parameters"):
        split, group = splits.get(param, (None, None))
        rank = dist.get_rank(group) if split else 0
        parts.setdefault(param, Part(name, param, tuple(param.shape), split=split, rank=rank))
    return list(parts.values())


def buffers_of(model: Model) -> list[Part]:
    """Return this rank's persistent buffers, which are part of the model's state."""
    lasting = {  # in one module that has it, at least
        id(buffer)
        for module in _modules(model).modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return [
        Part(name, buffer, tuple(buffer.shape))
        for name, buffer in _named(model, "named_buffers")
        if id(buffer) in lasting
    ]


def modules_with_extra_state(model: Model) -> dict[str, nn.Module]:
    """Return the modules of this rank that define `get_extra_state`, by name in the whole model."""
    return {
        name.rstrip("."): module
        for name, module in _named(model, "named_modules")
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def optimizer_parts(
    model: Model, optimizer: torch.optim.Optimizer | None, parameters: Sequence[Part]
) -> list[OptimizerPart]:
    """Return the tensors that the optimizer works on, in its order, and their parts.

    Args:
        model: the model.
        optimizer: its optimizer; None without one, and for a pipeline whose stages have their own.
        parameters: as `parameters_of` returns them.

    Raises:
        CheckpointError: the optimizer works on a parameter that is not the model's.
    """
    parts = {}
    if zero := zero_of(model):
        by_name, names = {part.name: part for part in parameters}, _names_of(zero, model)
        for flat in zero.flats:
            for number, piece in flat.pieces.items():
                first = max(flat.starts[number], flat.shard_slice.start)
                parts[id(piece)] = [
                    (by_name[names[param]], max(place.start - first, 0))
                    for place, param in zip(flat.places, flat.parameters, strict=True)
                    if flat.group_of[param] == number
                ]
    else:
        parts = {id(part.values): [(part, 0)] for part in parameters}
    optimizer_parts = []
    for own in optimizers_of(model, optimizer):
        for number, group in enumerate(own.param_groups):
            for tensor in group["params"]:
                if id(tensor) not in parts:
                    raise CheckpointError(
                        f"{type(own).__name__} works on a parameter of shape "
                        f"{tuple(tensor.shape)} that is not in this model: make the optimizer from "
                        "the model's parameters, after the model has been sharded"
                    )
                optimizer_parts.append(OptimizerPart(own, number, tensor, parts[id(tensor)]))
    return optimizer_parts


def optimizers_of(
    model: Model, optimizer: torch.optim.Optimizer | None
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this rank: the given one, or those of a pipeline's stages."""
    if optimizer is not None:
        return [optimizer]
    stages = model.stages.values() if isinstance(model, Pipeline) else ()
    own = [stage.weights.optimizer for stage in stages if stage.weights]
    return [optimizer for optimizer in own if optimizer is not None]


def _names_of(zero, model):
    """Return {parameter: its name in the whole model} for all parameters that a Zero flattens.

    A pipeline's names are not those in its `sharded`, which contain the numbers of stages.
    """
    flats = [flat for unit in zero.units for flat in unit.flats]
    own = {p: name for flat in flats for p, name in zip(flat.parameters, flat.names, strict=True)}
    if model is zero:
        return {param: _name(zero.model, name) for param, name in own.items()}
    names = {}
    for name, param in _named(model, "named_parameters"):
        names.setdefault(param, name)
    return names


def _of(flat, splits, names):
    """Yield this rank's parts of the parameters of a flat parameter, as runs of its master."""
    begin = flat.shard_slice.start
    for param, shape, place in zip(flat.parameters, flat.shapes, flat.places, strict=True):
        start, stop = (min(max(edge - begin, 0), flat.size) for edge in (place.start, place.stop))
        split, group = splits.get(param, (None, None))
        rank = dist.get_rank(group) if split else 0
        yield Part(
            names[param],
            flat.master[start:stop],
            tuple(shape),
            max(begin - place.start, 0),
            split,
            rank,
        )


def _modules(model) -> nn.Module:
    """Return all modules of a model that are on this rank, as one module."""
    if isinstance(model, Pipeline):
        return nn.ModuleList(model.stages.values())
    return model.model if isinstance(model, (Zero, DDP)) else as_module(model)


def _named(model, method: str) -> Iterable[tuple[str, Any]]:
    """Yield (name in the whole model, object), as a method such as `named_buffers` does."""
    if not isinstance(model, Pipeline):
        yield from _names_in(_modules(model), method, "")
        return
    tied = {id(tied.parameter): tied.name for tied in model.tied}
    for stage in model.stages.values():
        for prefix, part in stage.named_parts():
            for name, tensor in _names_in(part, method, f"{prefix}."):
                yield tied.get(id(tensor), name), tensor


def _names_in(module, method, prefix) -> Iterator[tuple[str, Any]]:
    # Save a shared buffer under its name in each layer, as stages with separate copies do.
    options = {"remove_duplicate": False} if method == "named_buffers" else {}
    for name, named in getattr(module, method)(**options):
        # (of modules, the first is the module itself, without a name)
        yield prefix + (_name(module, name) if name else ""), named


def _name(module, name):
    """Return a name as it is in the state_dict of a model that is not compiled."""
    return ".".join(part for part in unwrapped_name(module, name).split(".") if part != "_orig_mod")
