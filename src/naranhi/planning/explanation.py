"""Say in words why a plan takes as long as it does, and what the next best would cost."""

from naranhi.planning.cluster import GIB
from naranhi.planning.forecast import MEMORY, PARTS, Forecast
from naranhi.planning.plan import Plan
from naranhi.planning.plan_search import Found


def explain(found: Found, place: int = 0) -> str:
    """Return an explanation of one plan, by default the fastest, and how the next best differs.

    Args:
        found: What `search` returned.
        place: The index of the plan in `found`, the fastest first.

    Raises:
        IndexError: If there are plans, but not that many.
    """
    if not found.plans:
        plan, forecast = found.nearest
        free = f" and leaves {found.margin:.0%} free" if found.margin else ""
        return (
            f"None of {found.tried} plans fits{free}. The one that needs least memory is "
            f"{describe(plan)}, which {forecast.verdict}."
        )
    plan, forecast = found[place]
    lines = [
        f"{describe(plan)}, {f'number {place + 1}' if place else 'the fastest'} of the "
        f"{found.fitting} plans that fit; {found.tried} were tried",
        "",
        *_step(found, forecast),
        "",
        *_memory(forecast),
    ]
    if place + 1 < len(found):
        lines += ["", *_next(found, place)]
    lines += ["", *_reasons(found, plan)]
    return "\n".join(lines)


def describe(plan: Plan) -> str:
    """Return a plan in one line, without its defaults."""
    degrees = [f"{name} {getattr(plan, name)}" for name in ("dp", "tp", "pp", "cp", "ep")]
    words = [degree for degree in degrees if not degree.endswith(" 1")] or ["one GPU"]
    if plan.etp is not None:
        words.append(f"etp {plan.etp}")
    words.append(f"micro-batch {plan.microbatch}")
    if plan.pp > 1:
        chunks = f" with {plan.chunks} chunks" if plan.chunks > 1 else ""
        words.append(("1F1B" if plan.schedule == "one_f_one_b" else plan.schedule) + chunks)
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}")
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recomputation")
    if plan.precision != "bf16":
        words.append(plan.precision)
    return ", ".join(words)


def _step(found, forecast: Forecast):
    step = forecast.step_seconds
    yield (
        f"A step takes {step:.3g} s, from {forecast.low:.3g} to {forecast.high:.3g} s nine times "
        f"in ten: {forecast.tokens_per_second_per_gpu:,.0f} tokens per second per GPU, "
        f"{forecast.tflops_per_gpu:.0f} TFLOPS, MFU {forecast.mfu:.1%}."
    )
    for name, seconds in sorted(forecast.parts.items(), key=lambda part: -part[1]):
        yield f"  {seconds / step:6.1%}  {seconds:8.3g} s  {name}: {PARTS[name]}"
    if not found.cluster.calibrated:
        yield (
            f"No published run of {found.cluster.engine} on {found.cluster.gpu} calibrates this: "
            f"a large matmul is taken to reach {found.cluster.matmul_efficiency:.0%} of the peak."
        )


def _memory(forecast: Forecast):
    stage = max(range(len(forecast.memory)), key=lambda s: forecast.memory[s].needed)
    yield f"It {forecast.verdict}."
    for name, held in forecast.memory[stage]._asdict().items():
        if held:
            yield f"  {held / GIB:6.1f} GiB  {MEMORY[name]}"


def _next(found, place):
    forecast = found[place][1]
    other, later = found[place + 1]
    more = later.step_seconds - forecast.step_seconds
    yield (
        f"The next best, {describe(other)}, would take {more / forecast.step_seconds:.1%} "
        f"longer ({later.step_seconds:.3g} s)"
        + (
            ": the forecasts' intervals overlap, so measure both."
            if later.low < forecast.high
            else "."
        )
    )
    changes = {
        name: later.parts.get(name, 0.0) - forecast.parts.get(name, 0.0)
        for name in later.parts | forecast.parts
    }
    for name, change in sorted(changes.items(), key=lambda part: -abs(part[1]))[:3]:
        if abs(change) > 0.001 * forecast.step_seconds:
            yield f"  {change / forecast.step_seconds:+6.1%}  {name}: {PARTS[name]}"


def _reasons(found, plan: Plan):
    """Yield what each degree is for."""
    count = plan.microbatches(found.global_batch)
    if plan.tp > 1:
        yield (
            f"tp {plan.tp}: each layer's weights and activations are on {plan.tp} neighbouring "
            "GPUs; it pays with messages in every layer."
        )
    if plan.pp > 1:
        yield (
            f"pp {plan.pp}: each GPU has {found.model.layers / plan.pp:.3g} layers; with "
            f"{count} micro-batches the bubble of equal stages is "
            f"{(plan.pp - 1) / plan.chunks / (count + (plan.pp - 1) / plan.chunks):.1%}."
        )
    if plan.cp > 1:
        yield f"cp {plan.cp}: each GPU has {found.sequence_length // plan.cp} tokens of a sequence."
    if plan.ep > 1:
        held = found.model.experts // plan.ep
        yield f"ep {plan.ep}: each GPU has {held} of {found.model.experts} experts."
    if plan.etp is not None:
        cut = "whole" if plan.etp == 1 else f"cut over {plan.etp} GPUs"
        yield (
            f"etp {plan.etp}: each expert is {cut}, and other GPUs of a tensor parallel group have "
            "other experts."
        )
    if plan.replicas > 1:
        sharded = {
            0: "all of their model state whole on each of them",
            1: "the optimizer state sharded over them",
            2: "gradients and optimizer state sharded over them",
            3: "parameters, gradients and optimizer state sharded over them",
        }[plan.zero]
        yield f"dp x cp {plan.replicas}: {plan.replicas} GPUs hold the same layers, with {sharded}."
    if plan.recompute != "none":
        yield (
            f"{plan.recompute} recomputation: a backward computes again what its forward does not "
            "keep, which saves memory."
        )
