"""The router: which experts a token goes to, with which weights, and a loss to balance experts.

Sources: Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts
layer" (2017), for the top k of a softmax; Fedus, Zoph and Shazeer, "Switch Transformers" (2022),
section 2.2, for the auxiliary loss and for a router in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Router(nn.Linear):
    """A linear layer from a token to one logit for each expert, in float32 or wider.

    In bfloat16, as under autocast, rounding would change which experts are the most probable.

    Args:
        hidden: the size of a token.
        experts: the number of experts.
        device: where the weights are.
    """

    def __init__(self, hidden: int, experts: int, device: torch.device | str | None = None) -> None:
        super().__init__(hidden, experts, bias=False, device=device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits, (tokens, experts), of tokens, (tokens, hidden)."""
        wide = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(wide), self.weight.to(wide))


class Routing(NamedTuple):
    """Where tokens go.

    Args:
        experts: the experts of each token, the most probable first, (tokens, top_k).
        gates: the weight of each of them in the token's output, (tokens, top_k).
        probabilities: the router's probability of every expert, (tokens, experts).
    """

    experts: torch.Tensor
    gates: torch.Tensor
    probabilities: torch.Tensor


def route(logits: torch.Tensor, top_k: int, normalize: bool | None = None) -> Routing:
    """Choose the `top_k` most probable experts of each token.

    Args:
        logits: the router's output, (tokens, experts).
        top_k: the number of experts of a token.
        normalize: whether a token's gates are divided by their sum. By default only if `top_k` is
            above 1: a single gate would always be 1, and have no gradient.
    """
    # In float32 at least: rounding to bfloat16 would change which expert is the most probable.
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=wide)
    gates, experts = probabilities.topk(top_k)
    if normalize is None:
        normalize = top_k > 1
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return Routing(experts, gates, probabilities)


def balancing_loss(choices: torch.Tensor, probabilities: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return experts x the sum over experts of (share of choices) x (mean probability).

    It is 1 if tokens are spread evenly, and up to `experts / top_k` if not. The shares come from
    counts and have no gradient, so the gradient lowers the probability of experts with many tokens.

    Because of the product, compute it over the *whole* step. The mean of the losses of two halves
    is different: two halves that prefer different experts are balanced only when taken together.

    Args:
        choices: how many times each expert was chosen in the step, (experts).
        probabilities: the sum over the step's tokens of each expert's probability, (experts).
        tokens: the number of tokens of the step.
    """
    shares = choices.to(probabilities.dtype) / choices.sum().clamp(min=1)
    return len(choices) * (shares * probabilities).sum() / max(tokens, 1)
