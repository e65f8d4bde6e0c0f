"""Expert parallelism: a mixture of experts whose experts are on different ranks.

A router sends each token to `top_k` of the layer's experts. The experts are divided over a group of
ranks, and so are the tokens, so tokens travel: one all-to-all takes them to their experts
(*dispatch*), another takes the results back (*combine*). The backward runs both in reverse.

Two axes of ranks, and what each holds:

    group       each rank has different tokens and experts; the router is on every rank
    replicas    each rank has different tokens and a copy of the same experts

So the gradient of an expert is complete within the group, because all tokens of the group reach the
expert. Over `replicas` it has to be summed. The router, and everything outside the layer, is on
every rank of both axes, where each has the gradient of its own tokens: sum it over all these ranks.
`sum_gradients` does both, and so does `zero.Zero`, which shards what it sums.

As in `data_parallel`, the loss of a step is a sum over valid tokens, divided by their number in the
whole step. The auxiliary loss that the layer returns already covers the whole step, and is the same
on every rank: add it once, undivided. Its gradient counts only this rank's tokens, so the sum of
the ranks' gradients is right.

    output, auxiliary = moe(tokens)
    (loss(output, targets) / count + 0.01 * auxiliary).backward()
    sum_gradients(model)

`torch.amp.GradScaler` decides on each rank by itself whether to skip a step, by the experts of that
rank: use bf16, or `precision.LossScaler` with its `finite` all-reduced.
"""

from naranhi.expert_parallel.dispatch import Plan, make_plan
from naranhi.expert_parallel.exchange import exchange_rows
from naranhi.expert_parallel.experts_mlp import ExpertsMLP, auxiliary_loss
from naranhi.expert_parallel.gpt2 import add_experts
from naranhi.expert_parallel.gradients import (
    expert_parameters,
    sum_gradients,
    sum_over_copies,
)
from naranhi.expert_parallel.grouped import grouped_mm
from naranhi.expert_parallel.llama import divide_experts, divided_state, undivided_state
from naranhi.expert_parallel.moe import MoE
from naranhi.expert_parallel.router import Routing, balancing_loss, route

__all__ = [
    "ExpertsMLP",
    "MoE",
    "Plan",
    "Routing",
    "add_experts",
    "auxiliary_loss",
    "balancing_loss",
    "divide_experts",
    "divided_state",
    "exchange_rows",
    "expert_parameters",
    "grouped_mm",
    "make_plan",
    "route",
    "sum_gradients",
    "sum_over_copies",
    "undivided_state",
]
