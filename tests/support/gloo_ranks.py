"""n processes that are ranks of one gloo world, kept alive to call function after function on."""

import datetime
import gc
import os
import tempfile
import time
import traceback
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing as mp

START = 240.0  # seconds: a busy machine takes its time over new processes and what they import
# What all ranks are forked with. `models.gpt2`, and optimizers, import seconds' worth of it when
# they are made, which would be the call's; the rest is what most test modules import.
PRELOAD = [
    "torch.distributed",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "hypothesis",
    "pytest",
    "naranhi.train",
    "naranhi.divergence.gallery",
    "naranhi.rehearsal",
]


class Ranks:
    """`call(function, *args)` runs a module-level function on every rank: the list of its results.

    Loopback only and no port of its own: the ranks find each other through a file. A call that
    raises on some rank, or takes longer than `deadline` seconds, raises here with every traceback
    there is, and ends the ranks; the next call starts new ones. Time counts from when all ranks are
    there and have imported what they are called with, for which they have `START`.

    All ranks of a process of pytest are forked from one that has imported PRELOAD: importing torch
    costs seconds of CPU, five times for five ranks. What else they are called with, each imports
    for itself.
    """

    def __init__(self, ranks, deadline=60.0):
        self.ranks, self.deadline = ranks, deadline
        self.processes, self.pipes, self.folder = [], [], None
        self.worlds = count()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def call(self, function, *args):
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        self._answers(START)  # all are there
        for pipe in self.pipes:
            pipe.send("begin")
        results = self._answers(self.deadline + 5.0)  # gloo gives up first, and says where
        answers, groups = zip(*results, strict=True)
        # Torch names groups by their number: with different numbers, later ones would not meet.
        if len(set(groups) - {None}) > 1:
            self.close()
            raise AssertionError(f"the ranks have made different numbers of groups: {groups}")
        return list(answers)

    def call_in_a_world(self, ranks, function, *args):
        """`call` where the first `ranks` processes are the world: the list of their results."""
        if not self.processes:
            self._start()
        store = Path(self.folder.name, f"world {next(self.worlds)}")
        return self.call(_in_a_world, ranks, str(store), function, *args)[:ranks]

    def _answers(self, seconds):
        """One from each rank."""
        results, errors, waiting = {}, {}, dict(zip(self.pipes, range(self.ranks), strict=True))
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
                rank = waiting.pop(pipe)
                try:
                    fine, answer = pipe.recv()
                except EOFError:
                    fine, answer = False, "the process has died"
                (results if fine else errors)[rank] = answer
                if not fine:  # the others may be waiting for this one: give them a moment only
                    end = min(end, time.monotonic() + 2.0)
        if errors or waiting:
            self.close()
            told = [f"rank {rank}: {errors[rank]}" for rank in sorted(errors)]
            told += [f"rank {rank}: no answer in time" for rank in sorted(waiting.values())]
            raise AssertionError("\n".join(told))
        return [results[rank] for rank in range(self.ranks)]

    def _start(self):
        self.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.ranks):
            here, there = context.Pipe()
            place = (rank, self.ranks, str(Path(self.folder.name, "store")), self.deadline)
            process = context.Process(target=_rank, args=(there, *place), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def close(self):
        for pipe in self.pipes:
            pipe.close()  # which a rank that is not stuck takes as the end
        for process in self.processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes = [], []
        if self.folder:
            self.folder.cleanup()


def _rank(pipe, rank, ranks, store, deadline):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # each collection would scan what was imported, which took 7% of the ranks' time
    store = dist.FileStore(store, ranks)
    store.set(f"here {rank}", "yes")
    store.wait([f"here {one}" for one in range(ranks)], datetime.timedelta(seconds=START))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=deadline),
    )
    world = dist.group.WORLD
    while True:
        try:
            function, args = pipe.recv()  # and what they need is imported
            pipe.send((True, "here"))
            pipe.recv()
        except EOFError:
            return
        try:
            result = function(*args)
            same_world = dist.is_initialized() and dist.group.WORLD is world
            answer = True, (result, c10d._world.group_count if same_world else None)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


_groups = {}


def first_ranks(ranks):
    """In a rank: the group of the first ranks. Every rank asks for it at the same time, and those
    that are not in it too; it is made once."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(
            list(range(ranks)), timeout=datetime.timedelta(seconds=20), group_desc="unchecked"
        )
    return _groups[ranks]


_places = []  # in a rank: which of the processes it is, whatever world it is in


def _in_a_world(ranks, store, function, *args):
    """In a rank: the result, where the first ranks are the world; None on the others."""
    rank = dist.get_rank() if not _places else _places[0]
    _places[:] = [rank]
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= ranks:
        return None
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=40),
    )
    return function(*args)
