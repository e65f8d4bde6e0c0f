"""What the recipes share: a model, its data, the loss of a batch, the options of each script."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SMALL = Path(__file__).parent / "small"
IGNORE_INDEX = -100  # the target that a loss ignores


def parser(description):
    """Return a parser with the options of every recipe; each recipe may add its own."""
    as_written = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=description, formatter_class=as_written)
    add = options.add_argument
    add("--model", default=SMALL / "gpt2", help="a name on the hub (gpt2), or a folder")
    add("--data", default=SMALL / "text", help="likewise (rajpurkar/squad), with a column context")
    add("--batch", type=int, default=8, help="rows in a step, over all ranks; default: 8")
    add("--steps", type=int, default=50, help="in all; no two read the same row; default: 50")
    add("--lr", type=float, default=1e-3, help="default: 0.001; for trained weights, such as 3e-5")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="default: adamw")
    add("--seed", type=int, default=0, help="of weights and order; default: 0")
    return options


def load_model(options):
    """Return the model, with the hub's weights, or random weights for the small model."""
    torch.manual_seed(options.seed)
    if options.model == SMALL / "gpt2":
        return without_weights(options).train()
    fp32 = torch.float32  # also if the weights were saved in 16 bits
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=fp32).train()  # with dropout


def without_weights(options):
    """Return the model with random weights."""
    config = AutoConfig.from_pretrained(options.model)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_optimizer(options, parameters):
    """Return the optimizer that the options name."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.optimizer]
    return kind(parameters, lr=options.lr)


def load_passages(options):
    """Return the data set; recipes read each row of its column `context` at most once."""
    data = load_dataset(str(options.data), split="train")
    asked = f"--steps {options.steps} of --batch {options.batch}"
    if min(options.steps, options.batch) < 1 or options.steps * options.batch > len(data):
        sys.exit(f"{asked}: both are at least 1, and the data has {len(data)} rows")
    return data


def rows_per_rank(options, ranks):
    """Return how many rows of a step each rank takes, if `ranks` share them."""
    if options.batch % ranks:
        sys.exit(f"--batch {options.batch} has to be a multiple of the {ranks} ranks that share it")
    return options.batch // ranks


class Collate:
    """Passages as a batch of token ids, a mask and targets: for each token, the next one."""

    def __init__(self, options, positions, padding=True):
        self.tokenizer = AutoTokenizer.from_pretrained(
            options.model, model_max_length=positions, padding_side="right"
        )
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.padding = padding

    def __call__(self, rows):
        texts = [row["context"] for row in rows]
        batch = self.tokenizer(texts, padding=self.padding, truncation=True, return_tensors="pt")
        tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
        batch["targets"] = pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
        return batch


def summed_cross_entropy(logits, targets):
    """Return the loss summed over all targets; divide it by the target count of the whole step."""
    logits = logits.flatten(0, 1).float()  # bf16 has 2 to 3 digits, and this is a sum of hundreds
    return cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def summed_loss(model, batch):
    """Return `summed_cross_entropy` of a batch."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return summed_cross_entropy(logits, batch["targets"])


def join():
    """Join the other ranks; return this rank's device: its own GPU, or the CPU."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("no rank: start it with torchrun --standalone --nproc-per-node RANKS SCRIPT")
    number, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if 0 < gpus <= number:
        sys.exit(f"no GPU for local rank {number}: start no more than {gpus} ranks on this node")
    store, rank, ranks = next(dist.rendezvous("env://"))
    store.set(f"GPUs of {rank}", str(gpus))  # gloo and NCCL ranks would both hang
    without = [other for other in range(ranks) if store.get(f"GPUs of {other}") == b"0"]
    if 0 < len(without) < ranks:
        sys.exit(f"ranks {without} find no GPU, and the others do: all need one, or none")
    if not gpus:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=device)
    return device
