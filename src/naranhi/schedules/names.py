"""Schedules by name, as command lines spell them."""

from collections.abc import Callable

from naranhi.schedules.asynchronous import pipedream, pipedream_2bw
from naranhi.schedules.flush import gpipe, inter_layer, interleaved, one_f_one_b
from naranhi.schedules.schedule import Schedule
from naranhi.schedules.v_shaped import dualpipe_v, zero_bubble_v
from naranhi.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

OURS = {
    make.__name__: make
    for make in (
        inter_layer,
        gpipe,
        one_f_one_b,
        interleaved,
        zero_bubble_h1,
        zero_bubble_h2,
        zero_bubble_v,
        dualpipe_v,
        pipedream,
        pipedream_2bw,
    )
}
# Some of the names that `torch.distributed.pipelining.schedules.get_schedule_class` knows.
TORCH = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved1f1b": interleaved,
    "zbvzerobubble": zero_bubble_v,
    "dualpipev": dualpipe_v,
}


def get(name: str) -> Callable[..., Schedule]:
    """Return the function that makes a schedule, by its name here or in torch, ignoring case.

    For example, `get("1F1B")` is `one_f_one_b`.

    Raises:
        ValueError: If the name is unknown.
    """
    make = OURS.get(name.lower()) or TORCH.get(name.lower())
    if make is None:
        raise ValueError(f"schedule {name!r} does not exist; choose one of {', '.join(OURS)}")
    return make
