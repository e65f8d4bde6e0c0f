"""Read a timeline from a trace in Chrome's "Trace Event Format": see `measure.write_trace`."""

import json

from naranhi.schedules.schedule import SHARDING, Action, ScheduleError
from naranhi.schedules.timeline import Span, Timeline

LARGEST = 1e18  # microseconds; an int may be too large even to be compared as a float


def read_trace(text: str) -> Timeline:
    """Return the Timeline in the text of a trace, in seconds: threads are ranks, events actions.

    Times are rounded to the nanosecond, and an action that begins less than two of them before
    another ends begins then: two times that were equal may be rounded apart. Events of a type other
    than X (names of threads) are left out.

    Raises:
        ValueError: If the text is not such a trace, or has an event that is not an action.
    """
    try:
        trace = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a trace: it is not JSON ({error})") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError("not a trace: there is no list of traceEvents")
    rows = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            rank, span = _span(event)
            rows.setdefault(rank, []).append(span)
    if not rows:
        raise ValueError("not a trace: no event has a duration (ph X)")
    missing = next((rank for rank in range(len(rows)) if rank not in rows), None)
    if missing is not None:
        raise ValueError(f"the trace has {len(rows)} threads with actions, but no tid {missing}")
    in_order = (sorted(rows[rank], key=lambda span: span[1:]) for rank in range(len(rows)))
    return Timeline(map(_joined, in_order))


def _span(event):
    """Return the rank and the Span of an event."""
    name, rank, start, duration = (event.get(key) for key in ("name", "tid", "ts", "dur"))
    times = [start, duration]
    if not (isinstance(rank, int) and rank >= 0) or not all(
        isinstance(time, (int, float)) and 0 <= time < LARGEST for time in times
    ):
        raise ValueError(
            f"event {name!r} of the trace: tid, ts and dur have to be numbers from 0 to {LARGEST:g}"
        )
    try:
        action = Action.parse(str(name))
    except ScheduleError as error:
        raise ValueError(
            f"the trace has an event that is not an action of a schedule: {error}"
        ) from None
    return rank, Span(action, round(start * 1e3) / 1e9, round((start + duration) * 1e3) / 1e9)


def _joined(spans):
    """Yield a rank's spans, in order, without the overlaps that rounding makes."""
    given = begun = free = None
    for action, start, end in spans:
        if action.kind not in SHARDING:
            if start == given:  # the second of a pair, which starts with the first
                start = begun
            else:
                given = start
                if free is not None and 0 < free - start < 1.5e-9:
                    start = free
                begun = start
            end = max(start, end)
            free = end if free is None else max(free, end)
        yield Span(action, start, end)
