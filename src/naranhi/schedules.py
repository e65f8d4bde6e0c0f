"""Pipeline schedules: each a few lines that read like the diagram of it, and nothing else.

``schedules.check(schedule)`` says whether a schedule, one of these or one of your own, is right;
`naranhi.simulate` says what it costs; `versions_held` and `staleness` say what it does without a
flush; `write_csv` and `read_csv` exchange it with `torch.distributed.pipelining`. What a schedule
is made of stands in `naranhi.actions`, what makes it right in `naranhi.schedule_check`.

With a flush: `inter_layer`, `gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble_h1` and
`zero_bubble_h2`; weights change when all is done. Without one: `pipedream` and `two_buffered`,
whose updates are actions among the others. In what follows there are p stages and m micro-batches,
and F, I and W are the times that one stage takes for a forward, the input's gradient and the
weights' gradient of one micro-batch; B = I + W.
"""

from naranhi.actions import Action, Channel, Message, Schedule, ScheduleError
from naranhi.schedule_check import channels, check, in_order
from naranhi.schedule_csv import read_csv, write_csv
from naranhi.weight_versions import check_versions, staleness, versions_held, versions_read

__all__ = [
    "Action",
    "Channel",
    "Message",
    "Schedule",
    "ScheduleError",
    "channels",
    "check",
    "check_versions",
    "gpipe",
    "in_order",
    "inter_layer",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "read_csv",
    "staleness",
    "two_buffered",
    "versions_held",
    "versions_read",
    "write_csv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]


# --- with a flush --------------------------------------------------------------------------------


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
        _in_turn(
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
        _in_turn(
            (chunks - 1) * stages + 2 * (stages - 1 - rank) + 1,
            [nth(rank, n, "F") for n in range(microbatches * chunks)],
            [[nth(rank, n, "B")] for n in range(microbatches * chunks)],
        )
        for rank in range(stages)
    )


def zero_bubble_h1(stages, microbatches):
    """1F1B whose gradients of the weights fill the bubble: ZB-H1 (Qi et al. 2024, section 2.1).

    Stage s does them s micro-batches after the gradients of the inputs. So every rank holds the
    activations of min(p, m) micro-batches, what 1F1B's first holds, and none waits for another's
    W. Where m >= p the bubble is (p - 1) max(F + I - W, I): the paper's (p - 1)(F + I - W), which
    supposes that W <= F.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        _split_backwards(stage, microbatches, ahead=stages - stage, late=stage)
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
        _split_backwards(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)
        for stage in range(stages)
    )


# --- without a flush -----------------------------------------------------------------------------


def pipedream(stages, microbatches):
    """PipeDream: 1F1B that never flushes (Narayanan et al. 2019, sections 3.2 and 3.3).

    A stage updates its weights after every backward. A forward reads the newest weights, and its
    backward the same ones again (weight stashing), although p - 1 - stage updates have been made
    meanwhile; so stage s holds up to p - s versions. A stage's forward may read another version
    than the next stage's does of the same micro-batch: there is no vertical sync.
    """
    _positive(stages=stages, microbatches=microbatches)

    def row(stage):
        ahead = stages - stage
        forwards = [Action(stage, "F", k, max(0, k - ahead + 1)) for k in range(microbatches)]
        backwards = [
            [Action(stage, "B", k), Action(stage, "U", None, k + 1)] for k in range(microbatches)
        ]
        return _in_turn(ahead, forwards, backwards)

    return Schedule(map(row, range(stages)))


def two_buffered(stages, microbatches, updates):
    """PipeDream-2BW: two versions whatever the depth (Narayanan et al. 2021, section 3.1).

    `updates` batches of `microbatches` each, one update after the last backward of each batch. All
    stages read for batch t the version before the newest: W(t+1) = W(t) - lr grad(W(t-1)), the
    first batch, which has none before, excepted.

    The forwards of batch t start before the backwards of batch t - 1 have ended, and have to find
    update t - 1 made. With enough micro-batches a batch it is; the paper asks for m >= p, and in
    this order m >= p - 1 does. With fewer, batch t reads version t - d with d = ceil((p - 1) / m),
    and d + 1 versions are held: `versions_held` shows it.
    """
    _positive(stages=stages, microbatches=microbatches, updates=updates)
    delay = max(1, -(-(stages - 1) // microbatches))

    def row(stage):
        forwards, backwards = [], []
        for k in range(microbatches * updates):
            batch, place = divmod(k, microbatches)
            forwards.append(Action(stage, "F", k, max(0, batch - delay)))
            backwards.append([Action(stage, "B", k)])
            if place == microbatches - 1:
                backwards[-1].append(Action(stage, "U", None, batch + 1))
        return _in_turn(stages - stage, forwards, backwards)

    return Schedule(map(row, range(stages)))


# --- what they share -----------------------------------------------------------------------------


def _in_turn(ahead, forwards, backwards):
    """`ahead` forwards, then in turn a backward (a list of actions) and the next forward."""
    row = forwards[:ahead]
    for place, backward in enumerate(backwards, ahead):
        row += backward + forwards[place : place + 1]
    return row


def _split_backwards(stage, microbatches, ahead, late):
    """1F1B with an I for a B, followed by the W of `late` micro-batches before; the rest last."""
    forwards = [Action(stage, "F", k) for k in range(microbatches)]
    backwards = [[Action(stage, "I", k)] for k in range(microbatches)]
    for k in range(late, microbatches):
        backwards[k].append(Action(stage, "W", k - late))
    rest = range(max(0, microbatches - late), microbatches)
    return _in_turn(ahead, forwards, backwards) + [Action(stage, "W", k) for k in rest]


def _positive(**numbers):
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
