"""The same model on every rank: made equal at the start, compared and kept equal on the way.

`group` is the process group, None for the default one, and a rank is one *within the group*.
"""

import torch
import torch.distributed as dist

from naranhi.collectives import broadcast, ring
from naranhi.collectives.buckets import buckets, pack, unpack
from naranhi.collectives.chunks import overlap

ABSENT, DENSE, SPARSE = 0, 1, 2  # gradients, in the table that ranks compare


def broadcast_parameters(model, group=None):
    """Give every rank the parameters and buffers of rank 0, in place.

    Raises ValueError on every rank, before anything is changed, where the models are not of the
    same shapes; it names the first parameter or buffer that differs.
    """
    group = group or dist.group.WORLD
    tensors = [("parameter", *one) for one in model.named_parameters()]
    tensors += [("buffer", *one) for one in model.named_buffers()]
    mine = {
        f"{kind} {name}": (tuple(one.shape), str(one.dtype), one.requires_grad)
        for kind, name, one in tensors
    }
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    for rank, other in enumerate(told):
        _compare(told[0], other, rank)
    _broadcast([one for _, _, one in tensors], group)


def _compare(first, other, rank):
    """ValueError unless rank `rank` has what rank 0 has."""
    for name in {**first, **other}:
        if name not in first or name not in other:
            has, lacks = (0, rank) if name in first else (rank, 0)
            raise ValueError(f"rank {has} has a {name}, rank {lacks} has none")
        for what, one, two in zip(
            ("shape", "dtype", "requires_grad"), first[name], other[name], strict=True
        ):
            if one != two:
                raise ValueError(f"{name} has {what} {one} on rank 0 and {two} on rank {rank}")
    if list(first) != list(other):
        raise ValueError(f"rank {rank} has its parameters in another order than rank 0")


def broadcast_buffers(model, group=None):
    """Give every rank the buffers of rank 0, in place: each rank's forward may have changed its own
    (a batch norm's running mean follows the rank's share)."""
    _broadcast(list(model.buffers()), group)


def _broadcast(tensors, group):
    for bucket in buckets(tensors):
        flat = pack(bucket)
        broadcast(flat, 0, group)
        unpack(flat, bucket)


def with_gradient(model, group):
    """The parameters that have a gradient, in order, when they are the same on every rank.

    Raises on every rank, and names the parameter and the ranks: RuntimeError where a parameter has
    one on some ranks only, TypeError where one is sparse.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    same_on_all_ranks(
        {name: _flag(one.grad) for name, one in named},
        group,
        next((one.device for _, one in named), "cpu"),
    )
    return [one for _, one in named if one.grad is not None]


def _flag(gradient):
    return ABSENT if gradient is None else DENSE if gradient.layout is torch.strided else SPARSE


def same_on_all_ranks(has, group, device):
    """The errors of `with_gradient`, unless has: {parameter's name: a flag of its gradient} is the
    same on all ranks, and no gradient is sparse. Messages travel from `device`."""
    if not has:
        return
    table, kernel = have_gradients(list(has.values()), group or dist.group.WORLD, device)
    overlap([kernel])
    require_same_gradients(has, table)


def have_gradients(mine, group, device):
    """(table, a kernel that fills it: see `collectives`). A row for each rank, of one flag for each
    parameter: ABSENT, DENSE or SPARSE (or False, True). `mine`, a list, is this rank's."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    table = torch.empty(ranks, len(mine), dtype=torch.uint8, device=device)
    table[rank] = table.new_tensor(mine)
    return table, ring.all_gather(list(table), group, rank, ranks)


def require_same_gradients(names, table):
    """The errors of `with_gradient`, unless all rows of the table are the same and no gradient is
    sparse."""
    busy = table.any(1).tolist()
    hint = (
        (
            f"; rank {_list(busy, False)} has none of any parameter: without a sample, run the "
            "model on rows that do not count"
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


def require_finite(model):
    """FloatingPointError, naming the first parameter, where a gradient is infinite or no number.

    Of gradients that are sums over the ranks, it says the same on every rank.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.grad is not None]
    if not named:
        return
    finite = torch.stack([one.grad.isfinite().all() for _, one in named]).tolist()
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    if bad:
        more = f" (and of {len(bad) - 1} more)" * (len(bad) > 1)
        raise FloatingPointError(f"the gradient of parameter {bad[0]}{more} is not finite")
