"""Check, before a collective runs, that all ranks of the group call it, and with equal arguments.

torch has such checks (TORCH_DISTRIBUTED_DEBUG=DETAIL). With gloo they include sends and receives
in the sequence number that must agree, so a rank that has sent one message more than another fails
its next collective (torch 2.13). That does not work for a book on point-to-point communication.
These checks do the same over the store and ignore sends and receives. A rank that starts a
collective with `async_op=True` compares its call with those already made by other ranks, and does
not wait for the rest. Groups made with `group_desc="unchecked"` are not checked; use such groups
for timing.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from naranhi.world.store import Store

# What must agree between ranks: the tensor argument that has the same shape on every rank, or the
# list of tensors that has the same shapes; also the root and the reduction. The lists of all_to_all
# and similar collectives may differ from rank to rank.
SAME_TENSOR = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": None,
    "all_to_all_single": None,
    "barrier": None,
    "broadcast_object_list": None,
    "all_gather_object": None,
    "gather_object": None,
    "scatter_object_list": None,
}
UNCHECKED = "unchecked"


class CollectiveMismatch(RuntimeError):
    """The ranks called different collectives.

    Args:
        calls: rank -> the collective that it called, for the ranks that have called one.
    """

    def __init__(self, calls: dict[int, str]):
        super().__init__(f"the ranks called different collectives: {calls}")
        self.calls = calls

    def __reduce__(self) -> tuple[type, tuple[dict[int, str]]]:
        return type(self), (self.calls,)


class CollectiveTimeout(RuntimeError):
    """Some ranks did not call the collective before its deadline.

    Args:
        call: the collective.
        absent: the ranks that did not call it.
    """

    call: str
    absent: list[int]

    def __init__(self, call: str, absent: list[int]):
        super().__init__(f"waited in vain for ranks {absent} to call {call}")
        self.call, self.absent = call, absent

    def __reduce__(self) -> tuple[type, tuple[str, list[int]]]:
        return type(self), (self.call, self.absent)


class Checks:
    """Wrap the collectives of `torch.distributed` in this process with the checks.

    Construct this once per process: a cell may keep a wrapped collective under another name.

    Args:
        store: the `store.Store` through which the ranks compare their calls.
    """

    store: Store
    timeout: float

    def __init__(self, store: Store):
        self.store = store
        for name in SAME_TENSOR:
            if hasattr(dist, name):
                setattr(dist, name, self._around(name, getattr(dist, name)))

    def renew(self, timeout: float) -> None:
        """Restart the count of collectives, for a new process group.

        Args:
            timeout: seconds to wait for the other ranks.
        """
        self.timeout, self._count = timeout, {}

    def _around(self, name, original):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args, **kwargs):
            if torch.compiler.is_compiling():  # a graph cannot contain a message to the store
                return original(*args, **kwargs)
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # raises torch's own TypeError
            call.apply_defaults()
            arguments = call.arguments
            group = arguments.get("group") or dist.group.WORLD
            if self._concerns(group):
                # Other ranks may call theirs only after this rank continues and sends a message.
                seconds = 0.0 if arguments.get("async_op") else self.timeout
                self._compare(group, _describe(name, arguments, group), seconds)
            return original(*args, **kwargs)

        return collective

    @staticmethod
    def _concerns(group):
        # None: the cell has destroyed the default group; torch's own error is clearest.
        if not isinstance(group, dist.ProcessGroup):
            return False
        return group.group_desc != UNCHECKED and dist.get_rank(group) >= 0

    def _compare(self, group, call, seconds):
        ranks = dist.get_process_group_ranks(group)
        number = self._count[group.group_name] = self._count.get(group.group_name, 0) + 1
        name = f"{group.group_name}/{number}"
        absent, calls = self.store.meet(name, dist.get_rank(), ranks, call, seconds)
        if absent and seconds:
            raise CollectiveTimeout(call, absent)
        if len(set(calls.values())) > 1:
            raise CollectiveMismatch(calls)


def _describe(name, arguments, group):
    value = arguments.get(SAME_TENSOR[name])
    tensors = value if isinstance(value, list | tuple) else [value]
    text, plain = name, []
    if tensors and all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        shapes = [str(list(tensor.shape)) for tensor in tensors]
        shapes = shapes if len(set(shapes)) > 1 else shapes[:1]
        text += f" of {', '.join(dtypes)} {', '.join(shapes)}"
    for role in ("src", "dst"):
        if role in arguments:
            plain.append(f"{role}={_root(arguments, role, group)}")
    if (op := arguments.get("op", dist.ReduceOp.SUM)) != dist.ReduceOp.SUM:
        plain.append(f"op={_reduction(op)}")
    return f"{text} ({', '.join(plain)})" if plain else text


def _root(arguments, role, group):
    """Return the root's rank in the world; a call may name it in two ways, or leave it at 0."""
    number, ranks = arguments.get(f"group_{role}"), dist.get_process_group_ranks(group)
    if number is None:
        return arguments[role] or 0
    return ranks[number] if number in range(len(ranks)) else number


def _reduction(op):
    """Return `op` as text by its content: the str of a ReduceOp object is its address."""
    factor = None
    if isinstance(op, dist.ReduceOp) and not isinstance(op, dist.ReduceOp.RedOpType):
        op, factor = op.__getstate__()
    text = str(op).removeprefix("RedOpType.")
    return text if factor is None else f"{text} by {float(factor):g}"
