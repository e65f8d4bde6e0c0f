"""Train GPT-2 on a pipeline of ranks, or on a mesh of them.

    torchrun --nproc-per-node 4 -m naranhi.train --schedule gpipe --balance 4,3,3,4 --microbatches 4
    torchrun --nproc-per-node 8 -m naranhi.train --dp 2 --tp 2 --pp 2

Rank 0 prints the loss of the whole step, whatever the mesh, and writes the log. The module
naranhi.train.trainer describes what a step does.

    torchrun --nproc-per-node 4 -m naranhi.train --dp 2 --pp 2 --save runs/gpt2 --save-every 10
    torchrun --nproc-per-node 2 -m naranhi.train --tp 2 --save runs/gpt2 --save-every 10 --resume

A run that is resumed has the losses of one that was never interrupted: to the bit on the same
ranks, and on another mesh, or with other micro-batches, up to the rounding of sums. Corpus, model,
--batch, --seed, --lr, --clip, --dropout and --untied have to be what they were.

Without a network, or if the name of this machine does not resolve, torchrun itself needs
--local-addr=127.0.0.1.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from time import perf_counter, sleep
from typing import NoReturn

import torch
import torch.distributed as dist

from naranhi import distributed, schedules
from naranhi.distributed import peers
from naranhi.train.log import Log
from naranhi.train.trainer import RATE, Training, actions_of
from naranhi.train.usage import UsageError, raise_on_all

EVERY = 10  # steps between two printed losses
PATIENCE = 1800.0  # seconds; a rank may be downloading weights while the others wait for it
LAUNCHER = 5.0  # seconds; the launcher blames the first rank that it sees end, then ends the others
LOST = re.compile("closed by peer|reset by peer|[Bb]roken pipe|[Tt]imed out|[Tt]imeout")


RENAMED = {
    "--data": "--dp",
    "--pipeline": "--pp",
    "--tensor": "--tp",
    "--rate": "--lr",
    "--sequence": "--sequence-parallel",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (--help says more)")


class _Renamed(argparse.Action):
    """An option that has a new name."""

    def __init__(self, *names, new, **options):
        super().__init__(*names, **options)
        self.new = new

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is called {self.new} now")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of a training.

    Args:
        arguments: the command-line arguments; None for those of this process.

    Raises:
        UsageError: the arguments are wrong.
    """
    parser = _Parser(
        prog="naranhi.train",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME",
        help="a trained GPT-2: its name on the Hugging Face hub (gpt2) "
        "or a folder; by default a small one of 12 blocks with random weights",
    )
    add(
        "--corpus",
        metavar="NAME",
        help="squad, which is fetched from the hub, or a JSON file in "
        "SQuAD's form; by default the text that ships with this package",
    )
    add(
        "--schedule",
        type=_schedule,
        choices=sorted(schedule_names()),
        default="gpipe",
        help="one of these, or a name as torch writes it (1F1B); default: gpipe",
    )
    add(
        "--balance",
        type=_balance,
        metavar="N,N,...",
        help="layers of each stage (embedding, "
        "blocks and head, 14 in all, such as 4,3,3,4); by default as equal as it goes",
    )
    add(
        "--dp",
        "--data-parallel",
        type=_whole(1),
        default=1,
        metavar="N",
        help="pipelines side by side, which share each batch; default: 1",
    )
    add(
        "--pp",
        "--pipeline-parallel",
        type=_whole(1),
        metavar="N",
        help="ranks of each pipeline, one after the other; by default as many as there are",
    )
    add(
        "--tp",
        "--tensor-parallel",
        type=_whole(1),
        default=1,
        metavar="N",
        help="ranks that share each layer; default: 1",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="with --tp: split what lies between the split layers too, along the sequence",
    )
    add(
        "--microbatches",
        type=_whole(1),
        default=4,
        metavar="N",
        help="of each pipeline; default: 4",
    )
    add("--batch", type=_whole(1), default=8, metavar="N", help="passages in a step; default: 8")
    add("--steps", type=_whole(1), default=300, metavar="N", help="default: 300")
    add(
        "--lr",
        type=_positive,
        metavar="R",
        help=f"Adam's learning rate; default: {RATE['random']:g}, with --model {RATE['trained']:g}",
    )
    add(
        "--clip",
        type=_positive,
        metavar="NORM",
        help="scale the gradients of a step down to this "
        "norm, that of the whole model; by default they stay as they are",
    )
    add(
        "--seed",
        type=_whole(0),
        default=0,
        metavar="N",
        help="of the weights and of the batches; default: 0",
    )
    add(
        "--dropout",
        type=_probability,
        default=0.0,
        metavar="P",
        help="default: 0, for then any number of ranks gives the same losses",
    )
    add(
        "--untied",
        action="store_true",
        help="give the head weights of its own instead of the embedding's",
    )
    add(
        "--recompute",
        action="store_true",
        help="keep only each block's input for the backward, and compute the rest again",
    )
    add(
        "--save",
        metavar="DIR",
        help="save checkpoints into this folder, which all ranks see: after every so many steps, "
        "in the background, and after the last step",
    )
    add(
        "--save-every",
        type=_whole(1),
        default=100,
        metavar="N",
        help="steps between two checkpoints; default: 100",
    )
    add(
        "--keep",
        type=_whole(1),
        default=3,
        metavar="K",
        help="of the checkpoints, only the newest; default: 3",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the folder of --save, or, if it has none, begin; "
        "--log-file goes on from there, too",
    )
    add(
        "--silence",
        type=_positive,
        default=60.0,
        metavar="S",
        help="seconds after which a rank "
        "that does not answer is given up, and the training ends; default: 60",
    )
    add(
        "--log-file",
        "--log",
        dest="log",
        metavar="FILE",
        help="write a JSON object for each "
        "step, a line each, replacing what is in FILE; on the machine of rank 0. (torchrun "
        "takes --log for one of its own options, unless -- stands before naranhi.train)",
    )
    for old, new in RENAMED.items():
        add(old, nargs="?", action=_Renamed, new=new, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.resume and options.save is None:
        parser.error("--resume goes with --save DIR, the folder of the run to go on with")
    return options


def schedule_names() -> Iterator[str]:
    """Yield the names of the schedules that a training can use.

    These are the functions of `naranhi.schedules` that require only stages and micro-batches, and
    whose schedules do not update the weights during a step.
    """
    for name in schedules.__all__:
        function = getattr(schedules, name)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            needed = [
                parameter.name for parameter in parameters if parameter.default is parameter.empty
            ]
            if needed == ["stages", "microbatches"] and not actions_of(function(1, 2), "U"):
                yield name


def _schedule(name):
    try:
        return schedules.get(name).__name__
    except ValueError:
        return name  # not one of the choices, so argparse rejects it


def _whole(least):
    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number


def _balance(text):
    return [_whole(1)(part) for part in text.split(",")]


def _number(text):
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text):
    if not (isfinite(number := _number(text)) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _probability(text):
    if not 0 <= (probability := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability below 1")
    return probability


def say_aloud(line: str) -> None:
    """Print a line at once, even if standard output is buffered."""
    print(line, flush=True)


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
        raise_on_all(lambda: Log(options.log if first else None, training.start)) as log,
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
    return step_losses


def losses(arguments: str = "") -> list[float]:
    """Train with these arguments on the current ranks, and return the loss of every step.

    The losses are those of `torchrun -m naranhi.train ARGUMENTS`. In a notebook:
    `world.run(train.losses, "--dp 2 --steps 20")`.
    """
    return train(parse(shlex.split(arguments)), say=lambda line: None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do on this rank what `python -m naranhi.train` does on each rank."""
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
        others.close()
        dist.barrier()
    except UsageError as mistake:  # on every rank
        others.close()
        if dist.get_rank() == 0:
            for line in str(mistake).splitlines():
                print(f"naranhi.train: error: {line}", file=sys.stderr, flush=True)
        dist.barrier()  # the launcher ends all ranks once one exits: print first
        sys.exit(1)
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        gone = others.gone()
        lost = f"lost rank {', '.join(map(str, gone))}" if gone else "lost another rank"
        cause = str(error).strip().partition("\n")[0].partition(". ")[0]
        end(f"rank {dist.get_rank()} ends as a consequence, for it has {lost}: {cause}", others)
    dist.destroy_process_group()


def end(sentence: str, others: peers.Peers) -> NoReturn:
    """Print why this rank ends, and end it.

    The rank first waits `LAUNCHER` seconds, so that a launcher that sees the cause in time kills
    it.
    """
    print(f"naranhi.train: {sentence}", file=sys.stderr, flush=True)
    others.kill_stopped()
    sleep(LAUNCHER)
    os._exit(1)  # a thread may be waiting to send to a rank that will never receive
