"""Cut a model into stages, and check that the stages can run what a schedule asks."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from naranhi.autograd.hooks import owner_of
from naranhi.autograd.splitting import not_splittable
from naranhi.expert_parallel import MoE
from naranhi.pipeline.tied_weights import tied_parameters
from naranhi.schedules import Schedule
from naranhi.schedules.balance import uniform


def as_list(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers as a list, or raise TypeError for a model that cannot be cut."""
    if isinstance(layers, nn.Module) and not isinstance(layers, Iterable):
        raise TypeError(
            f"a pipeline takes a list of layers, which it can cut into stages, not a "
            f"{type(layers).__name__}: write the model as a list of modules, of which each takes "
            "what the one before returns"
        )
    return list(layers)


def cut(
    layers: Sequence[nn.Module], stages: int, balance: Sequence[int] | None = None, chunks: int = 1
) -> list[Sequence[nn.Module]]:
    """Return the layers of each virtual stage: `stages` lists that together are `layers`.

    Args:
        layers: the layers of the model, in order.
        stages: the number of virtual stages.
        balance: the number of layers of each virtual stage; by default as equal as possible, the
            first ones larger (`uniform`).
        chunks: the number of virtual stages on each rank. With more than one, all must have the
            same size unless a balance is given.

    Raises:
        ValueError: the stages must have the same size but cannot, there are more stages than
            layers, or the balance is not `stages` positive sizes that sum to the number of layers.
    """
    if balance is None and chunks > 1 and len(layers) % stages:
        raise ValueError(
            f"{len(layers)} layers cannot be divided into {stages} chunks of one size, {chunks} on "
            f"each rank: give a balance"
        )
    balance = uniform(layers, stages) if balance is None else list(balance)
    if len(balance) != stages or sum(balance) != len(layers) or min(balance) < 1:
        raise ValueError(
            f"the balance {balance} divides {sum(balance)} layers into {len(balance)} stages: it "
            f"must divide {len(layers)} layers into {stages} stages, with at least one in each"
        )
    ends = [sum(balance[: stage + 1]) for stage in range(stages)]
    return [layers[end - size : end] for size, end in zip(balance, ends, strict=True)]


def check_kinds(
    schedule: Schedule,
    parts: Sequence[Sequence[nn.Module]],
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Raise ValueError for a kind of action that these stages cannot run.

    Args:
        schedule: the schedule to run.
        parts: the layers of each stage.
        optimizer: as `pipeline.Pipeline` takes it; None if there is no optimizer.
        replicas: the process group of the replicas; None without replicas.
    """
    kinds = {}
    tied = [
        stages
        for _, parameter, stages in tied_parameters(parts, range(len(parts)))
        if parameter.requires_grad
    ]
    for row in schedule:
        for action in row:
            kinds.setdefault((action.stage, action.kind), action)
    for (stage, kind), action in kinds.items():
        if kind == "I":
            for number, layer in enumerate(parts[stage], sum(map(len, parts[:stage]))):
                names = not_splittable(layer)
                if names:
                    raise ValueError(
                        f"{action} cannot be run: layer {number} ({type(layer).__name__}) cannot "
                        f"split its backward, as the gradient of {names[0]} cannot be left for "
                        f"later; make the layers splittable with autograd.splittable"
                    )
        if kind == "U" and optimizer is None:
            raise ValueError(f"{action} cannot be run: it needs an optimizer")
        if kind == "U" and replicas is not None:
            raise ValueError(
                f"{action} cannot be run: the gradients of replicas are added up at a step's end"
            )
        if kind == "U" and (name := _shares_tokens(parts[stage])):
            raise ValueError(
                f"{action} cannot be run: the experts of {name} get tokens of other ranks, and the "
                "gradients of those ranks are summed only at a step's end"
            )
        if kind == "U" and tied:
            raise ValueError(
                f"{action} cannot be run: stages {' and '.join(map(str, tied[0]))} share a tied "
                f"parameter, and would update it at different times"
            )


def _shares_tokens(layers):
    """Return the name of a mixture that gets tokens from outside its tensor group, or None."""
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, MoE):
                mark = getattr(module.router, "_sequence_group", None)
                tensor = dist.get_world_size(mark.group) if mark else 1
                copies = dist.get_world_size(module.replicas) if module.replicas else 1
                if module.ranks > 1 or copies > tensor:
                    return f"layer {number} of the stage, {name}"
    return None


def check_values(parts: Sequence[Sequence[nn.Module]], placement: Sequence[int], rank: int) -> None:
    """Raise ValueError if a layer of this rank has no values; other ranks' layers need none here.

    Args:
        parts: the layers of each stage.
        placement: the rank of each stage.
        rank: this rank, in the pipeline.
    """
    placed = (
        (layer, place) for part, place in zip(parts, placement, strict=True) for layer in part
    )
    for number, (layer, place) in enumerate(placed):
        for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
            if tensor.is_meta and place == rank:
                raise ValueError(
                    f"layer {number} ({type(layer).__name__}): {name} is on the meta device and "
                    "has no values: give the layers of a rank's stages their values on that rank, "
                    "as by tensor_parallel.materialize"
                )


def check_layers(layers: Iterable[nn.Module]) -> None:
    """Raise ValueError for a layer that a pipeline cannot run; the error says what to do."""
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            where = f"layer {number} ({type(layer).__name__})" + f", {name}" * bool(name)
            kind = type(module).__name__
            if any(map(is_lazy, module.parameters(recurse=False))):
                raise ValueError(
                    f"{where}: the parameters of {kind} have no shape yet; run the "
                    "layers on a micro-batch once, on every rank"
                )
            for own, parameter in module.named_parameters(recurse=False):
                if type(parameter).__name__ == "DTensor":  # its module takes long to import
                    raise ValueError(
                        f"{where}: {own} is a DTensor, and what its layers return may be one, "
                        "which a pipeline cannot send; split layers over ranks by "
                        "tensor_parallel.parallelize instead"
                    )
                if (owner := owner_of(parameter)) is not None:
                    raise ValueError(
                        f"{where}: {own} belongs to a {type(owner).__name__}, whose ranks would "
                        "wait for each other in the backward: call close() on it, and pass the "
                        "pipeline's replicas instead"
                    )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ValueError(
                    f"{where}: {kind} with sparse=True has sparse gradients, which a "
                    "pipeline cannot sum; make it with sparse=False"
                )
