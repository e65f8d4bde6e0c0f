"""The options of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from naranhi.train.schedule import CHUNKS, schedule_names, schedule_type, takes_chunks
from naranhi.train.usage import UsageError
from naranhi.train.values import balance, path, positive, probability, rate, whole

DESCRIPTION = """Train GPT-2, Llama or Mixtral on a pipeline of ranks, or on a mesh of them.

    torchrun --nproc-per-node 4 -m naranhi.train --schedule gpipe --balance 4,3,3,4 --microbatches 4
    torchrun --nproc-per-node 8 -m naranhi.train --dp 2 --tp 2 --pp 2
    torchrun --nproc-per-node 8 -m naranhi.train --cp 2 --pp 2 --experts 4 --ep 2
    torchrun --nproc-per-node 4 -m naranhi.train --dp 4 --batch 16 --zero 1 --bf16 --export trained
    torchrun --nproc-per-node 8 -m naranhi.train --config Qwen/Qwen3-0.6B --tp 4 --dp 2

The sizes of all axes (--dp, --pp, --tp, --cp, --ep) multiply to the number of ranks. Rank 0 prints
the loss of the whole step, whatever the mesh, and writes the log. The module naranhi.train.trainer
describes what a step does.

    torchrun --nproc-per-node 4 -m naranhi.train --dp 2 --pp 2 --save runs/gpt2 --save-every 10
    torchrun --nproc-per-node 2 -m naranhi.train --tp 2 --save runs/gpt2 --save-every 10 --resume

A run that is resumed has the losses of one that was never interrupted: to the bit on the same
ranks, and on another mesh, or with other micro-batches, up to the rounding of sums. (With --dropout
only the former holds: the latter draws different masks.) Corpus, model, --batch, --seed, --lr,
--clip, --dropout, --untied, --bf16, --experts and --top-k must not change; with experts, nor must
--microbatches, because tokens are balanced over the experts in each micro-batch.

With torchrun --max-restarts, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: without
it, most restarts fail with torch 2.13, whose ranks find addresses of the attempt before. On several
nodes that takes --rdzv-backend c10d and --rdzv-endpoint: with --master-addr it has no effect.

Without a network, or if the name of this machine does not resolve, torchrun itself needs
--local-addr=127.0.0.1.
"""

RATE = {
    "random": 2e-3,
    "trained": 3e-5,
}  # Adam's learning rates; a trained model needs a far smaller one
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
    """Parse the options of a training run.

    Args:
        arguments: the command-line arguments; None for those of this process.

    Raises:
        UsageError: the arguments are wrong.
    """
    parser = _Parser(
        prog="naranhi.train",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME",
        help="a trained GPT-2, Llama, Mistral, Qwen2 or 3, Mixtral, Qwen3-MoE: its name on the hub "
        "(gpt2) or a folder; by default a small GPT-2 of 12 blocks with random weights",
    )
    add(
        "--config",
        metavar="NAME",
        help="the same kinds of models with random weights: a config.json, its folder, or a name "
        "on the hub; with the tokenizer that is there, or if a folder has none, the book's",
    )
    add(
        "--corpus",
        metavar="NAME",
        help="squad, which is fetched from the hub, or a file: .txt with blank lines between "
        'passages, .jsonl with {"text": ...} on each line, or JSON in SQuAD\'s form; by default '
        "the text that ships with this package",
    )
    add(
        "--schedule",
        type=schedule_type,
        choices=sorted(schedule_names()),
        default="gpipe",
        help="one of these, or a name as torch writes it (1F1B); default: gpipe",
    )
    add(
        "--balance",
        type=balance,
        metavar="N,N,...",
        help="layers of each stage (embedding, "
        "blocks and head, such as 4,3,3,4; a rank may have several stages); by default as equal as "
        "possible",
    )
    add(
        "--dp",
        "--data-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="pipelines side by side, which share each batch; default: 1",
    )
    add(
        "--pp",
        "--pipeline-parallel",
        type=whole(1),
        metavar="N",
        help="ranks of each pipeline; by default all that the other options leave",
    )
    add(
        "--tp",
        "--tensor-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="ranks that share each layer; default: 1",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="with --tp: also split activations between the split layers, along the sequence",
    )
    add(
        "--cp",
        "--context-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="ranks that share each sequence, by ring attention; default: 1",
    )
    add(
        "--experts",
        type=whole(1),
        metavar="N",
        help="replace the MLP in every second block of a GPT-2 by a mixture of N experts",
    )
    add(
        "--top-k",
        type=whole(1),
        metavar="K",
        help="with --experts: experts for each token; default: 2, or 1 with --experts 1",
    )
    add(
        "--ep",
        "--expert-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="with --experts, or a model with experts: ranks that share them, and each batch; "
        "default: 1",
    )
    about_chunks = f"with --schedule interleaved: stages of each rank; default: {CHUNKS}"
    add("--chunks", type=whole(1), metavar="N", help=about_chunks)
    add(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        help="shard over the ranks with the same layers, or experts: 1, the optimizer's state; "
        "2, gradients as well, which are reduced in each micro-batch; 3, parameters as well "
        "between steps, which a stage gathers once a step; needs --untied with several stages; "
        "default: 0",
    )
    add(
        "--bf16",
        action="store_true",
        help="compute products in bf16, under autocast; parameters and their sums stay in fp32",
    )
    add(
        "--microbatches",
        type=whole(1),
        default=4,
        metavar="N",
        help="micro-batches of each pipeline in a step; default: 4",
    )
    add("--batch", type=whole(1), default=8, metavar="N", help="passages in a step; default: 8")
    add("--steps", type=whole(1), default=300, metavar="N", help="default: 300")
    add(
        "--lr",
        type=rate,
        metavar="R",
        help=f"Adam's learning rate; default: {RATE['random']:g}, with --model {RATE['trained']:g}",
    )
    add(
        "--clip",
        type=positive,
        metavar="NORM",
        help="scale gradients down to this "
        "norm if theirs, over the whole model, is larger; by default they stay as they are",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="of the weights and of the batches; default: 0",
    )
    add(
        "--dropout",
        type=probability,
        default=0.0,
        metavar="P",
        help="default: 0, with which any number of ranks gives the same losses",
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
        type=path,
        metavar="DIR",
        help="save checkpoints into this folder, which all ranks see: every --save-every steps, "
        "in the background, and after the last step",
    )
    add(
        "--save-every",
        type=whole(1),
        default=100,
        metavar="N",
        help="steps between two checkpoints; default: 100",
    )
    add(
        "--keep",
        type=whole(1),
        default=3,
        metavar="K",
        help="keep only the K newest checkpoints; default: 3",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the folder of --save, or, if it has none, begin; "
        "--log-file goes on from there, too",
    )
    add(
        "--export",
        type=path,
        metavar="DIR",
        help="after the last step, write the whole model, in fp32, and its tokenizer into this new "
        "folder, on the machine of rank 0, as from_pretrained and --model read them",
    )
    add(
        "--silence",
        type=positive,
        default=60.0,
        metavar="S",
        help="end the training if a rank has not answered for this many seconds; default: 60",
    )
    add(
        "--log-file",
        "--log",
        dest="log",
        type=path,
        metavar="FILE",
        help="write a JSON object for each "
        "step, a line each, replacing what is in FILE; on the machine of rank 0. (torchrun "
        "takes --log for one of its own options, unless -- stands before naranhi.train)",
    )
    for old, new in RENAMED.items():
        add(old, nargs="?", action=_Renamed, new=new, help=argparse.SUPPRESS)
    parser.set_defaults(mixture=False)  # whether the model itself has experts: `with_own_experts`
    options = parser.parse_args(arguments)
    if options.resume and options.save is None:
        parser.error("--resume goes with --save DIR, the folder of the run to go on with")
    if options.chunks is not None and not takes_chunks(options.schedule):
        parser.error("--chunks goes with --schedule interleaved")
    return options
