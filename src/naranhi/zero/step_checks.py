"""The checks of ZeRO: on its arguments, and on all ranks during a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import ModuleList, Sequential

from naranhi.autograd.containers import tensors_of
from naranhi.autograd.shared_memory import sharing_memory
from naranhi.autograd.transforms import unwrapped
from naranhi.collectives import all_gather
from naranhi.distributed import from_all_ranks, raise_on_all
from naranhi.distributed.agreement import Axes, groups_of

if TYPE_CHECKING:
    from torch import nn

    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.units import Unit

# Optimizers, from torch and elsewhere, that are not element-wise.
ON_WHOLE_PARAMETERS = {
    "Adafactor",
    "LBFGS",
    "Muon",
    "SparseAdam",
    "Lamb",
    "LAMB",
    "LARS",
    "Shampoo",
    "SOAP",
}


def warn_of_one_unit(units: Sequence[Unit]) -> None:
    """Warn on the first rank if one unit, which stage 3 gathers as a whole, has most of the model.

    By default the units are the model's children, and one child may contain all the blocks.

    Args:
        units: The units of a model, the root last.
    """
    sizes = [sum(flat.length for flat in unit.flats) for unit in units]
    for unit, size in zip(units[:-1], sizes, strict=False):
        inner = [part for module in unit.modules for part in module.modules()]
        blocks = [part for part in inner if isinstance(part, (ModuleList, Sequential))]
        if 2 * size > sum(sizes) and any(len(part) > 1 for part in blocks) and not dist.get_rank():
            warnings.warn(
                f"stage 3 gathers {unit.name} as one unit, which has {size / sum(sizes):.0%} of "
                "the parameters: pass units=, the blocks inside of it",
                stacklevel=3,
            )


def require_arguments(
    stage: int, precision: str, names: Mapping[nn.Parameter, str], axes: Axes
) -> None:
    """Raise on all ranks if one has a stage or a precision that is none, or nothing to train.

    Args:
        stage: As in `zero.Zero`.
        precision: As in `zero.Zero`.
        names: The names of the trained parameters.
        axes: The ranks.

    Raises:
        ValueError: Saying which, and naming the ranks unless it is so on all.
    """

    def require():
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be 'fp32' or 'bf16', not {precision!r}")
        if not names:
            raise ValueError("no parameter of this model requires a gradient")

    raise_on_all(require, axes, kind=ValueError)


def axes_of(group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> Axes:
    """Return the axes over which a model is sharded, and copied if there are replicas.

    Args:
        group: The ranks that share one copy of the model.
        replicas: The ranks with the same shard in other copies; None for one copy.

    Raises:
        ValueError: On every rank, if the two are not axes of a mesh: two ranks share both groups,
            or ranks in `replicas` have different places in their groups, and so different shards.
    """
    if replicas is None:
        return [group]
    axes = [group, replicas]
    ranks = from_all_ranks(dist.get_rank(), axes)
    if len({*ranks}) < len(ranks):
        raise ValueError(
            f"group and replicas have to be two axes of a mesh: together they reach ranks {ranks}, "
            "some of them twice"
        )
    shards = from_all_ranks((dist.get_rank(), dist.get_rank(group)), replicas)

    def require_one_shard():
        if len({shard for _, shard in shards}) > 1:
            places = ", ".join(f"rank {rank} has shard {shard}" for rank, shard in shards)
            raise ValueError(
                f"replicas have to hold the same shard, one in each group, but {places}: take both "
                "groups from one mesh, such as that of init_device_mesh"
            )

    raise_on_all(require_one_shard, axes, kind=ValueError)
    return axes


def require_all(present: bool, group: Axes, device: torch.device) -> None:
    """Raise on every rank if `present` is true on some ranks only.

    Args:
        present: Whether this rank has a forward in this step.
        group: The process group, or several axes.
        device: Where messages are sent from.

    Raises:
        RuntimeError: Naming the ranks without a forward.
    """
    flags = torch.tensor([present], dtype=torch.uint8, device=device)
    for axis in groups_of(group):
        table = flags.new_empty(dist.get_world_size(axis), *flags.shape)
        all_gather(table, flags, axis)
        flags = table
    absent = [str(rank) for rank, flag in enumerate(flags.flatten().tolist()) if not flag]
    if 0 < len(absent) < flags.numel():
        raise RuntimeError(
            f"rank {', '.join(absent)} has no forward in this step: a rank without samples still "
            "has to run the model, on rows that the loss ignores"
        )


def require_own_output(unit: Unit, output: Any) -> None:
    """Raise if a module returns one of its parameters, or a view of it, whose memory is freed.

    Args:
        unit: The module's unit, at stage 3.
        output: What the module returns.

    Raises:
        RuntimeError: Naming the unit.
    """
    freed = {flat.whole.untyped_storage() for flat in unit.flats}
    for tensor in map(unwrapped, tensors_of(output)):
        if tensor.layout is torch.strided and tensor.untyped_storage() in freed:
            raise RuntimeError(
                f"unit {unit.name} returns its parameter, or a view of it, whose memory stage 3 "
                "frees when the unit is done: return a clone(), or leave that module to the root"
            )


def require_trained(flats: Iterable[FlatParam]) -> None:
    """Raise if a parameter was frozen after Zero was made.

    If others of its group have a gradient, its gradient would be zero, and its weight would decay.

    Args:
        flats: The flat parameters of the trained parameters.

    Raises:
        RuntimeError: Naming the parameter.
    """
    for flat in flats:
        busy = {flat.group_of[param] for param in flat.seen}
        for param in flat.parameters:
            if not param.requires_grad and flat.group_of[param] in busy:
                raise RuntimeError(
                    f"parameter {flat.name_of[param]} was frozen after Zero was "
                    "made: close() that Zero and make a new one"
                )


def require_finite(flats: Iterable[FlatParam], group: Axes) -> None:
    """Raise on every rank if a gradient is infinite or NaN.

    Args:
        flats: The flat parameters, after their reduction.
        group: The process group, or several axes.

    Raises:
        FloatingPointError: Naming a parameter, and the ranks whose shards hold such a gradient.
    """
    bad = next((name for flat in flats for name in flat.not_finite()), None)
    names = from_all_ranks(bad, group)
    ranks = [str(rank) for rank, name in enumerate(names) if name]
    if ranks:
        raise FloatingPointError(
            f"the gradient of parameter {next(filter(None, names))} is not finite: so it is in "
            f"the shard of rank {', '.join(ranks)}"
        )


def require_kept(flats: Iterable[FlatParam]) -> None:
    """Raise if the optimizer's zero_grad() was called while there are gradients of micro-batches.

    Args:
        flats: The flat parameters, whose `hide_shards` was called after the last backward.

    Raises:
        RuntimeError: If so, because the sums in the shards have not been discarded.
    """
    for flat in flats:
        if any(piece.grad is None for piece in flat.pieces.values()) and (
            flat.seen or any(param.grad is not None for param in flat.parameters)
        ):
            raise RuntimeError(
                "zero_grad() of the optimizer does not discard what the backwards of this step "
                "have accumulated: call zero_grad() of Zero"
            )


def require_own(optimizer: torch.optim.Optimizer, flats: Iterable[FlatParam]) -> None:
    """Raise unless the optimizer works on these shards, element by element.

    Args:
        optimizer: A torch optimizer.
        flats: The flat parameters of the trained parameters.

    Raises:
        TypeError: If the optimizer works on whole parameters.
        RuntimeError: If the optimizer's parameters are not these shards, or not all of them.
    """
    whole = next(
        (kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in ON_WHOLE_PARAMETERS),
        None,
    )
    if whole:
        raise TypeError(f"{whole} works on whole parameters, and a rank has only shards")
    theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
    own = {id(piece) for flat in flats for piece in flat.pieces.values()}
    if theirs and theirs < own:  # step() discards the gradients of all
        raise RuntimeError(
            f"this optimizer has {len(theirs)} of the model's {len(own)} shards: give one "
            "optimizer all param_groups of Zero, each with its own options"
        )
    if theirs != own:
        raise RuntimeError(
            "this optimizer does not work on the shards of this model: make it "
            "after Zero, of its param_groups"
        )


def require_own_memory(model: nn.Module, axes: Axes) -> None:
    """Raise ValueError on every rank if parameters share memory, which their shards would not.

    Args:
        model: The model, before it is sharded.
        axes: Every axis of its ranks.
    """

    def check():
        for name, other in sharing_memory(model.named_parameters()):
            raise ValueError(
                f"parameters {name} and {other} share memory, and their shards would not: make "
                "them one parameter, or give each its own memory"
            )

    raise_on_all(check, axes, kind=ValueError)
