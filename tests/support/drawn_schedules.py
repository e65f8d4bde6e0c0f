"""Schedules drawn at random by hypothesis: the package's and the tests' own."""

import own_schedules
from hypothesis import strategies as st

from naranhi import schedules

stages = st.integers(1, 5)
microbatches = st.integers(1, 6)


@st.composite
def right_schedules(draw, updates=True):
    p, m = draw(stages), draw(microbatches)
    choices = [
        lambda: schedules.gpipe(p, m),
        lambda: schedules.inter_layer(p, m),
        lambda: schedules.one_f_one_b(p, m),
        lambda: schedules.interleaved(p, p * draw(st.integers(1, 2)), draw(st.integers(1, 3))),
        lambda: schedules.zero_bubble_h1(p, m),
        lambda: schedules.zero_bubble_h2(p, m),
        lambda: schedules.zero_bubble_v(p, m),
        lambda: schedules.dualpipe_v(p, 2 * p + m - 1),
        lambda: own_schedules.late_weights(p, m),
        lambda: own_schedules.looped(p, m, draw(st.integers(1, 3))),
        lambda: own_schedules.there_and_back(p, m),
    ]
    if updates:
        choices.append(lambda: schedules.pipedream(p, m))
        choices.append(lambda: schedules.pipedream_2bw(p, m, 3))
    return draw(st.sampled_from(choices))()
