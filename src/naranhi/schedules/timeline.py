"""When each action of a step ran, and what follows from it: cost, bubble rate, peak activations.

A `Timeline` is computed (`schedules.simulate`) or measured (`measure.Recorder`); both are read
alike.
"""

from dataclasses import dataclass
from typing import NamedTuple

from naranhi.schedules.schedule import Action


class Span(NamedTuple):
    """From when to when an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """What each rank did and when, simulated or measured: ``timeline[rank]`` is a tuple of spans.

    A rank's spans are in the order of doing and do not overlap; what lies between them is waiting.
    Times are in one unit (seconds, when measured) on one clock, whose zero means nothing.
    ValueError for a rank without spans, and for spans that overlap or end before they start.
    """

    rows: tuple[tuple[Span, ...], ...]

    def __post_init__(self):
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))
        for rank, spans in enumerate(self.rows):
            if not spans:
                raise ValueError(f"rank {rank} did nothing")
            free = spans[0].start
            for action, start, end in spans:
                if not free <= start <= end:
                    raise ValueError(
                        f"rank {rank}: {action} from {start} to {end}, but it was busy until {free}"
                    )
                free = end

    def __getitem__(self, rank):
        return self.rows[rank]

    def __len__(self):
        return len(self.rows)

    def __repr__(self):
        numbers = f"cost={float(self.cost):g}, bubble_rate={float(self.bubble_rate):.3g}"
        return f"<Timeline of {len(self)} ranks: {numbers}>"

    @property
    def busy(self):
        """By rank, the time spent on actions."""
        return tuple(sum(end - start for _, start, end in spans) for spans in self.rows)

    @property
    def cost(self):
        """The largest, over the ranks, of the time from a rank's first action to its last."""
        return max(spans[-1].end - spans[0].start for spans in self.rows)

    @property
    def bubble_rate(self):
        """The share of ranks x cost that is not work: 1 - sum(work) / (ranks x cost).

        0 when no time passes at all.
        """
        if not self.cost:
            return 0.0
        return 1 - sum(self.busy) / (len(self.rows) * self.cost)

    @property
    def peak_activations(self):
        """By rank, the largest number of micro-batches whose activations it held at once.

        They are held from the start of an F to the end of its B, or of its W when the backward is
        in two parts. One of a rank's n virtual stages counts 1/n.
        """
        return tuple(_peak([action for action, _, _ in spans]) for spans in self.rows)


def _peak(actions):
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak / len({action.stage for action in actions})
