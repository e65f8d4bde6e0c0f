"""Schedules with a flush: the weights change when all micro-batches are done.

Each function is a few lines that read like the schedule's diagram. There are p stages and m
micro-batches; F and B are the times of one stage for the forward and the backward of one
micro-batch.
"""

from naranhi.schedules.schedule import Action, Schedule, require_positive


def inter_layer(stages: int, microbatches: int) -> Schedule:
    """Return inter-layer model parallelism: one micro-batch at a time.

    Each micro-batch goes through all stages and back before the next one starts. One rank works at
    a time, so p stages use 1/p of the machine; a rank holds the activations of one micro-batch.

    Source: Huang et al., "GPipe" (2019), figure 2b.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for k in range(microbatches) for kind in "FB"]
        for stage in range(stages)
    )


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c).

    With stages of equal speed the bubble rate is (p - 1) / (m + p - 1) for p stages and m
    micro-batches, and every rank comes to hold the activations of all m. The backwards run in the
    order of the forwards; in the paper's figure the last micro-batch comes first. The bubble and
    the memory are the same, and gradients are summed as in a plain loop.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for kind in "FB" for k in range(microbatches)]
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with a flush, or PipeDream-Flush (Narayanan et al. 2021, section 3.2).

    A stage runs forwards until its first gradient can arrive, then alternates one backward and one
    forward. The bubble is GPipe's, (p - 1)(F + B) of a rank's time, but a stage holds the
    activations of min(p - stage, m) micro-batches instead of m.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return Schedule(
        in_turn(
            stages - stage,
            [Action(stage, "F", k) for k in range(microbatches)],
            [[Action(stage, "B", k)] for k in range(microbatches)],
        )
        for stage in range(stages)
    )


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B: each rank has several chunks of the model.

    Virtual stage s is on rank s mod p, so the v chunks of a rank are not neighbours. A rank takes p
    micro-batches through its first chunk, the same p through its second, and so on to the last,
    then the next p. Backwards run in the same way, from the last chunk to the first. The bubble is
    (p - 1)(F + B) / v, where F and B are a rank's times for all its chunks. With p > 1 there are
    2m(pv - 1) messages. Rank r holds the activations of up to p + (p - 1 - 2r) / v micro-batches.

    A rank runs (v - 1)p + 2(p - 1 - rank) warm-up forwards before it alternates a forward and a
    backward, as Megatron-LM does. With p - 1 - rank fewer it would hold fewer activations and, if
    messages took no time, wait no longer. With one chunk, too, every rank but the last holds more
    activations than in `one_f_one_b`.

    Args:
        stages: The number of ranks, p.
        microbatches: The number of micro-batches, m.
        chunks: The number of chunks on each rank, v.

    Raises:
        ValueError: If `microbatches` is not a multiple of `stages`, as Megatron-LM requires.

    Source: Narayanan et al., "Megatron-LM" (2021).
    """
    require_positive(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise ValueError(
            f"interleaving takes the micro-batches in rounds of one per rank: {microbatches} is no "
            f"multiple of {stages}"
        )

    def nth(rank, n, kind):
        """Return a rank's n-th forward or backward."""
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


def in_turn(ahead: int, forwards: list[Action], backwards: list[list[Action]]) -> list[Action]:
    """Return `ahead` forwards, then in turn a backward (a list of actions) and the next forward."""
    row = forwards[:ahead]
    for place, backward in enumerate(backwards, ahead):
        row += backward + forwards[place : place + 1]
    return row
