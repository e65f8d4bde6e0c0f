"""Schedules whose backward is split, so that weight gradients fill the bubble.

There are p stages and m micro-batches; F, I and W are the times of one stage for the forward, the
gradient of the input and the gradients of the weights of one micro-batch; B = I + W.
"""

from naranhi.schedules.flush import in_turn
from naranhi.schedules.schedule import Action, Schedule, _positive


def zero_bubble_h1(stages, microbatches):
    """1F1B whose gradients of the weights fill the bubble: ZB-H1 (Qi et al. 2024, section 2.1).

    Stage s does them s micro-batches after the gradients of the inputs. So every rank holds the
    activations of min(p, m) micro-batches, what 1F1B's first holds, and none waits for another's
    W. Where m >= p the bubble is (p - 1) max(F + I - W, I): the paper's (p - 1)(F + I - W), which
    supposes that W <= F.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        split_backwards(stage, microbatches, ahead=stages - stage, late=stage)
        for stage in range(stages)
    )


def zero_bubble_h2(stages, microbatches):
    """ZB-H1 with forwards in place of the first bubble: ZB-H2 (Qi et al. 2024, section 2.2).

    Stage s starts 2(p - s) - 1 forwards ahead and does the gradients of the weights 2s
    micro-batches late: min(2p - 1, m) are held on every rank. Where m >= 2p - 1 no rank waits once
    it has begun, if F, I and W are equal: the bubble is (p - 1) max(F + I - 2W, I - F, 0), of which
    the paper names the first, the one that counts where W <= F and 2W <= F + I.

    Ranks begin one after the other, and so they end: where I is no longer than F and W, a step by
    itself, from the first action of all to the last, takes as long as ZB-H1's. What gains then is a
    row of steps, if ranks need not all meet between two of them.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        split_backwards(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)
        for stage in range(stages)
    )


def split_backwards(stage, microbatches, ahead, late):
    """1F1B with an I for a B, followed by the W of `late` micro-batches before; the rest last."""
    forwards = [Action(stage, "F", k) for k in range(microbatches)]
    backwards = [[Action(stage, "I", k)] for k in range(microbatches)]
    for k in range(late, microbatches):
        backwards[k].append(Action(stage, "W", k - late))
    rest = range(max(0, microbatches - late), microbatches)
    return in_turn(ahead, forwards, backwards) + [Action(stage, "W", k) for k in rest]
