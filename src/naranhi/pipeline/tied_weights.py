"""Tied parameters: a parameter that several ranks of a pipeline use, each with a copy of it.

GPT-2's embedding is an example: the first stage looks tokens up in it, the last one multiplies by
it. Each copy receives the sum of the gradients of all copies, so that copies that were equal stay
equal.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.shared_memory import sharing_memory
from naranhi.autograd.wrapper import unwrapped_name
from naranhi.distributed import fingerprint
from naranhi.expert_parallel import expert_parameters


def tied_parameters(
    parts: Sequence[Sequence[nn.Module]], placement: Sequence[int]
) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """Return (name, parameter, ranks) of each tied parameter, in an order common to all ranks.

    Frozen parameters are included, because they may be unfrozen later.

    Args:
        parts: the layers of each stage.
        placement: the rank of each stage.
    """
    return [
        (name, tensor, tuple(sorted(ranks)))
        for name, tensor, ranks in _users(parts, placement)
        if len(ranks) > 1 and isinstance(tensor, nn.Parameter)
    ]


def check_max_norm(
    parts: Sequence[Sequence[nn.Module]], placement: Sequence[int], has_replicas: bool
) -> None:
    """Raise ValueError if a forward on one rank would change a weight that other ranks have too.

    Args:
        parts: the layers of each stage.
        placement: the rank of each stage.
        has_replicas: whether other pipelines have copies of all weights.
    """
    names = {weight: name for name, weight, _ in tied_parameters(parts, placement)}
    for module in nn.ModuleList(chain(*parts)).modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        if has_replicas or module.weight in names:
            raise ValueError(
                f"{names.get(module.weight, 'an embedding')} has max_norm={module.max_norm}, so a "
                "forward changes the rows that it reads, and the copies on other ranks would "
                "diverge: make it without max_norm"
            )


def check_memory(parts: Sequence[Sequence[nn.Module]], placement: Sequence[int]) -> None:
    """Raise ValueError if parameters on different ranks share memory: their copies would not.

    Args:
        parts: the layers of each stage.
        placement: the rank of each stage.
    """
    named = _users(parts, placement)
    users = {name: ranks for name, _, ranks in named}
    for name, other in sharing_memory((name, tensor) for name, tensor, _ in named):
        if users[name] != users[other]:
            raise ValueError(
                f"parameters {name} and {other} share memory, and are on different ranks: make "
                "them one parameter, which is tied then, or give each its own memory"
            )


def copies(
    parts: Sequence[Sequence[nn.Module]],
    placement: Sequence[int],
    rank: int,
    replicas: dist.ProcessGroup | None,
    loss: Callable[..., torch.Tensor],
) -> dict[str, dict[str, str]]:
    """Return fingerprints of what must be the same on other ranks.

    Args:
        parts: the layers of each stage.
        placement: the rank of each stage.
        rank: this rank, in the pipeline.
        replicas: the process group of the replicas; None without replicas.
        loss: the loss of the last stage; a module's parameters and buffers are included.

    Returns:
        {among whom: {name: digest}}. "pipeline": parameters and buffers that another rank of the
        pipeline uses too. "replicas": all of this rank's, if it has replicas, except experts, of
        which `MoE` compares the copies. Tensors on the meta device are left out, having no values
        to compare.
    """
    experts = expert_parameters(nn.ModuleList(chain(*parts)))

    def digests(least):
        return {
            name: fingerprint(tensor)
            for name, tensor, ranks in _users(parts, placement)
            if rank in ranks
            and len(ranks) >= least
            and not tensor.is_meta
            and (tensor not in experts or least > 1)
        }

    whole = digests(1) if replicas else {}
    if replicas and rank == placement[-1] and isinstance(loss, nn.Module):
        own = chain(loss.named_parameters(), loss.named_buffers())
        whole |= {f"loss_fn.{n}": fingerprint(tensor) for n, tensor in own if not tensor.is_meta}
    return {"pipeline": digests(2), "replicas": whole}


def _users(parts, placement):
    """Return (name in the model, parameter or buffer, the ranks that use it) of each."""
    users, model = {}, nn.ModuleList(chain(*parts))
    for part, rank in zip(parts, placement, strict=True):
        module = nn.ModuleList(part)
        for tensor in chain(module.parameters(), module.buffers()):
            users.setdefault(tensor, set()).add(rank)
    return [
        (unwrapped_name(model, name), tensor, users[tensor])
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    ]


class TiedWeight:
    """This rank's copy of a tied parameter, and the process group of the ranks that have one.

    Args:
        name: the parameter's name in the model.
        parameter: this rank's copy.
        group: the ranks that have a copy.
    """

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup | None
    before: torch.Tensor | None

    def __init__(self, name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
        self.name, self.parameter, self.group, self.before = name, parameter, group, None

    def begin(self) -> None:
        """Set aside the gradient of earlier steps.

        It is already a sum over the copies, and must not be summed again.
        """
        self.before, self.parameter.grad = self.parameter.grad, None

    def sum(self) -> None:
        """All-reduce the gradients of all copies; every rank of the group calls this.

        It stays None if no rank has one, as in one process. A rank without one sends -0.0 then, so
        only a sum of nothing else is -0.0: adding 0.0 makes a 0.0 of the -0.0 in a gradient.
        """
        if not self.parameter.requires_grad:
            self.parameter.grad, self.before = self.before, None
            return
        if is_absent := self.parameter.grad is None:
            self.parameter.grad = torch.full_like(self.parameter, -0.0)
        # Autograd conjugates by a flag, which a message does not carry.
        self.parameter.grad = grad = self.parameter.grad.resolve_conj().resolve_neg()
        # A message is memory in storage order, and strides may differ between ranks.
        total = grad.contiguous()
        first = total.view(-1)[:1].real
        if not is_absent:
            first += 0.0
        dist.all_reduce(total, group=self.group)
        if total is not grad:
            grad.copy_(total)
        if is_absent and ((first == 0) & first.signbit()).all():
            self.parameter.grad = self.before
        elif self.before is not None:
            self.parameter.grad += self.before
        self.before = None

    def close(self) -> None:
        """Drop the group."""
        self.group = None
