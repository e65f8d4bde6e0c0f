"""Run a training, from the command line, from a notebook, or from a program."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import NoReturn

import torch
import torch.distributed as dist

from naranhi import distributed
from naranhi.distributed import peers
from naranhi.train.build import require_own_log
from naranhi.train.log import Log
from naranhi.train.options import parse
from naranhi.train.trainer import Training
from naranhi.train.usage import UsageError, naming, raise_on_all

EVERY = 10  # steps between two printed losses
PATIENCE = 1800.0  # seconds; a rank may be downloading weights while the others wait for it
LAUNCHER = 5.0  # seconds; the launcher blames the first rank that it sees end, then ends the others
LOST = re.compile("closed by peer|reset by peer|[Bb]roken pipe|[Tt]imed out|[Tt]imeout")


def say_aloud(line: str) -> None:
    """Print a line at once, even if stdout is buffered; print nothing once its reader is gone."""
    # As stderr does it: a training goes on if stdout is in ASCII and the name of a folder is not.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # as behind `| head`: the training goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train(
    options: argparse.Namespace,
    device: torch.device | str | None = None,
    say: Callable[[str], None] = say_aloud,
) -> list[float]:
    """Run all steps, on every rank of the default group, and return their losses.

    Args:
        options: as `parse` returns them.
        device: this rank's device; by default that of the default group's backend.
        say: called on rank 0 with each line about the progress.

    Returns:
        The loss of every step that was run, on every rank; a resumed run does not repeat steps.

    Raises:
        UsageError: see `Training`; raised on every rank.
    """
    first, step_losses = dist.get_rank() == 0, []
    with (
        Training(options, device) as training,
        raise_on_all(lambda: _log(options, training.start)) as log,
    ):
        if first:
            say(training.about)
        start = perf_counter()
        for step in training:
            step_losses.append(step.loss)
            log.write(**step._asdict())
            if first and (step.step % EVERY == 0 or step.step == options.steps - 1):
                say(f"step: {step.step}, loss: {step.loss:.4f}")
        if first:
            say(f"{len(step_losses)} steps in {perf_counter() - start:.1f} s")
        if options.export is not None:
            training.export()
            if first:
                say(f"the model is in {options.export}")
    return step_losses


def _log(options, start):
    """Return the log of `--log-file`, which rank 0 writes."""

    def opened():
        require_own_log(options)
        return Log(options.log, start)

    return Log(None) if dist.get_rank() else naming("--log-file", opened)


def losses(arguments: str = "") -> list[float]:
    """Train with these arguments on the current ranks, and return the loss of every step.

    The losses are those of `torchrun -m naranhi.train ARGUMENTS`. In a notebook:
    `world.run(train.losses, "--dp 2 --steps 20")`.
    """
    return train(parse(shlex.split(arguments)), say=lambda line: None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this rank's part of `python -m naranhi.train`."""
    wrong = None
    try:
        options = parse(arguments)
    except UsageError as mistake:
        wrong = mistake
    try:
        device = distributed.join(timeout=PATIENCE)
    except RuntimeError as error:
        sys.exit(f"naranhi.train: error: {wrong or error}")

    def no_mistake():
        if wrong:
            raise wrong

    others = peers.Peers(
        60.0 if wrong else options.silence,
        give_up=lambda cause: end(f"rank {dist.get_rank()} ends the training: {cause}", others),
    )
    # Ctrl-C ends a rank at once, without a message, wherever it is: every line of the log is whole.
    # A stopped rank does not receive the signal.
    peers.on_signals([signal.SIGINT, signal.SIGTERM], others.kill_stopped)
    try:
        raise_on_all(no_mistake)
        train(options, device)
        part(others)
    except UsageError as mistake:  # on every rank
        if dist.get_rank() == 0:
            for line in str(mistake).splitlines():
                print(f"naranhi.train: error: {line}", file=sys.stderr, flush=True)
        part(others)  # the launcher ends all ranks once one exits: print first
        # Not sys.exit: the error's traceback holds the groups, and while Python finalizes, a thread
        # of theirs that lets go of its last message aborts the process.
        os._exit(1)
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        gone = others.gone()
        lost = f"lost rank {', '.join(map(str, gone))}" if gone else "lost another rank"
        cause = str(error).strip().partition("\n")[0].partition(". ")[0]
        end(f"rank {dist.get_rank()} ends, because it has {lost}: {cause}", others)
    dist.destroy_process_group()


def part(others: peers.Peers) -> None:
    """Stop watching once all ranks reach the end; no rank exits before all have stopped."""
    dist.barrier()
    others.close()
    dist.barrier()


def end(sentence: str, others: peers.Peers) -> NoReturn:
    """Print why this rank ends, and end it.

    The rank first waits `LAUNCHER` seconds, so that a launcher that sees the cause in time kills
    it.
    """
    # One write, or lines of several ranks would mix: torchrun starts Python unbuffered.
    sys.stderr.write(f"naranhi.train: {sentence}\n")
    sys.stderr.flush()
    others.kill_stopped()
    sleep(LAUNCHER)
    os._exit(1)  # a thread may be waiting to send to a rank that will never receive
