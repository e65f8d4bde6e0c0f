"""Find the plans that fit, best first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from naranhi.costs.activations import RECOMPUTE
from naranhi.planning.arguments import check_real, whole
from naranhi.planning.cluster import Cluster
from naranhi.planning.forecast import Forecast
from naranhi.planning.machine import Machine
from naranhi.planning.memory import stage_memory
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan, PlanError
from naranhi.planning.prediction import check_classes, forecast

MARGIN = 0.05  # of the capacity: memory is forecast, not known
SIMULATED = 40  # plans whose schedule is simulated exactly, of those that look best


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        model: The model.
        cluster: The cluster.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        plans: The best of those that fit, with their forecasts, the fastest first.
        fitting: How many plans fit.
        tried: How many plans are possible, whether they fit or not.
        nearest: If no plan fits, the one that needs the least memory, with its forecast.
        margin: The fraction of the capacity that a plan had to leave free in order to fit.
    """

    model: Model
    cluster: Cluster
    sequence_length: int
    global_batch: int
    plans: tuple[tuple[Plan, Forecast], ...]
    fitting: int
    tried: int
    nearest: tuple[Plan, Forecast] | None = None
    margin: float = MARGIN

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, place: int) -> tuple[Plan, Forecast]:
        return self.plans[place]


def search(
    model: Model,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int,
    *,
    best: int = 20,
    margin: float = MARGIN,
    precision: str = "bf16",
) -> Found:
    """Return the plans that fit, the fastest first.

    The search tries all degrees that divide the GPUs, the model and the batch, within these limits:

    - tensor parallelism within a node, which splits no head of keys and values, with experts cut
      over the same ranks or, if they are divided over ranks, not at all;
    - context parallelism by powers of two, which leave each rank at least 4,096 tokens;
    - micro-batches of 1, 2, 4, 8 or 16 sequences;
    - 1F1B, and the interleaved schedule with 2 or 4 chunks;
    - ZeRO 0, 1 and, without a pipeline, 3, over all data parallel ranks;
    - every kind of recomputation that makes a difference with this engine;
    - sequence parallelism wherever there is tensor parallelism, except on a measured `Machine`,
      which has none.

    `predict` takes more plans, with other schedules, for example. Plans are first sorted with the
    bubble of equal stages; then the schedules of the best are simulated.

    Args:
        model: The model.
        cluster: The cluster; plans use all of its GPUs.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        best: How many plans to return, at most.
        margin: The fraction of the capacity that a plan has to leave free, because memory is
            forecast and not known.
        precision: As for `Plan`.

    Raises:
        TypeError: If a number is not a whole number, or an argument is of another class.
        ValueError: If `best` is less than 1, or `margin` not from 0 to below 1.
        PlanError: If no plan divides the GPUs, the model and the batch, or none is possible for
            another reason: the message gives the reason for the last plan.
    """
    check_classes(model=model, cluster=cluster)
    sequence_length = whole("sequence_length", sequence_length, "a number of tokens")
    global_batch = whole("global_batch", global_batch, "a number of sequences")
    best = whole("best", best)
    check_real("margin", margin)
    if best < 1:
        raise ValueError(f"best = {best}: return at least 1 plan")
    if not 0 <= margin < 1:
        raise ValueError(f"margin = {margin!r} has to be at least 0 and below 1, such as {MARGIN}")
    tried, fit, nearest = 0, [], None
    refusal = None
    for plan in plans(model, cluster, sequence_length, precision):
        try:
            plan.check(model, cluster, sequence_length, global_batch)
        except PlanError as error:
            refusal = error
            continue
        tried += 1
        count = plan.microbatches(global_batch)
        held = max(
            memory.wanted for memory in stage_memory(model, cluster, plan, sequence_length, count)
        )
        if nearest is None or held < nearest[0]:
            nearest = held, plan
        if held > cluster.capacity * (1 - margin):
            continue
        quick = forecast(model, cluster, plan, sequence_length, global_batch, exact=False)
        fit.append((quick.step_seconds, len(fit), plan))
    if not tried:
        raise PlanError(
            f"no plan is possible for this model, cluster and batch; the last one tried: {refusal}"
        )
    fit.sort()
    exact = [
        (plan, forecast(model, cluster, plan, sequence_length, global_batch))
        for _, _, plan in fit[: max(best, SIMULATED)]
    ]
    exact.sort(key=lambda found: found[1].step_seconds)
    least = None
    if not exact:
        plan = nearest[1]
        least = plan, forecast(model, cluster, plan, sequence_length, global_batch)
    kept = tuple(exact[:best])
    return Found(
        model, cluster, sequence_length, global_batch, kept, len(fit), tried, least, margin
    )


def plans(
    model: Model, cluster: Cluster, sequence_length: int, precision: str = "bf16"
) -> Iterator[Plan]:
    """Yield plans on all GPUs of a cluster; `Plan.check` may still reject some for a model."""
    gpus = cluster.gpus
    # No program splits a head of keys and values.
    tensor = [
        tp
        for tp in _divisors(gpus)
        if tp <= cluster.gpus_per_node and model.heads % tp == model.kv_heads % tp == 0
    ]
    # Selective recomputation repeats the attention's scores, which flash does in any case.
    repeated = ("none", "full") if cluster.runs.flash and not cluster.runs.selective else RECOMPUTE
    contexts = [1]
    while contexts[-1] * 2 * 4096 <= sequence_length and gpus % (contexts[-1] * 2) == 0:
        contexts.append(contexts[-1] * 2)
    for tp, cp, pp in product(tensor, contexts, _divisors(gpus)):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or pp > model.layers:
            continue
        experts = [(1, None)]
        if model.experts:
            experts = [
                (ep, etp)
                for etp, among in ((None, dp * cp), (1, dp * cp * tp))
                for ep in _divisors(among)
                if model.experts % ep == 0 and (etp is None or min(tp, ep) > 1)
            ]
        for (ep, etp), microbatch, recompute in product(experts, _MICROBATCHES, repeated):
            more = {"microbatch": microbatch, "recompute": recompute, "precision": precision}
            more["sequence_parallel"] = False if isinstance(cluster, Machine) else None
            first = Plan(dp, tp, pp, cp, ep, etp=etp, **more)
            for zero in _ZERO if dp * cp > 1 else (0,):
                if zero == 3 and pp > 1:
                    continue  # it keeps what it gathers: no better than stage 1
                plan = replace(first, zero=zero)
                yield plan
                for chunks in _CHUNKS:
                    if pp > 1 and pp * chunks <= model.layers + 2:  # an end may have no layer
                        yield replace(plan, schedule="interleaved", chunks=chunks)


_MICROBATCHES = (1, 2, 4, 8, 16)
_ZERO = (0, 1, 3)
_CHUNKS = (2, 4)


def _divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
