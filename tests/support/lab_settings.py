"""Settings of the schedule lab, drawn at random, and what the package makes of them."""

import random
from collections.abc import Iterator

from naranhi import schedules
from naranhi.schedules.names import OURS

TIMES = ("forward", "backward", "input_grad", "weight_grad", "latency")


def drawn_settings(number: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield settings as the texts of the lab's fields."""
    draw = random.Random(seed)
    for place in range(number):
        p = draw.randint(1, 6)
        times = {
            field: str(draw.choice([1, 2, 3, 0.1, round(draw.uniform(0.1, 4), 3)]))
            for field in TIMES[:-1]
        }
        yield {
            "schedule": list(OURS)[place % len(OURS)],
            "stages": str(p),
            "microbatches": str(draw.randint(2, 4) * p),
            "chunks": str(draw.randint(1, 3)),
            "updates": "2",
            **times,
            "latency": str(draw.choice([0, 0, 0.3, 1])),
            "bandwidth": draw.choice(["", "", "0.5", "2"]),
        }


def simulated(values: dict[str, str]) -> tuple[schedules.Schedule, schedules.Timeline]:
    """Return the schedule and the timeline that the package makes of such settings."""
    name = values["schedule"]
    more = {"interleaved": ["chunks"], "pipedream_2bw": ["updates"]}.get(name, [])
    sizes = [int(values[size]) for size in ("stages", "microbatches", *more)]
    schedule = schedules.get(name)(*sizes)
    times = {field: float(values[field]) for field in TIMES}
    bandwidth = float(values["bandwidth"]) if values["bandwidth"] else None
    return schedule, schedules.simulate(schedule, **times, bandwidth=bandwidth)
