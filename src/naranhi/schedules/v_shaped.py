"""V-shaped schedules: two chunks on each rank, down the ranks and back up.

Rank r has virtual stages r and 2p - 1 - r. So rank 0 has both ends of the model: the loss is there,
and the backward starts where the forward began. At the turn, stages p - 1 and p are on one rank,
and nothing is sent.

There are p ranks and m micro-batches; F, I and W are the times of one *chunk* for the forward, the
gradient of the input and the gradients of the weights of one micro-batch; B = I + W. Both orders
are torch's, action by action (`torch.distributed.pipelining`, `ScheduleZBVZeroBubble` and
`ScheduleDualPipeV`).
"""

from collections import Counter

from naranhi.schedules.schedule import Action, Overlap, Schedule, require_positive


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """Return ZB-V: no bubble in the memory of 1F1B, if F = I = W, for twice the messages.

    If m >= 2p - 1, every rank holds 2p chunks, which are p micro-batches, and if also F = I >= W,
    the bubble is 2(p - 1)(F - W). There are 4m(p - 1) messages. With fewer micro-batches, the rest
    of the 2p - 1 are left out.

    Source: Qi et al., "Zero bubble pipeline parallelism" (2024), section 6.
    """
    require_positive(stages=stages, microbatches=microbatches)
    m = max(microbatches, 2 * stages - 1)

    def names(rank):
        after = stages - rank  # this rank and those after it
        return [
            *["F0"] * (2 * after - 1),
            *["F1", "F0"] * rank,
            *["F1", "I1", "W1"] * after,
            *["F0", "I0", "W0", "F1", "I1", "W1"] * (m - stages - after + 1),
            *["I0", "W0", "F1", "I1", "W1"] * (after - 1),
            *["I0", "I1"] * rank,
            *["I0", "W0"] * after,
            *["W1"] * rank,
            *["W0"] * rank,
        ]

    rows = (numbered(names(rank), rank, 2 * stages - 1 - rank) for rank in range(stages))
    return Schedule([a for a in row if a.microbatch < microbatches] for row in rows)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """Return DualPipeV: each forward beside a backward of another micro-batch (`Overlap`).

    F&B is the time of such a pair. If I <= F, the last rank waits (p - 1)(F&B + F - W - min(I, W)),
    and no rank waits longer. With F = I >= W that is the published (p - 1)(F&B + B - 3W). A rank
    holds 2p + 1 chunks, which are p + 1/2 micro-batches. There are 4m(p - 1) messages.

    Args:
        stages: The number of ranks, p.
        microbatches: The number of micro-batches, m.

    Raises:
        ValueError: If there are fewer than 2p micro-batches.

    Source:
        DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.2.1, for the pairs; Qi et al.,
        "DualPipe could be better without the Dual" (2025), for the V; and the table of
        github.com/deepseek-ai/DualPipe, which counts virtual stages, PP = 2p.
    """
    require_positive(stages=stages, microbatches=microbatches)
    if microbatches < 2 * stages:
        raise ValueError(
            f"DualPipeV takes at least two micro-batches for each rank: {2 * stages} for {stages} "
            f"ranks, not {microbatches}"
        )

    def names(rank):
        rest = stages - 1 - rank  # ranks after this one
        pairs = ["F0 B1", "F1 B0"] * (microbatches - 2 * stages + rank + 1)
        if not rest:  # on the last rank the first pair would only delay the first backward
            pairs[:1] = ["F0", "B1"]
        last = ["1", "0"] * (rank + 1)  # the chunks of the last backwards: half are in two parts
        late = last[rank + 1 :] + ["0"] * rest
        return [
            *["F0"] * (2 * rest),
            *["F0", "F1"] * (rank + 1),
            *["I1", "W1", "F1"] * rest,
            *pairs,
            *["B1", "F1 B0"] * rest,
            *(f"B{chunk}" for chunk in last[: rank + 1]),
            *(f"I{chunk}" for chunk in last[rank + 1 :]),
            *(name for chunk in late[:rest] for name in (f"W{chunk}", "I0")),
            *(f"W{chunk}" for chunk in late[rest:]),
        ]

    return Schedule(numbered(names(rank), rank, 2 * stages - 1 - rank) for rank in range(stages))


def numbered(names: list[str], *stages: int) -> list[Action | Overlap]:
    """Return the actions of names such as "F0", a kind and a chunk, or of pairs such as "F0 B1".

    The n-th F, I or W of a chunk is that of micro-batch n; a B counts as an I and a W.

    Args:
        names: The names, in order.
        stages: The virtual stage of each chunk.
    """
    count, row = Counter(), []
    for name in names:
        actions = []
        for kind, chunk in name.split():
            parts = [f"{part}{chunk}" for part in ("IW" if kind == "B" else kind)]
            actions.append(Action(stages[int(chunk)], kind, count[parts[0]]))
            count.update(parts)
        row.append(Overlap(*actions) if len(actions) == 2 else actions[0])
    return row
