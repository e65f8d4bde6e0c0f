"""`naranhi.train` on two ranks, forked from one process, so that a new life of it is cheap."""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from pathlib import Path

import torch  # (these are imported once, rather than in every process)
import torch._dynamo
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from naranhi.train import cli

RANKS = 2


def rank(number, port, arguments):
    """What torchrun would start."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    cli.main(arguments)


def start(arguments):
    """The two ranks, started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(i, port, arguments)) for i in range(RANKS)]
    for process in ranks:
        process.start()
    return ranks


def end(ranks):
    """Wait for their ends; exit unless they have succeeded."""
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    if any(codes):
        sys.exit(f"the ranks have ended with {codes}")


def main(whole, log, kills, arguments, resumed):
    """Train to the end, with the log `whole`; then again, killed as often, with the log `log`.

    Prints the lines that the log had after each kill.
    """
    end(start([*arguments, "--log-file", whole]))
    order, lines = random.Random(0), []
    for _ in range(kills):
        ranks = start([*arguments, *resumed, "--log-file", log])
        seen, wanted = {_lines(log)}, order.randint(2, 4)
        while len(seen) < wanted and all(process.is_alive() for process in ranks):
            seen.add(_lines(log))
            time.sleep(0.005)
        time.sleep(order.uniform(0, 0.05))
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        lines.append(_lines(log))
    end(start([*arguments, *resumed, "--log-file", log]))
    print(json.dumps(lines))


def _lines(log):
    return Path(log).read_bytes().count(b"\n") if Path(log).exists() else 0


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
