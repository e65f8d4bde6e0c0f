"""Schedules with a split backward, so that weight gradients fill the bubble.

There are p stages and m micro-batches; F, I and W are the times of one stage for the forward, the
gradient of the input and the gradients of the weights of one micro-batch; B = I + W.
"""

from naranhi.schedules.flush import in_turn
from naranhi.schedules.schedule import Action, Schedule, require_positive


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B whose gradients of the weights fill the bubble.

    Stage s computes the gradients of the weights s micro-batches after the gradients of the inputs.
    So every rank holds the activations of min(p, m) micro-batches, as many as 1F1B's first rank,
    and no rank waits for the W of another. If m >= p, the bubble is (p - 1) max(F + I - W, I). The
    paper has (p - 1)(F + I - W), which assumes W <= F.

    Source: Qi et al., "Zero bubble pipeline parallelism" (2024), section 2.1.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return Schedule(
        split_backwards(stage, microbatches, ahead=stages - stage, late=stage)
        for stage in range(stages)
    )


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H2: ZB-H1 with forwards in place of the first bubble.

    Stage s starts 2(p - s) - 1 forwards ahead and computes the gradients of the weights 2s
    micro-batches late, so every rank holds the activations of min(2p - 1, m) micro-batches.

    If m >= 2p - 1, the bubble is (p - 1) max(F + I - 2W, I - F, 0); if F, I and W are also equal,
    no rank waits once it has begun. The paper has only the first term, which is the one that counts
    if W <= F and 2W <= F + I.

    Ranks begin one after the other and end in the same way. If I is no longer than F and W, a
    single step therefore takes as long as ZB-H1's, from the first action of all ranks to the last.
    The gain is in a sequence of steps, if the ranks need not all synchronize between two of them.

    Source: Qi et al., "Zero bubble pipeline parallelism" (2024), section 2.2.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return Schedule(
        split_backwards(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)
        for stage in range(stages)
    )


def split_backwards(stage: int, microbatches: int, ahead: int, late: int) -> list[Action]:
    """Return a stage's 1F1B with an I for each B, followed by the W of `late` micro-batches before.

    The last `late` Ws come at the end; `ahead` is that of `in_turn`.
    """
    forwards = [Action(stage, "F", k) for k in range(microbatches)]
    backwards = [[Action(stage, "I", k)] for k in range(microbatches)]
    for k in range(late, microbatches):
        backwards[k].append(Action(stage, "W", k - late))
    rest = range(max(0, microbatches - late), microbatches)
    return in_turn(ahead, forwards, backwards) + [Action(stage, "W", k) for k in rest]
