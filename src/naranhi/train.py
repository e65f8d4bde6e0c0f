"""Train GPT-2 on a pipeline of ranks.

    torchrun --nproc-per-node 4 -m naranhi.train --schedule gpipe --balance 4,3,3,4 --microbatches 4

Every rank makes the same model from the same seed and goes through the same batches; the pipeline
keeps of the model what belongs to the rank, and of the batches what its stages read. The rank of
the last stage has the loss: it prints it, and writes the log.
"""

import argparse
import inspect
import math
import os
import re
import signal
import sys
from functools import partial
from itertools import islice
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from naranhi import corpus, data, models, rendezvous, schedules
from naranhi.pipeline import Pipeline
from naranhi.recomputation import Recompute
from naranhi.split_backward import splittable
from naranhi.train_log import Log

RATE = {"random": 2e-3, "trained": 3e-5}  # Adam's; a model that is trained already needs far less
EVERY = 10  # steps between two printed losses
MULTIPLE = 8  # of what lengths are multiples: the stages try their layers once for each length
PATIENCE = 1800.0  # seconds; a rank may be fetching weights while the others wait for it
LOST = re.compile("closed by peer|reset by peer|[Bb]roken pipe|[Tt]imed out|[Tt]imeout")


class Mistake(Exception):
    """What the one who started this can put right; told in a line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Mistake(f"{message} (--help says more)")


def parse(arguments=None):
    """The options, or Mistake."""
    parser = _Parser(
        prog="naranhi.train", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        allow_abbrev=False)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a trained GPT-2: its name on the Hugging Face hub (gpt2) "
        "or a folder; by default a small one of 12 blocks with random weights")
    add("--corpus", metavar="NAME", help="squad, which is fetched from the hub, or a JSON file in "
        "SQuAD's form; by default the text that ships with this package")
    add("--schedule", choices=sorted(schedule_names()), default="gpipe", help="default: gpipe")
    add("--balance", type=_balance, metavar="N,N,...", help="layers of each stage (embedding, "
        "blocks and head, 14 in all, such as 4,3,3,4); by default as equal as it goes")
    add("--microbatches", type=_whole(1), default=4, metavar="N", help="default: 4")
    add("--batch", type=_whole(1), default=8, metavar="N", help="passages in a step; default: 8")
    add("--steps", type=_whole(1), default=300, metavar="N", help="default: 300")
    add("--rate", type=_rate, metavar="R", help="Adam's learning rate; default: "
        f"{RATE['random']:g}, with --model {RATE['trained']:g}")
    add("--seed", type=_whole(0), default=0, metavar="N",
        help="of the weights and of the batches; default: 0")
    add("--dropout", type=_probability, default=0.0, metavar="P", help="default: 0, for then any "
        "number of ranks gives the same losses")
    add("--untied", action="store_true",
        help="give the head weights of its own instead of the embedding's")
    add("--recompute", action="store_true",
        help="keep only each block's input for the backward, and compute the rest again")
    add("--log-file", "--log", dest="log", metavar="FILE", help="write a JSON object for each "
        "step, a line each, replacing what is in FILE; on the machine of the last stage. (torchrun "
        "takes --log for one of its own options, unless -- stands before naranhi.train)")
    return parser.parse_args(arguments)


def schedule_names():
    """Those functions of `naranhi.schedules` that take stages and micro-batches, need no more, and
    leave the weights alone during a step."""
    for name in schedules.__all__:
        function = getattr(schedules, name)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            needed = [one.name for one in parameters if one.default is one.empty]
            if needed == ["stages", "microbatches"] and not kinds(function(1, 1), "U"):
                yield name


def kinds(schedule, kind):
    """The actions of a kind, "U" or "I" or another, in a schedule."""
    return [action for row in schedule for action in row if action.kind == kind]


def _whole(least):
    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)
    return number


def _balance(text):
    return [_whole(1)(part) for part in text.split(",")]


def _rate(text):
    if not (rate := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return rate


def _probability(text):
    if not 0 <= (probability := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no probability below 1")
    return probability


def prepare(options):
    """The layers of the model, the passages as tokens, the padding token, and a line about them."""
    if options.batch % options.microbatches:
        raise Mistake(f"--batch {options.batch} cannot be divided into "
                      f"{options.microbatches} micro-batches of one size")
    passages = corpus.contexts(options.corpus)
    distinct = corpus.unique(passages)
    tokenizer = corpus.tokenizer(options.model)
    torch.manual_seed(options.seed)
    source = options.model or models.gpt2_config(vocabulary=len(tokenizer))
    layers = models.gpt2(source, tied=not options.untied, dropout=options.dropout)
    words, positions = layers[0].wte.num_embeddings, layers[0].wpe.num_embeddings
    if len(tokenizer) > words:
        raise Mistake(f"the tokenizer of {options.model} has {len(tokenizer)} words, its model "
                      f"only {words}")
    sequences = data.encode(tokenizer, distinct, positions)
    parameters = sum(one.numel() for one in nn.ModuleList(layers).parameters())
    about = (
        f"{len(sequences):,} passages ({len(passages) - len(distinct):,} repeated ones left out), "
        f"{sum(map(len, sequences)):,} tokens, unigram entropy "
        f"{data.unigram_entropy(sequences):.3f} nats a token; {parameters:,} parameters")
    if options.recompute:
        layers[1:-1] = map(Recompute, layers[1:-1])
    return layers, sequences, tokenizer.pad_token_id, about


def train(options, device):
    """All the steps. Every rank of the default group calls this."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers, sequences, pad, about = together(lambda: prepare(options))
    schedule = getattr(schedules, options.schedule)(ranks, options.microbatches)
    tells = rank == schedule.placement[-1]
    log = together(lambda: Log(options.log if tells else None))
    if kinds(schedule, "I"):
        layers = splittable(layers)
    nn.ModuleList(layers).to(device)
    pipeline = together(partial(Pipeline, layers, schedule, data.loss, options.balance))
    del layers  # the other stages' are not needed any more
    if rank == 0:
        print(about, flush=True)
    rate = options.rate or RATE["trained" if options.model else "random"]
    batches = data.stream(sequences, options.batch, options.seed, pad, MULTIPLE)
    step, begin = 0, perf_counter()
    with log, pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=rate)
        for step, batch in enumerate(islice(batches, options.steps)):
            start = perf_counter()
            moved = batch.to(device)
            optimizer.zero_grad()
            loss = pipeline.step(moved.inputs, moved.targets, batch.count)
            optimizer.step()
            if loss is not None:
                value = loss.item()
                if not math.isfinite(value):
                    raise Mistake(f"the loss of step {step} is {value}: a lower --rate may help")
                log.write(step=step, loss=value, tokens=batch.count, padding=batch.padding,
                          seconds=round(perf_counter() - start, 6))
                if step % EVERY == 0 or step == options.steps - 1:
                    print(f"step: {step}, loss: {value:.4f}", flush=True)
        if tells:
            print(f"{options.steps} steps in {perf_counter() - begin:.1f} s", flush=True)


def together(function):
    """What `function()` returns, when it returns on every rank.

    Where it raises on some, what it raised is told once, and every rank leaves: none waits for one
    that has gone. Only what the one who started this can put right is told like that.
    """
    result = wrong = None
    try:
        result = function()
    except (Mistake, OSError, ValueError) as error:
        wrong = str(error)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    if not any(told):
        return result
    if dist.get_rank() == 0:
        for message in dict.fromkeys(filter(None, told)):
            ranks = [rank for rank, other in enumerate(told) if other == message]
            where = "" if len(ranks) == len(told) else f" (on rank {', '.join(map(str, ranks))})"
            print(f"naranhi.train: error{where}: {message}", file=sys.stderr, flush=True)
    dist.barrier()  # the launcher ends all ranks as soon as one has left: first let it be told
    raise SystemExit(1)


def main(arguments=None):
    """What `python -m naranhi.train` does on each rank."""
    # Ctrl-C ends a rank at once and in silence, wherever it is: each line of the log is whole.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wrong = None
    try:
        options = parse(arguments)
    except Mistake as mistake:
        wrong = mistake
    try:
        device = rendezvous.join(timeout=PATIENCE)
    except RuntimeError as error:
        sys.exit(f"naranhi.train: error: {wrong or error}")

    def no_mistake():
        if wrong:
            raise wrong

    together(no_mistake)
    try:
        train(options, device)
    except (Mistake, RuntimeError) as error:
        if isinstance(error, Mistake):
            why = f"error: {error}"
        elif LOST.search(str(error)):
            cause = str(error).strip().partition("\n")[0].partition(". ")[0]
            why = f"rank {dist.get_rank()} has lost another rank, and ends: {cause}"
        else:
            raise
        print(f"naranhi.train: {why}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread may be waiting for what another rank will never take
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
