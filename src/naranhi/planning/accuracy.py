"""How far forecasts are from published runs, for each source.

    python -m naranhi.planning.accuracy

Each pair of GPU and engine is calibrated on at most one run, which `calibrations.csv` names and
which is left out here. All other runs are forecast.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import chain
from statistics import mean, mode
from typing import NamedTuple

from naranhi.planning.cluster import nearest_efficiency
from naranhi.planning.forecast import Forecast
from naranhi.planning.plan import PlanError
from naranhi.planning.prediction import predict
from naranhi.planning.published import Run, independent, runs, sweep
from naranhi.planning.tables import rows


class Comparison(NamedTuple):
    """A run beside its forecast.

    Attributes:
        run: The published run.
        forecast: Its forecast; None if the plan was refused.
    """

    run: Run
    forecast: Forecast | None

    @property
    def seconds_error(self) -> float | None:
        """The relative error of the step's seconds; None if they were not published."""
        if not self.run.seconds or not self.forecast:
            return None
        return self.forecast.step_seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory; None if it was not published."""
        if not self.run.memory or not self.forecast:
            return None
        stages = self.forecast.memory[: 1 if self.run.counted == "first" else None]
        held = max(_counted(memory, self.run) for memory in stages)
        return held / self.run.memory - 1

    @property
    def inside(self) -> bool:
        """Whether the published seconds are within the forecast's interval."""
        return self.forecast.low <= self.run.seconds <= self.forecast.high


class Accuracy(NamedTuple):
    """The errors of one source.

    Attributes:
        source: The source.
        what: "step", "memory", or "unseen" for steps without a calibration by this source.
        runs: The number of runs compared.
        mean: The mean of the absolute relative errors.
        bias: The mean of the relative errors; above 0 if forecasts are too high.
        worst: The relative error that is farthest from 0.
        inside: The fraction of runs within their intervals; None except for "step".
    """

    source: str
    what: str
    runs: int
    mean: float
    bias: float
    worst: float
    inside: float | None


def compare(run: Run) -> Comparison:
    """Return a run beside its forecast."""
    try:
        forecast = predict(run.model, run.cluster, run.plan, run.sequence_length, run.global_batch)
    except PlanError:
        forecast = None
    return Comparison(run, forecast)


@lru_cache(maxsize=1)
def comparisons() -> tuple[Comparison, ...]:
    """Return the runs of `runs()` beside their forecasts, except those that calibrate."""
    return tuple(compare(run) for run in runs() if not _calibrates(run))


@lru_cache(maxsize=1)
def independent_comparisons() -> tuple[Comparison, ...]:
    """Return, beside their forecasts, the runs to which nothing was fitted.

    That is all runs of `independent()` except those that calibrate.
    """
    return tuple(compare(run) for run in independent() if not _calibrates(run))


@lru_cache(maxsize=1)
def sweep_comparisons() -> tuple[Comparison, ...]:
    """Return the runs of the sweep beside their forecasts, including those that failed."""
    return tuple(map(compare, sweep()))


def by_source(compared: tuple[Comparison, ...]) -> list[Accuracy]:
    """Return the errors for each source, of seconds and of memory, in the order of the tables."""
    result = []
    for source in dict.fromkeys(c.run.source for c in compared):
        own = [c for c in compared if c.run.source == source]
        times = [(c.seconds_error, c.inside) for c in own if c.seconds_error is not None]
        if times:
            errors = [error for error, _ in times]
            inside = mean(inside for _, inside in times)
            result.append(_accuracy(source, "step", errors, inside))
        memory = [c.memory_error for c in own if c.memory_error is not None]
        if memory:
            result.append(_accuracy(source, "memory", memory, None))
    return result


def held_out() -> list[Accuracy]:
    """Return the errors of seconds for each source, forecast without its own calibrations.

    Efficiencies are those of the nearest GPU and engine that another source calibrates. All runs of
    the source are forecast, including those that otherwise calibrate.
    """
    result = []
    for source in dict.fromkeys(run.source for run in runs() if run.seconds):
        table = {
            (row["gpu"], row["engine"]): float(row["efficiency"])
            for row in rows("calibrations.csv")
            if row["source"] != source
        }
        errors = []
        for run in runs():
            if run.source == source and run.seconds:
                efficiency = nearest_efficiency(run.cluster.gpu, run.cluster.engine, table)
                cluster = replace(run.cluster, efficiency=efficiency)
                errors.append(compare(run._replace(cluster=cluster)).seconds_error)
        result.append(_accuracy(source, "unseen", errors, None))
    return result


class Choice(NamedTuple):
    """The choice of the forecasts among the configurations of one model on similar clusters.

    Attributes:
        model: The number of layers, which distinguishes the two models of the sweep.
        gpus: The number of GPUs.
        picked: The run that is forecast to be fastest, of those that fit with a margin.
        best: The run that was fastest.
    """

    model: int
    gpus: int
    picked: Run
    best: Run

    @property
    def regret(self) -> float:
        """The picked run's extra time over the best run's, relative; infinity if it failed."""
        if self.picked.failed:
            return float("inf")
        return self.picked.seconds / self.best.seconds - 1


def choices(margin: float = 0.05) -> list[Choice]:
    """Return what the forecasts choose for each model, number of GPUs and network of the sweep.

    Networks below twice the bandwidth of the slowest count as one. Pipeline runs with a defect that
    has since been fixed are left out: nobody would choose them, and forecasts ignore the defect.

    Args:
        margin: The fraction of the capacity that a picked plan leaves free, as in `search`.
    """
    batch = mode(c.run.global_batch for c in sweep_comparisons())  # a few runs had a different one
    groups = {}
    for c in sorted(sweep_comparisons(), key=lambda c: c.run.cluster.network):
        if c.run.global_batch != batch or c.run.crashed:  # a crash leaves no time to compare
            continue
        if c.run.flawed:
            continue
        size, network = (c.run.model.layers, c.run.cluster.gpus), c.run.cluster.network
        like = (key for key in groups if key[:2] == size and network < 2 * key[2])
        groups.setdefault(next(like, (*size, network)), []).append(c)
    result = []
    for (layers, gpus, _), group in sorted(groups.items()):
        fit = [c for c in group if c.forecast and c.forecast.fits_with(margin)]
        picked = min(fit, key=lambda c: c.forecast.step_seconds).run
        best = min((c.run for c in group if not c.run.failed), key=lambda run: run.seconds)
        result.append(Choice(layers, gpus, picked, best))
    return result


def held(compared: tuple[Comparison, ...]) -> float:
    """Return, of the runs that ran, the fraction that is forecast to fit."""
    ran = [c for c in compared if c.run.seconds]
    return mean(c.forecast is not None and c.forecast.fits for c in ran)


def fits_right(compared: tuple[Comparison, ...]) -> float:
    """Return the fraction of runs for which the forecast is right about whether they fit.

    Only runs that ran or ran out of memory count: whether any other run fits is not known.
    """
    known = [c for c in compared if not c.run.crashed]
    return mean((c.forecast is not None and c.forecast.fits) != c.run.failed for c in known)


def refused(compared: tuple[Comparison, ...]) -> float:
    """Return, of the runs that failed with another error, the fraction whose plan is refused."""
    return mean(c.forecast is None for c in compared if c.run.crashed)


def calibrate(run: Run) -> float:
    """Return the matmul efficiency with which the forecast of a run takes as long as the run.

    Raises:
        ValueError: If the run's seconds are unknown, or too few even for an efficiency of 1.
    """

    def seconds(efficiency):
        cluster = replace(run.cluster, efficiency=efficiency)
        plan = run.model, cluster, run.plan, run.sequence_length, run.global_batch
        return predict(*plan).step_seconds

    low, high = 0.05, 1.0
    if not run.seconds or seconds(high) > run.seconds:
        raise ValueError(f"{run.source}, {run.name}: no efficiency explains {run.seconds} s")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > run.seconds else (low, middle)
    return high


def table() -> str:
    """Return the errors for each source as a table of text."""
    lines = [
        f"{'source':40} {'what':7} {'runs':>5} {'mean':>7} {'bias':>7} {'worst':>7} {'inside':>7}"
    ]
    sets = comparisons(), sweep_comparisons(), independent_comparisons()
    for row in chain(chain.from_iterable(map(by_source, sets)), held_out()):
        inside = "" if row.inside is None else f"{row.inside:.0%}"
        lines.append(
            f"{row.source:40} {row.what:7} {row.runs:5d} {row.mean:7.1%} {row.bias:+7.1%} "
            f"{row.worst:+7.1%} {inside:>7}"
        )
    lines.append(f"\nruns that ran, forecast to fit: {held(comparisons()):.1%}")
    lines.append(f"sweep: fits or fails, rightly: {fits_right(sweep_comparisons()):.1%}")
    lines.append(f"sweep: ended otherwise, refused: {refused(sweep_comparisons()):.1%}")
    lines.append("sweep: regret of the configuration that the forecasts pick")
    for choice in choices():
        lines.append(
            f"  {choice.gpus:4d} GPUs, {choice.picked.cluster.network:3.0f} Gbit/s: "
            f"{choice.picked.name:45} "
            + ("failed" if choice.picked.failed else f"{choice.regret:+.1%}")
        )
    return "\n".join(lines)


def _calibrates(run):
    return (run.source, run.name) in _calibrating()


@lru_cache(maxsize=1)
def _calibrating():
    return {(row["source"], row["run"]) for row in rows("calibrations.csv")}


def _counted(memory, run):
    memory = memory._replace(activations=run.activations * memory.activations)
    if run.counted == "kept":
        return memory.total - memory.working
    return memory.total if run.counted == "in use" else memory.reserved


def _accuracy(source, what, errors, inside):
    absolute = mean(map(abs, errors))
    return Accuracy(source, what, len(errors), absolute, mean(errors), max(errors, key=abs), inside)


if __name__ == "__main__":
    print(table())
