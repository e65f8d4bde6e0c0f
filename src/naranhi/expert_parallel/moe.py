"""A mixture of experts: a router, and feed-forward networks that are divided over ranks."""

from __future__ import annotations

import math
from numbers import Real

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from naranhi.autograd.autocast import as_autocast, autocast_dtype
from naranhi.distributed import agree
from naranhi.expert_parallel.counts import gather_counts, report
from naranhi.expert_parallel.dispatch import Plan, count_choices, make_plan
from naranhi.expert_parallel.exchange import exchange_rows, reorder
from naranhi.expert_parallel.grouped import grouped_mm
from naranhi.expert_parallel.router import Router, balancing_loss, route
from naranhi.tensor_parallel.shards import ShardedModule, Split


class MoE(ShardedModule):
    """Send each token to `top_k` of the experts, and return the weighted sum of their outputs.

    An expert is `gelu(x @ up) @ down`, or with `gate` an MLP with a gate,
    `(gate(x @ a) * (x @ b)) @ down`, where `up` is a and b side by side. Rank r of the group holds
    the r-th block of `experts / ranks` experts. Make the layer with the same seed on every rank:
    every rank draws all experts, one after the other, and keeps its own, so the weights are the
    same on any number of ranks.

    `splits` says which experts a rank holds, as in a tensor parallel layer. So a gradient norm
    (`tensor_parallel.clip_grad_norm_`) counts each expert once, and `full_state_dict` and
    `Checkpoints` have them all. `state_dict` has this rank's only, in plain tensors, which
    `torch.distributed.checkpoint` takes for copies.

    Sum the gradients by `sum_gradients`, or let `Zero` do it, which shards experts over their
    copies. `DDP` refuses divided experts. torch's do not: its DDP would overwrite all experts
    with the first rank's, and `fully_shard` would mix pieces of different ones.

    Args:
        hidden: the size of a token.
        ffn: the size inside an expert.
        experts: the number of experts.
        top_k: the number of experts of a token.
        group: the ranks over which the experts are divided; None for the default one.
        capacity_factor: an expert takes at most `ceil(capacity_factor * top_k * tokens / experts)`
            of the step's choices, where `tokens` counts those of all ranks; the other choices are
            dropped and add nothing to the output. None drops nothing.
        replicas: the ranks that hold a copy of the same experts and train them together; None for
            no copies. Every rank needs the same number of replicas.
        gate: the activation of the experts' gates, such as `nn.SiLU()`; None for no gate.
        normalize: whether the weights of a token's experts sum to 1; by default only if `top_k` is
            above 1. See `route`.
        device: where the weights are; "meta" for a layer without values, which then
            come from `tensor_parallel.materialize`.

    Attributes:
        up, down: the experts of this rank, (own experts, hidden, ffn), or with `gate` twice as
            wide, and (own experts, ffn, hidden).
        own: the numbers of the experts of this rank.
        router: from a token to one logit for each expert, the same on every rank.
        plan: what the last forward sent, received and dropped here.
        load: how many choices each expert got in the last forward, before dropping, (experts).

    Raises:
        ValueError: on every rank, before anything else is sent: ranks passed different arguments or
            have different routers, or copies are not equal; a size is not a whole number of at
            least 1; `top_k` is above `experts`; the ranks do not divide the experts; or
            `capacity_factor` is not a positive, finite number.
        TypeError: `gate` is not a module.
    """

    replicas: dist.ProcessGroup | None
    experts: int
    top_k: int
    capacity_factor: float | None
    gate: nn.Module | None
    normalize: bool | None
    own: range
    router: Router
    up: nn.Parameter
    down: nn.Parameter
    plan: Plan | None
    load: torch.Tensor | None
    own_tokens = True  # each rank of the group has tokens of its own, not a copy of all

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
        capacity_factor: float | None = None,
        *,
        replicas: dist.ProcessGroup | None = None,
        gate: nn.Module | None = None,
        normalize: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self.experts, self.top_k, self.gate, self.normalize = experts, top_k, gate, normalize
        self.replicas = replicas if replicas and dist.get_world_size(replicas) > 1 else None
        self.capacity_factor = capacity_factor
        sizes = {"hidden": hidden, "ffn": ffn, "experts": experts, "top_k": top_k}
        alike = {"capacity_factor": str(capacity_factor), "normalize": str(normalize)}
        gated = str(gate) if isinstance(gate, nn.Module) else type(gate).__name__
        self._agree(**sizes, **alike, gate=gated, copies=self._copies)
        if not isinstance(gate, nn.Module | None):
            raise TypeError(f"gate must be a module, such as nn.SiLU(), or None, not {gate!r}")
        _require(self.ranks, capacity_factor, **sizes)
        self.router = Router(hidden, experts, device)
        first = self.rank * experts // self.ranks
        self.own = range(first, first + experts // self.ranks)
        wide = ffn if gate is None else 2 * ffn
        self.up = nn.Parameter(_drawn(hidden, wide, experts, self.own, device))
        self.down = nn.Parameter(_drawn(ffn, hidden, experts, self.own, device))
        self.splits.update(dict.fromkeys(("up", "down"), Split(0, experts, self.ranks)))
        self._agree(router=self.router)
        if self.replicas:
            agree(self.replicas, experts=nn.ParameterList([self.up, self.down]))
        self.plan = self.load = None

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output for this rank's tokens, and the auxiliary loss of the step.

        Every rank of the group and of `replicas` must call it at the same time, even without
        tokens, and must run a backward through the output.

        Args:
            tokens: this rank's tokens, (tokens, hidden), in the dtype of the weights, or under
                autocast in any that it casts. There may be none.

        Returns:
            The output, (tokens, hidden), in the dtype in which experts compute, and the
            `balancing_loss` over the tokens of all ranks, which is the same on every rank. The mean
            of the ranks' separate losses would be different: see `balancing_loss`.

        Raises:
            ValueError: on every rank, before a token is sent: on some rank `tokens` does not match
                the layer's shape, dtype or device, or holds NaN or infinity; or ranks differ in
                dtype, in grad mode, or in whether tokens, or else experts, need a gradient.
        """
        shape_only = isinstance(tokens, torch.Tensor) and tokens.is_meta
        if shape_only or isinstance(tokens, FakeTensor):  # nothing is sent
            return as_autocast(tokens)[0].clone(), tokens.sum()
        axes = self.group, self.replicas
        if problem := _problem(tokens, self.up):
            report(problem, self.experts * (self.top_k + 1), self.up.device, *axes)
        routing = route(self.router(tokens), self.top_k, self.normalize)
        own_sums = routing.probabilities.sum(0)
        own_counts = count_choices(routing.experts, self.experts)
        counts, sums = gather_counts(
            own_counts, own_sums.detach(), self._circumstances(tokens), *axes
        )

        self.load = counts.sum((0, 2)).to(own_sums.device)
        size = int(counts.sum()) // self.top_k
        capacity = self._capacity(size)
        self.plan = make_plan(routing.experts, counts, self._place, self.ranks, capacity)
        # The value is the whole step's; the gradient is that of this rank's probabilities.
        sums = sums.to(own_sums) + (own_sums - own_sums.detach())
        auxiliary = balancing_loss(self.load, sums, size)
        return self.dispatch_and_combine(tokens, routing.gates), auxiliary

    def _circumstances(self, tokens):
        """Return what decides which messages a forward and its backward exchange."""
        needs = "need a gradient"
        # Under no_grad, requires_grad depends on how a tensor was made, so it is not compared.
        if torch.is_grad_enabled() and not tokens.requires_grad:  # experts decide then
            trained = self.up.requires_grad or self.down.requires_grad
            needs = f"do not need a gradient, experts are {'trained' if trained else 'frozen'}"
        recorded = "recorded" if torch.is_grad_enabled() else "not recorded"
        return f"{autocast_dtype(tokens)}, {needs}, operations are {recorded}"

    def dispatch_and_combine(self, tokens: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Send the chosen rows to their experts and return the weighted sums of the results.

        Args:
            tokens: this rank's tokens, (tokens, hidden).
            gates: the weight of each choice, (tokens, top_k); `plan` says where they go.
        """
        order, sent, received, _ = self.plan
        (tokens,) = as_autocast(tokens)
        token = order % max(len(tokens), 1)
        arriving = received.sum(1).tolist()
        rows = exchange_rows(tokens.index_select(0, token), sent, arriving, self.group)
        rows = exchange_rows(self.run_experts(rows, received), arriving, sent, self.group)
        gates = gates.t().flatten().index_select(0, order).to(rows.dtype)
        return torch.zeros_like(tokens).index_add(0, token, rows * gates[:, None])

    def run_experts(self, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Run the experts on rows sorted by sender, then expert; return results in that order.

        Args:
            rows: the rows that arrived, (rows, hidden).
            received: how many of them each rank sent to each expert here, (ranks, own experts).
        """
        sizes = received.sum(0).tolist()
        by_expert = torch.arange(len(sizes), device="cpu").repeat(len(received))
        by_expert = by_expert.repeat_interleave(received.flatten()).argsort(stable=True)
        rows = reorder(rows, by_expert)
        up, down = as_autocast(self.up, self.down)
        inner = grouped_mm(rows, up, sizes)
        if self.gate is None:
            inner = F.gelu(inner)
        else:
            gates, inner = inner.chunk(2, -1)
            inner = self.gate(gates) * inner
        return reorder(grouped_mm(inner, down, sizes), by_expert.argsort())

    @property
    def _copies(self):
        return dist.get_world_size(self.replicas) if self.replicas else 1

    @property
    def _place(self):
        """Return this rank's place among the sources of tokens: copy by copy, rank by rank."""
        copy = dist.get_rank(self.replicas) if self.replicas else 0
        return copy * self.ranks + self.rank

    def _capacity(self, tokens):
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * self.top_k * tokens / self.experts)

    def _agree(self, **things):
        agree(self.group, **things)
        if self.replicas:
            agree(self.replicas, **things)


def _require(ranks, capacity_factor, **sizes):
    """Raise ValueError for arguments with which no layer can be made."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {size!r}")
    experts, top_k = sizes["experts"], sizes["top_k"]
    if top_k > experts:
        raise ValueError(f"top_k={top_k} experts for a token, but the layer has {experts}")
    if experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide {experts} experts")
    if capacity_factor is not None and not isinstance(capacity_factor, Real):
        raise ValueError(f"capacity_factor must be a number or None, not {capacity_factor!r}")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ValueError(
            "capacity_factor must be positive and finite, or None to drop nothing, not "
            f"{capacity_factor}"
        )


def _problem(tokens, weight):
    """Return what is wrong with a rank's tokens, or None."""
    hidden = weight.shape[1]
    if not isinstance(tokens, torch.Tensor):
        return f"tokens must be a tensor of shape (tokens, {hidden}), not {type(tokens)}"
    if tokens.dim() != 2 or tokens.shape[1] != hidden:
        return f"tokens must have shape (tokens, {hidden}), not {tuple(tokens.shape)}"
    kinds = [(autocast_dtype(x), x.device) for x in (tokens, weight)]
    if kinds[0] != kinds[1]:
        return (
            f"tokens are {tokens.dtype} on {tokens.device}, the experts {weight.dtype} on "
            f"{weight.device}"
        )
    return None


def _drawn(inputs, outputs, experts, own, device):
    """Return the weights of `own` experts, drawn as `nn.Linear` draws them, one after the other."""
    bound = inputs**-0.5
    weights = torch.empty(len(own), inputs, outputs, device=device)
    for expert in range(experts):
        weight = torch.empty(inputs, outputs, device=device).uniform_(-bound, bound)
        if expert in own:
            weights[expert - own[0]] = weight
    return weights
