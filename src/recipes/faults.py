"""Break a run on purpose, and read what its ranks say.

torchrun --standalone --nproc-per-node 3 --redirects 3 --log-dir logs faults.py absent-rank sends

Each fault has a process group of its own. The error of the last one is not caught: it ends the run.
"""

import argparse
import faulthandler
import json
import os
import resource
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed.elastic.multiprocessing.errors import record

BAD = 1  # the rank that breaks, while the others take a healthy step


def step(group, size=4):
    dist.all_reduce(tensor := torch.ones(size), group=group)
    print("sum of ones:", tensor.tolist(), flush=True)


def absent_rank(group, deadline):
    time.sleep(1.5 * deadline)  # say, an evaluation that only this rank does


def other_order(group, deadline):
    dist.broadcast(torch.ones(4), 0, group=group)
    step(group)


def other_shape(group, deadline):
    step(group, size=6)


def frozen(group, deadline):
    os.system(f"(sleep {1.5 * deadline}; kill -CONT {os.getpid()}) &")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5 * deadline)  # awake again; its stack, which was due long ago, is written now


def exception(group, deadline):
    raise ValueError("row 1741 has no targets")


def killed(group, deadline):
    os.system(f"sleep {0.3 * deadline}; kill -KILL {os.getpid()}")  # the others have begun


def out_of_memory(group, deadline):
    resource.setrlimit(resource.RLIMIT_AS, (2**34, resource.RLIM_INFINITY))
    torch.empty(2**33)  # 32 GiB, where 16 are allowed


def full_disk(group, deadline):
    torch.save(torch.ones(2**20), "checkpoint.pt")  # 4 MiB


def sends(group, deadline):
    dist.send(torch.ones(4), (group.rank() + 1) % group.size(), group=group)  # until received
    dist.recv(torch.empty(4), (group.rank() - 1) % group.size(), group=group)


def slow_rank(group, deadline):
    for number in range(60):
        start = time.perf_counter()  # the same clock for all processes of a machine
        time.sleep(0.06 if group.rank() == BAD else 0.02)  # load a batch
        loaded = time.perf_counter()
        time.sleep(0.02)  # compute
        computed = time.perf_counter()
        dist.all_reduce(torch.ones(4), group=group)
        print("step", number, start, loaded, computed, time.perf_counter(), flush=True)


EVERYWHERE = [sends, slow_rank]
ALONE = [absent_rank, other_order, other_shape, frozen, exception, killed, out_of_memory, full_disk]
FAULTS = {fault.__name__.replace("_", "-"): fault for fault in EVERYWHERE + ALONE}


@record  # writes the error of a rank into a file, where torchrun looks for the first one
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="+", choices=FAULTS)
    parser.add_argument("--deadline", type=float, default=2.0)  # seconds
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID: where is it?
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in options.faults:
        group, fault = dist.new_group(timeout=timedelta(seconds=options.deadline)), FAULTS[name]
        print("==", name, flush=True)
        faulthandler.dump_traceback_later(options.deadline / 2, file=1)  # to stdout
        try:
            if dist.get_rank() == BAD or fault in EVERYWHERE:
                fault(group, options.deadline)
            else:
                step(group)
        except (RuntimeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            if name == options.faults[-1]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while the error's file is written
                raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            calls = json.loads(_dump_fr_trace_json()).get("entries", [])  # the flight recorder
            called = [c["profiling_name"] for c in calls if group.group_name in c["process_group"]]
            print("last collective:", *called[-1:], flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
