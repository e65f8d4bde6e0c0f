"""Schedules with a flush: the weights change when all micro-batches are done.

Each is a few lines that read like its diagram. There are p stages and m micro-batches; F and B are
the times of one stage for the forward and the backward of one micro-batch.
"""

from naranhi.schedules.schedule import Action, Schedule, _positive


def inter_layer(stages, microbatches):
    """Inter-layer model parallelism (Huang et al. 2019, figure 2b): a micro-batch at a time.

    Each goes through all stages and back before the next one starts. One rank works at a time, so
    with p stages 1/p of the machine is used; a rank holds the activations of one micro-batch.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for k in range(microbatches) for kind in "FB"]
        for stage in range(stages)
    )


def gpipe(stages, microbatches):
    """GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c).

    With stages of equal speed the bubble is (p - 1) / (m + p - 1) for p stages and m
    micro-batches, and every rank comes to hold the activations of all m. The backwards take the
    micro-batches in the order of the forwards, where the paper's figure takes the last one first:
    bubble and memory are the same, and gradients are summed as in a plain loop.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for kind in "FB" for k in range(microbatches)]
        for stage in range(stages)
    )


def one_f_one_b(stages, microbatches):
    """1F1B with a flush, or PipeDream-Flush (Narayanan et al. 2021, section 3.2).

    A stage runs forwards until its first gradient can come, then one backward and one forward in
    turn. The bubble is GPipe's, (p - 1)(F + B) of a rank's time; the activations held are those of
    min(p - stage, m) micro-batches instead of m.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        in_turn(
            stages - stage,
            [Action(stage, "F", k) for k in range(microbatches)],
            [[Action(stage, "B", k)] for k in range(microbatches)],
        )
        for stage in range(stages)
    )


def interleaved(stages, microbatches, chunks):
    """1F1B on ranks with several chunks of the model each (Narayanan et al. 2021, "Megatron-LM").

    Virtual stage s is on rank s mod p: a rank's v = `chunks` chunks are not neighbours. It takes p
    micro-batches through its first chunk, the same p through its second, and so on to the last,
    then the next p; backwards likewise, from the last chunk to the first. The bubble is
    (p - 1)(F + B) / v, F and B being a rank's times for all its chunks; the messages are
    2m(pv - 1); and rank r holds the activations of up to p + (p - 1 - 2r) / v micro-batches.

    A rank starts (v - 1)p + 2(p - 1 - rank) forwards ahead, as Megatron-LM does: p - 1 - rank fewer
    would hold less and wait no longer, if only messages took no time. With one chunk that is
    likewise more than `one_f_one_b` holds.

    Raises ValueError unless `microbatches` is a multiple of `stages`, as Megatron-LM requires.
    """
    _positive(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise ValueError(
            f"interleaving takes the micro-batches in rounds of one per rank: {microbatches} is no "
            f"multiple of {stages}"
        )

    def nth(rank, n, kind):
        """A rank's n-th forward or backward."""
        turn, k = divmod(n, stages)  # a turn: `stages` micro-batches through one chunk
        group, chunk = divmod(turn, chunks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(chunk * stages + rank, kind, group * stages + k)

    return Schedule(
        in_turn(
            (chunks - 1) * stages + 2 * (stages - 1 - rank) + 1,
            [nth(rank, n, "F") for n in range(microbatches * chunks)],
            [[nth(rank, n, "B")] for n in range(microbatches * chunks)],
        )
        for rank in range(stages)
    )


def in_turn(ahead, forwards, backwards):
    """`ahead` forwards, then in turn a backward (a list of actions) and the next forward."""
    row = forwards[:ahead]
    for place, backward in enumerate(backwards, ahead):
        row += backward + forwards[place : place + 1]
    return row
