"""A program that saves in a loop, on two ranks, and is killed at random moments, and begun again.

All numbers of a checkpoint are its step, so a mixture of two would be seen.
"""

import json
import multiprocessing
import random
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # as an optimizer does when it is made: once, rather than in every process
import torch.distributed as dist
from torch import nn

from naranhi import models
from naranhi.checkpoint import Checkpoints
from naranhi.checkpoint.state import State
from naranhi.zero import Zero

RANKS = 2


def rank(number, store, folder, in_background, pipe):
    """Look at what is there; then save until killed. Tells the steps that are committed."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=number, world_size=RANKS
        )
        zero = Zero(nn.Sequential(*models.mlp(2, 8, 16)), 3)
        optimizer = torch.optim.AdamW(zero.param_groups)
        zero.model(torch.ones(1, 8)).sum().backward()
        zero.step(optimizer)

        def numbers():
            tensors = State(zero, optimizer).tensors.values()
            return [view for boxes in tensors for view in boxes.views.values()]

        checkpoints, step = Checkpoints(folder, keep=2), 0
        for step in checkpoints.steps():
            saved = checkpoints.load(zero, optimizer, step)
            assert saved.step == step and saved.state == {"note": step}
            assert len(numbers()) >= 8 and all((view == step).all() for view in numbers()), step
        if step:
            newest = checkpoints.load(zero, optimizer)
            assert newest.step == step and newest.skipped == {}, newest
        pipe.send(step)
        while True:
            step += 1
            for view in numbers():
                view.fill_(step)
            if in_background:
                checkpoints.save_async(step, zero, optimizer, note=step)
                checkpoints.wait()
            else:
                checkpoints.save(step, zero, optimizer, note=step)
            pipe.send(step)
    except Exception:
        pipe.send(traceback.format_exc())


def committed(pipe):
    """The next step that a rank tells."""
    told = pipe.recv()
    if isinstance(told, str):
        sys.exit(told)
    return told


def main(folder, rounds):
    """Kill as often; print, for each life of the program, what it found, what it had saved when it
    was killed, and what was in the folder then."""
    order, lives, context = random.Random(0), [], multiprocessing.get_context("fork")
    for life in range(rounds + 1):  # the last one only looks
        store, (here, there) = Path(f"{folder}.{life}"), context.Pipe(duplex=False)
        ranks = [
            context.Process(target=rank, args=(number, store, folder, life % 2, there))
            for number in range(RANKS)
        ]
        for process in ranks:
            process.start()
        there.close()
        try:
            found = last = max(committed(here) for _ in ranks)
            begin, saves = time.monotonic(), order.randrange(3)
            if life < rounds:
                for _ in range(RANKS * saves):
                    last = committed(here)
                pace = (time.monotonic() - begin) / saves if saves else 0.02
                time.sleep(order.uniform(0, 1.5) * pace)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
        while here.poll():  # what they had said before they were killed
            try:
                last = max(last, committed(here))
            except EOFError:
                break
        lives.append((found, last, sorted(path.name for path in Path(folder).glob("step-*"))))
    print(json.dumps(lives))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
