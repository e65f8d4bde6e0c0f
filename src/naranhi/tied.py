"""Tied parameters: one parameter that several ranks of a pipeline use, each with a copy of it.

GPT-2's embedding is one: the first stage looks tokens up in it, the last one multiplies by it. Each
copy receives the sum of all gradients, so that copies that were equal stay equal.
"""

import torch
import torch.distributed as dist
from torch import nn


def tied_parameters(parts, placement):
    """The tied parameters, each with the ranks that use it, in an order common to all ranks.

    parts: by stage, its layers; placement: by stage, its rank.
    """
    users = {}
    for part, rank in zip(parts, placement, strict=True):
        for parameter in nn.ModuleList(part).parameters():
            users.setdefault(parameter, set()).add(rank)
    return [(parameter, tuple(sorted(ranks))) for parameter, ranks in users.items()
            if len(ranks) > 1 and parameter.requires_grad]


class Tied:
    """This rank's copy of a tied parameter, and the process group of the ranks that have one."""

    def __init__(self, parameter, group):
        self.parameter, self.group, self.before = parameter, group, None

    def begin(self):
        """A gradient of earlier steps is a sum already: keep it out of the next one."""
        self.before, self.parameter.grad = self.parameter.grad, None

    def sum(self):
        """Add up the gradients of all copies. Every rank of the group calls this."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        dist.all_reduce(self.parameter.grad, group=self.group)
        if self.before is not None:
            self.parameter.grad += self.before
            self.before = None
