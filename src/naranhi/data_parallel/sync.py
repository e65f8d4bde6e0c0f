"""The same model on every rank: made equal at the start, then compared and kept equal.

`group` is the process group, None for the default one, and a rank is a rank *within the group*.
A function that takes `Axes` also takes several groups: the axes of a mesh, over all of whose ranks
the model is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import broadcast, ring
from naranhi.collectives.buckets import buckets, pack, unpack
from naranhi.collectives.chunks import overlap
from naranhi.distributed import from_all_ranks
from naranhi.distributed.agreement import Axes, groups_of

ABSENT, DENSE, SPARSE = 0, 1, 2  # flags of gradients, in the table that the ranks compare


def broadcast_parameters(
    model: nn.Module,
    group: Axes = None,
    *,
    apart: Mapping[nn.Parameter, tuple[dist.ProcessGroup, ...]] | None = None,
) -> None:
    """Copy rank 0's parameters and buffers to every rank, in place.

    Args:
        model: This rank's replica.
        group: The process group, or several axes; None for the default group.
        apart: {parameter: the axes over whose ranks it is the same}, if they differ from `group`,
            as for experts; it is copied from the first of those ranks.

    Raises:
        ValueError: On every rank, before anything is changed, if the models differ in their
            parameters or buffers, or in a shape, dtype or `requires_grad`; it names the first
            difference.
    """
    tensors = {f"parameter {name}": param for name, param in model.named_parameters()}
    tensors |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    _require_same_kinds(_kinds(tensors), group)
    apart = apart or {}
    _broadcast([tensor for tensor in tensors.values() if tensor not in apart], group)
    for axes in dict.fromkeys(apart.values()):
        _broadcast([param for param, own in apart.items() if own == axes], axes)


def _kinds(tensors):
    return {
        name: (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in tensors.items()
    }


def _require_same_kinds(local, group):
    """Raise ValueError on every rank unless all ranks have the same names, shapes and dtypes."""
    gathered = from_all_ranks(local, group)
    for rank, other in enumerate(gathered):
        _compare(gathered[0], other, rank)


def _compare(first, other, rank):
    """Raise ValueError unless rank `rank` has what rank 0 has."""
    for name in {**first, **other}:
        if name not in first or name not in other:
            has, lacks = (0, rank) if name in first else (rank, 0)
            raise ValueError(f"rank {has} has a {name}, rank {lacks} has none")
        for what, expected, given in zip(
            ("shape", "dtype", "requires_grad"), first[name], other[name], strict=True
        ):
            if expected != given:
                raise ValueError(
                    f"{name} has {what} {expected} on rank 0 and {given} on rank {rank}"
                )
    if list(first) != list(other):
        raise ValueError(f"rank {rank} has its parameters in another order than rank 0")


def broadcast_buffers(model: nn.Module, group: Axes = None) -> None:
    """Copy rank 0's buffers to every rank, in place.

    Each rank's forward may have changed its own (a batch norm's running mean follows the rank's
    share).

    Args:
        model: This rank's replica. It has buffers on every rank or on none.
        group: The process group, or several axes; None for the default group.

    Raises:
        ValueError: On every rank, before anything is changed, if the models differ in their
            buffers, or in a shape or dtype, because a forward has changed them; it names the first
            difference.
    """
    each = (buffer for module in model.modules() for buffer in module._buffers.values())
    if all(buffer is None for buffer in each):
        return
    buffers = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    kinds = _kinds(buffers)
    # One number a step: if its smallest and largest values agree, all ranks have the same.
    digest = int.from_bytes(sha256(repr(kinds).encode()).digest()[:7])
    extremes = next(iter(buffers.values())).new_tensor([digest, -digest], dtype=torch.int64)
    for axis in groups_of(group):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=axis)
    if extremes.sum().item():
        _require_same_kinds(kinds, group)
    _broadcast(list(buffers.values()), group)


def _broadcast(tensors, group):
    for bucket in buckets(tensors):
        flat = pack(bucket)
        for axis in groups_of(group):
            broadcast(flat, 0, axis)
        unpack(flat, bucket)


def with_gradient(model: nn.Module, group: dist.ProcessGroup | None) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, in order, if they are the same on every rank.

    Args:
        model: This rank's replica.
        group: The process group; None for the default one.

    Raises:
        RuntimeError: On every rank, if a parameter has a gradient on some ranks only; it names the
            parameter and the ranks.
        TypeError: On every rank, if a gradient is sparse; it names the parameter and the ranks.
    """
    # Frozen ones too: otherwise ranks that freeze different ones would compare different columns.
    flags = {name: _flag(param) for name, param in model.named_parameters()}
    same_on_all_ranks(flags, group, next((p.device for p in model.parameters()), "cpu"))
    return [param for name, param in model.named_parameters() if flags[name] != ABSENT]


def _flag(param):
    if not param.requires_grad or param.grad is None:
        return ABSENT
    return DENSE if param.grad.layout is torch.strided else SPARSE


def same_on_all_ranks(
    has: Mapping[str, int], group: dist.ProcessGroup | None, device: torch.device | str
) -> None:
    """Raise the errors of `with_gradient` unless all ranks have the same, dense gradients.

    Args:
        has: The flag of each parameter's gradient (ABSENT, DENSE or SPARSE), by the parameter's
            name.
        group: The process group; None for the default one.
        device: Where messages are sent from.
    """
    if not has:
        return
    table, kernel = have_gradients(list(has.values()), group, device)
    overlap([kernel])
    require_same_gradients(has, table)


def have_gradients(
    flags: Sequence[int], group: Axes, device: torch.device | str
) -> tuple[torch.Tensor, Iterator[None]]:
    """Return a table of all ranks' flags, and the kernel that fills it (see `collectives`).

    Args:
        flags: This rank's flag for each parameter: ABSENT, DENSE or SPARSE (or False, True).
        group: The process group, or several axes.
        device: Where the table is, and messages are sent from.

    Returns:
        The table, of shape (ranks, parameters) and dtype uint8, valid once the kernel has ended;
        and the kernel.
    """
    axes = groups_of(group)
    sizes, places = map(dist.get_world_size, axes), list(map(dist.get_rank, axes))
    table = torch.empty(*[*sizes][::-1], len(flags), dtype=torch.uint8, device=device)
    table[tuple(places[::-1])] = table.new_tensor(flags)

    def gather():
        for number, axis in enumerate(axes):  # rows, then rows of rows
            rows = table[tuple(places[:number:-1])]
            yield from ring.all_gather(list(rows), axis, places[number], len(rows))

    return table.view(-1, len(flags)), gather()


def require_same_gradients(names: Iterable[str], table: torch.Tensor) -> None:
    """Raise the errors of `with_gradient` unless all rows of the table are equal, without SPARSE.

    Args:
        names: The parameters' names, one for each column.
        table: The flags of each rank's gradients, as `have_gradients` returns them.
    """
    table = table.cpu()  # once
    busy = table.any(1).tolist()
    hint = (
        (
            f"; rank {_list(busy, False)} has no gradient at all: a rank without samples still has "
            "to run the model, on rows that the loss ignores"
        )
        if not all(busy)
        else ""
    )
    for name, column in zip(names, table.T.tolist(), strict=True):
        if SPARSE in column:
            raise TypeError(
                f"parameter {name} has a sparse gradient on rank {_list(column, SPARSE)}, which is "
                "not summed over the ranks: use dense gradients (sparse=False)"
            )
        if 0 < sum(column) < len(column):
            raise RuntimeError(
                f"parameter {name} has a gradient on rank {_list(column, True)}, but none on rank "
                f"{_list(column, False)}{hint}"
            )


def _list(values, wanted):
    return ", ".join(str(rank) for rank, value in enumerate(values) if value == wanted)


def require_finite(model: nn.Module) -> None:
    """Raise if a gradient is infinite or NaN.

    If the gradients are sums over the ranks, the outcome and the message are the same on every
    rank.

    Args:
        model: The model whose `.grad` tensors are checked.

    Raises:
        FloatingPointError: Naming the first parameter with such a gradient.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.grad is not None]
    if not named:
        return
    finite = torch.stack([param.grad.isfinite().all() for _, param in named]).tolist()
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    if bad:
        more = f" (and of {len(bad) - 1} more)" * (len(bad) > 1)
        raise FloatingPointError(f"the gradient of parameter {bad[0]}{more} is not finite")
