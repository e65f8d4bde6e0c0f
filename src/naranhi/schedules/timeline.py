"""When each action of a step ran, and what follows from it: cost, bubble rate, peak activations.

A `Timeline` is simulated (`schedules.simulate`) or measured (`measure.Recorder`), and is used in
the same way in both cases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import NamedTuple

from naranhi.schedules.schedule import SHARDING, Action


class Span(NamedTuple):
    """The start and the end of an action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False, init=False)
class Timeline:
    """What each rank did and when, simulated or measured: `timeline[rank]` is a tuple of spans.

    A rank's spans are in the order of execution, and the rank waits between them. Two spans overlap
    only if they are the forward and the backward of a pair, which start together, or if one of them
    is a transfer (`SHARDING`), which runs behind the rank's actions and is not work.
    Times are in one unit (seconds, if measured) on one clock, whose zero has no meaning.

    Args:
        rows: One sequence of spans per rank.

    Raises:
        ValueError: If a rank has no spans, or if spans overlap or end before they start.
    """

    rows: tuple[tuple[Span, ...], ...]

    def __init__(self, rows: Iterable[Iterable[Span]]) -> None:
        object.__setattr__(self, "rows", tuple(map(tuple, rows)))
        for rank, spans in enumerate(self.rows):
            if not spans:
                raise ValueError(f"rank {rank} did nothing")
            work, transfers = _work(spans), [span for span in spans if span.action.kind in SHARDING]
            for action, start, end in transfers:
                if end < start:
                    raise ValueError(f"rank {rank}: {action} starts at {start}, but ends at {end}")
            begun = free = min((span.start for span in work), default=0.0)
            paired = True  # a third span cannot start with the two of a pair
            for action, start, end in work:
                pairs = start == begun and start < free and not paired
                if not (free <= start or pairs) or end < start:
                    raise ValueError(
                        f"rank {rank}: {action} from {start} to {end}, but it was busy until {free}"
                    )
                begun, free, paired = start, max(free, end), pairs

    def __getitem__(self, rank: int) -> tuple[Span, ...]:
        return self.rows[rank]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        numbers = f"cost={float(self.cost):g}, bubble_rate={float(self.bubble_rate):.3g}"
        return f"<Timeline of {len(self)} ranks: {numbers}>"

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank spends on work; that of a pair counts once."""
        return tuple(map(_busy, self.rows))

    @property
    def cost(self) -> float:
        """The longest time, over the ranks, from a rank's first action to the end of its last.

        A rank's transfers count among its actions.
        """
        return max(max(span.end for span in spans) - spans[0].start for spans in self.rows)

    @property
    def bubble_rate(self) -> float:
        """The fraction of ranks x cost that is not work: 1 - sum(busy) / (ranks x cost).

        It is 0 if the cost is 0.
        """
        if not self.cost:
            return 0.0
        return 1 - total(self.busy) / (len(self.rows) * self.cost)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """By rank, the largest number of micro-batches whose activations it held at once.

        Activations are held from the start of an F to the end of its B, or of its W if the backward
        is in two parts. One of a rank's n virtual stages counts 1/n.
        """
        return tuple(_peak([action for action, _, _ in spans]) for spans in self.rows)


def _work(spans):
    return [span for span in spans if span.action.kind not in SHARDING]


def _busy(spans):
    spans = _work(spans)
    done = accumulate((end for _, _, end in spans), max, initial=spans[0].start)
    return total(
        max(end - max(start, free), 0) for (_, start, end), free in zip(spans, done, strict=False)
    )


def total(times: Iterable[float]) -> float:
    """Return the sum, rounded alike by every Python: from 3.12 on, `sum` rounds differently."""
    return reduce(add, times, 0)


def _peak(actions):
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak / len({action.stage for action in actions})
