"""Paced links: the same messages as ever, as late as such a link would bring them."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks

from naranhi import collectives, costs
from naranhi.distributed import links

RANKS = 5
ALPHA, BETA = 0.01, 1 / 20e6  # 10 ms and 20 MB/s: far slower than anything a machine does here
FLOATS = 10_000  # of each block: 2 ms of that bandwidth


def all_reduce(algorithm):
    tensor = torch.full((RANKS * FLOATS,), 10.0 ** dist.get_rank())
    collectives.all_reduce(tensor, algorithm=algorithm)
    return [tensor]


def tree():
    tensor = torch.full((RANKS * FLOATS,), 10.0 ** dist.get_rank())
    collectives.reduce(tensor)
    collectives.broadcast(tensor)
    return [tensor]


def scatter_and_gather():
    rank = dist.get_rank()
    mine, root = torch.empty(FLOATS), rank == 0
    rows = torch.arange(RANKS).float().repeat_interleave(FLOATS).view(RANKS, FLOATS)
    collectives.scatter(mine, rows if root else None)
    collectives.gather(gathered := torch.empty_like(rows) if root else None, mine)
    return [mine - rank, gathered - rows] if root else [mine - rank]


def all_to_all():
    rank = dist.get_rank()
    sent = torch.stack([torch.full((FLOATS,), 10.0 * rank + to) for to in range(RANKS)])
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent)
    return [row - (10 * source + rank) for source, row in enumerate(received)]


CASES = {
    "ring": (all_reduce, ("ring",), 11_111.0, [("all_reduce", "ring")]),
    "halving": (all_reduce, ("halving_doubling",), 11_111.0, [("all_reduce", "halving_doubling")]),
    "tree": (tree, (), 11_111.0, [("all_reduce", "tree")]),
    "direct": (scatter_and_gather, (), 0.0, [("scatter", None), ("gather", None)]),
    "all_to_all": (all_to_all, (), 0.0, [("all_to_all", None)]),
}


def run(function, arguments):
    """(what it returned, its seconds) on this rank, on a paced link."""
    dist.barrier()
    with links.paced(ALPHA, BETA):
        start = perf_counter()
        returned = function(*arguments)
        return returned, perf_counter() - start


@pytest.mark.parametrize("case", CASES)
def test_a_collective_takes_as_long_as_the_model_says(five, case):
    function, arguments, expected, parts = CASES[case]
    results = five.call(run, function, arguments)
    for tensors, _ in results:
        assert all(torch.equal(t, torch.full_like(t, expected)) for t in tensors)
    predicted = sum(
        costs.collective_seconds(name, 4 * RANKS * FLOATS, RANKS, ALPHA, BETA, algorithm)
        for name, algorithm in parts
    )
    slowest = max(seconds for _, seconds in results)
    assert 0.75 * predicted < slowest < 4 * predicted


def send_three():
    """Rank 0 starts three messages at once: when each arrived, on rank 1's clock."""
    mine, arrivals = torch.zeros(FLOATS), []
    dist.barrier()
    with links.paced(ALPHA, BETA):
        start = perf_counter()
        if dist.get_rank() == 0:
            sends = [dist.P2POp(dist.isend, torch.full_like(mine, i), 1) for i in range(3)]
            for work in dist.batch_isend_irecv(sends):
                work.wait()
        elif dist.get_rank() == 1:
            for i in range(3):
                for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, mine, 0)]):
                    work.wait()
                assert torch.equal(mine, torch.full_like(mine, i))
                arrivals.append(perf_counter() - start)
    return arrivals


def test_the_messages_of_one_rank_leave_in_order_one_after_the_other(five):
    arrivals = five.call(send_three)[1]
    one = ALPHA + 4 * FLOATS * BETA
    for i, seconds in enumerate(arrivals, 1):
        assert 0.8 * i * one < seconds < i * one + 0.5


def far_and_near():
    """Rank 0 sends to rank 1, over a slow link, then to rank 2: when it arrives there."""
    rank, tensor = dist.get_rank(), torch.ones(FLOATS)
    dist.barrier()
    with links.paced(0.5, 0.0, peers={1} if rank == 0 else {0} if rank == 1 else set()):
        start = perf_counter()
        if rank == 0:
            messages = [dist.P2POp(dist.isend, tensor, peer) for peer in (1, 2)]
        else:
            messages = [dist.P2POp(dist.irecv, tensor, 0)] if rank < 3 else []
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return perf_counter() - start


def test_only_messages_of_the_named_peers_are_delayed(five):
    _, far, near, *_ = five.call(far_and_near)
    assert far > 0.45
    assert near < far / 2


def two_kinds():
    """Rank 0 sends to rank 1 over the slow link, to rank 2 over the other, by isend and irecv."""
    rank, tensor = dist.get_rank(), torch.full((FLOATS,), float(dist.get_rank()))
    slow, other = ({1}, {2}) if rank == 0 else ({0}, set()) if rank == 1 else (set(), {0})
    dist.barrier()
    with links.paced(0.2, 0.0, other), links.paced(0.5, 0.0, slow):
        start = perf_counter()
        if rank == 0:
            works = [dist.isend(tensor, dst=1), dist.isend(tensor, group_dst=2)]
        elif rank < 3:
            works = [dist.irecv(tensor, src=0) if rank == 1 else dist.irecv(tensor, group_src=0)]
        else:
            works = []
        for work in works:
            work.wait()
        return perf_counter() - start, tensor[0].item()


def test_single_messages_are_delayed_each_by_its_own_kind_of_link(five):
    _, (slow, received), (other, also), *_ = five.call(two_kinds)
    assert received == also == 0.0
    assert slow > 0.45
    assert 0.18 < other < slow - 0.1


def in_a_group():
    """Ranks 1 and 4 send to each other in a group of two, and receive in another order."""
    group = dist.new_group([1, 4])
    rank = dist.get_rank(group)
    if rank < 0:
        return None
    other = dist.get_global_rank(group, 1 - rank)
    sent = [torch.full((4,), 10.0 * dist.get_rank() + tag) for tag in (1, 2)]
    received = [torch.zeros(4) for _ in sent]
    with links.paced(0.2, 0.0, peers={other}):
        start = perf_counter()
        works = [dist.isend(x, group=group, tag=i, group_dst=1 - rank) for i, x in enumerate(sent)]
        for i in (1, 0):
            works.append(dist.irecv(received[i], group=group, tag=i, group_src=1 - rank))
        for work in works:
            work.wait()
        return [x[0].item() for x in received], perf_counter() - start


def test_ranks_of_a_group_and_tags_mean_what_they_mean_without_a_pace(five):
    answers = five.call(in_a_group)
    assert answers[1][0] == [41.0, 42.0] and answers[4][0] == [11.0, 12.0]
    assert all(seconds > 0.35 for _, seconds in (answers[1], answers[4]))


def from_anyone():
    with links.paced(0.0, 0.0), pytest.raises(ValueError, match="pass src= or group_src="):
        dist.irecv(torch.zeros(1))
    return True


def test_a_receive_from_any_rank_is_refused(five):
    assert all(five.call(from_anyone))


def blocked():
    """Rank 1 waits for rank 2, which waits for rank 0's message to it, sent behind rank 1's."""
    rank, tensor = dist.get_rank(), torch.zeros(1)
    dist.barrier()
    with links.paced(0.01, 0.0):
        if rank == 0:
            works = [dist.isend(tensor, 1), dist.isend(tensor, 2)]
        elif rank == 1:
            dist.irecv(tensor, 2).wait()
            works = [dist.irecv(tensor, 0)]
        elif rank == 2:
            dist.irecv(tensor, 0).wait()
            works = [dist.isend(tensor, 1)]
        for work in works if rank < 3 else ():
            work.wait()
    return True


def test_a_message_that_nobody_takes_yet_does_not_hold_up_those_behind_it(five):
    assert all(five.call(blocked))


def leave():
    before = dist.batch_isend_irecv, dist.isend, dist.irecv, dist.P2POp
    try:
        with links.paced(0.0, 0.0):
            assert dist.batch_isend_irecv is not before[0]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return before == (dist.batch_isend_irecv, dist.isend, dist.irecv, dist.P2POp)


def test_the_pace_ends_with_the_block_however_it_is_left(five):
    assert all(five.call(leave))


@pytest.mark.parametrize("alpha, beta", [(-1e-3, 0.0), (0.0, float("inf")), (float("nan"), 0.0)])
def test_what_is_no_time_is_refused(alpha, beta):
    with pytest.raises(ValueError, match="times, 0 or more"), links.paced(alpha, beta):
        pass


class Queue:
    """Takes a while over each, as a thread may that has no core."""

    def __init__(self):
        self.arrivals = []

    def submit(self, deliver, message, arrival):
        sleep(0.02 if message % 2 else 0.0)
        self.arrivals.append(arrival)


def test_messages_of_several_threads_are_queued_in_the_order_of_arrival():
    """Else the one that sends would sleep until a later arrival first."""
    link = links.Link(None, Queue())
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda message: link.send(message, 1.0), range(16)))
    assert link.outward.arrivals == sorted(link.outward.arrivals)
    assert len(link.outward.arrivals) == 16


def raised_beside_a_receive(rank_of_sender=1):
    """The seconds until an error comes out of a block in which a message is awaited."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    took = None
    if rank == 0:
        start = perf_counter()
        with pytest.raises(ZeroDivisionError), links.paced(ALPHA, BETA):
            dist.irecv(torch.zeros(1), rank_of_sender)
            raise ZeroDivisionError
        took = perf_counter() - start
        store.set("raised", "")
    if rank == rank_of_sender:
        store.wait(["raised"])
        dist.send(torch.zeros(1), 0)
    dist.barrier()
    return took


def test_an_error_does_not_wait_for_messages_that_do_not_come():
    with Ranks(2, 20.0) as two:
        assert two.call(raised_beside_a_receive)[0] < 5.0
