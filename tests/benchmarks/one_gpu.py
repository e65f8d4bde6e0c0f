"""`python -m tests.benchmarks.one_gpu`: what one GPU shows, as tables of the page "On a GPU".

Every table is written as it ends, in the form in which `book/records.py` keeps what a chapter
showed. Kernels that send messages run on one rank, with NCCL: what they cost beside the messages.
Contenders take turns and are compared: two that do not compute the same fail. With `--device cpu`
all of it runs on sizes for a CPU, which says whether it works and nothing else.
"""

import argparse
import copy
import gc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from naranhi import (
    context_parallel,
    costs,
    data_parallel,
    expert_parallel,
    measure,
    models,
    pipeline,
    schedules,
    show,
    zero,
)
from naranhi.autograd import SavedTensors, Splittable, recompute, splittable
from naranhi.measure import baselines
from naranhi.tensor_parallel import vocabulary_cross_entropy

REPEATS = 20


class Sizes(NamedTuple):
    """How large what is measured is. A head is 64 wide, a sequence is of `sequence` tokens."""

    copied: int  # bytes
    product: int
    hidden: int  # of models
    blocks: int
    rows: int  # sequences of a micro-batch
    sequence: int
    widths: tuple[int, ...]  # of blocks
    sequences: tuple[int, ...]  # of attention


SIZES = {
    "cuda": Sizes(
        2**30, 8192, 1024, 8, 4, 1024, (512, 1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192)
    ),
    "cpu": Sizes(2**20, 64, 128, 2, 4, 32, (64, 128), (32, 64)),
}


class Machine:
    """A device, the sizes that suit it, and clocks and counters for it."""

    def __init__(self, device):
        self.name, self.sizes, self.gpu = device, SIZES[device], device == "cuda"

    def settle(self):
        if self.gpu:
            torch.cuda.synchronize()

    def now(self):
        self.settle()
        return perf_counter()

    def allocated(self):
        """Bytes of tensors on the GPU, as its allocator counts them; None on a CPU."""
        gc.collect()
        return torch.cuda.memory_allocated() if self.gpu else None

    def most(self, run):
        """The bytes allocated at most during a run, beyond those before; None on a CPU."""
        if not self.gpu:
            run()
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def block(self, hidden, sequence, attention="sdpa", dropout=0.0, blocks=1):
        """GPT-2's blocks in fp32, where they compute."""
        config = models.gpt2_config(16, sequence, hidden, hidden // 64, blocks)
        _, *layers, _ = models.gpt2(config, attention=attention, dropout=dropout)
        return nn.Sequential(*layers).to(self.name)

    def hidden_states(self, rows, sequence, hidden, dtype=torch.bfloat16):
        return torch.randn(rows, sequence, hidden, device=self.name, dtype=dtype)


def limits(machine):
    """The rates of the hardware: memory, the bus to the host, products by format, launches."""
    size, n, device = machine.sizes.copied, machine.sizes.product, machine.name
    rows = [["copy in memory", size, 2 * size / measure.copy_seconds([size], device)[size]]]
    rows = [[what, show.size(bytes), show.rate(rate)] for what, bytes, rate in rows]
    there = torch.empty(size, dtype=torch.uint8, device=device)
    for name, host in hosts(machine, size).items():
        runs = {"to the device": partial(there.copy_, host), "back": partial(host.copy_, there)}
        best = measure.best_seconds(runs, device, repeats=5)
        rows += [
            [f"copy {way}, {name} memory", show.size(size), show.rate(size / best[way])]
            for way in runs
        ]
    for name, run in products(machine, n).items():
        seconds = measure.best_seconds({name: run}, device)[name]
        rows.append([f"product, {name}", f"{n} x {n}", show.rate(2 * n**3 / seconds, "FLOP/s")])
    one = torch.ones(1, device=device)
    seconds = measure.best_seconds({None: partial(one.add_, 1)}, device)[None]
    rows.append(["launch of a kernel", "1 element", show.seconds(seconds)])
    return ["of this machine", "size", "at best"], rows


def hosts(machine, size):
    host = torch.empty(size, dtype=torch.uint8)
    return {"pageable": host, **({"pinned": host.pin_memory()} if machine.gpu else {})}


def products(machine, n):
    """{format: a product of two n x n matrices}, each in the hardware's own way."""
    a, b = torch.randn(2, n, n, device=machine.name)

    def in_fp32(precision):
        def run():
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            torch.mm(a, b)
            torch.set_float32_matmul_precision(before)

        return run

    runs = {"fp32": in_fp32("highest")}
    if machine.gpu:
        runs["tf32"] = in_fp32("high")
    for dtype in (torch.bfloat16, torch.float16):
        runs[str(dtype).removeprefix("torch.")] = partial(torch.mm, a.to(dtype), b.to(dtype))
    if machine.gpu and torch.cuda.get_device_capability() >= (8, 9):
        scale = torch.ones((), device=machine.name)
        left, right = (x.to(torch.float8_e4m3fn) for x in (a, b.t().contiguous()))
        runs["e4m3"] = partial(
            torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16
        )
    return runs


def block_parts(machine):
    """F, I and W of a GPT-2 block in bf16, by its width."""
    rows, sequence = machine.sizes.rows, machine.sizes.sequence
    lines = []
    for hidden in machine.sizes.widths:
        [layer] = splittable([machine.block(hidden, sequence).to(torch.bfloat16)])
        parts = [module for module in layer.modules() if isinstance(module, Splittable)]
        x = machine.hidden_states(rows, sequence, hidden).requires_grad_()
        runs = [split_run(machine, layer, parts, x) for _ in range(REPEATS)][3:]
        times = [median(series) for series in zip(*runs, strict=True)]
        # Products of the four Linears, 12 h² weights; causal attention's own, half of the square.
        linear, scores = 24 * rows * sequence * hidden**2, 2 * rows * sequence**2 * hidden
        done = linear + scores, linear + 2.5 * scores, linear
        rates = [show.rate(f / seconds, "FLOP/s") for f, seconds in zip(done, times, strict=True)]
        lines.append([hidden, *map(show.seconds, times), *rates])
        del layer, parts, x
    return ["width", "F", "I", "W", "rate of F", "of I", "of W"], lines


def split_run(machine, layer, parts, x):
    """Seconds of the forward, of the input gradients, of the weight gradients."""
    layer.zero_grad()
    left = []
    for part in parts:
        part.defer = left.append
    start = machine.now()
    y = layer(x)
    forward = machine.now()
    gradient = torch.ones_like(y)
    before = machine.now()
    y.backward(gradient)
    inputs = machine.now()
    for weights in left:
        weights()
    end = machine.now()
    for part in parts:
        part.defer = None
    return forward - start, inputs - before, end - inputs


def attention_memory(machine):
    """A block with attention written out, and fused: counted, allocated, and the time."""
    hidden, lines = machine.sizes.hidden, []
    for sequence in machine.sizes.sequences:
        for attention in ("eager", "sdpa"):
            block = machine.block(hidden, sequence, attention, dropout=0.1).to(torch.bfloat16)
            x = machine.hidden_states(1, sequence, hidden).requires_grad_()
            lines.append([sequence, attention, *kept(machine, block, x)])
            del block, x
    return ["tokens", "attention", *KEPT], lines


KEPT = "counted", "allocated", "at most", "forward and backward"


def kept(machine, layer, x):
    """What a layer keeps for its backward, in bytes: counted, allocated, the peak; the time."""
    layer(x).sum().backward()  # what is allocated once: gradients, workspaces
    before = machine.allocated()
    with SavedTensors([layer]) as saved:
        y = layer(x)
    # The input was there before; whether the output is kept or not, it is allocated.
    allocated = machine.allocated() - before - y.nbytes if machine.gpu else None
    del y

    def run():
        layer(x).sum().backward()

    best = measure.best_seconds({None: run}, machine.name, repeats=5)[None]
    sizes = [
        None if b is None else show.size(b)
        for b in (saved.bytes - x.nbytes, allocated, machine.most(run))
    ]
    return [*sizes, show.seconds(best)]


def recomputation(machine):
    """The layer of the formula, with what it recomputes."""
    sizes = machine.sizes
    hidden, s, b = 2 * sizes.hidden, sizes.sequence, sizes.rows
    lines = []
    for kind in ("none", "selective", "full"):
        layer = models.TransformerLayer(hidden, hidden // 128, recompute=kind)
        layer = layer.to(machine.name, torch.bfloat16)
        x = machine.hidden_states(s, b, hidden).requires_grad_()
        formula = costs.transformer_layer_bytes(s, b, hidden, hidden // 128, recompute=kind)
        lines.append([kind, show.size(formula - x.nbytes), *kept(machine, layer, x)])
        del layer, x
    return ["recomputed", "formula", *KEPT], lines


def model_state(machine):
    """Bytes for each parameter, after a step of AdamW, on the one rank."""
    lines = []
    for precision in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            torch.manual_seed(0)
            before = machine.allocated()
            model = machine.block(machine.sizes.hidden, 64, blocks=machine.sizes.blocks)
            count = sum(p.numel() for p in model.parameters())
            sharded = zero.Zero(model, stage, units=model, precision=precision)
            optimizer = torch.optim.AdamW(sharded.param_groups)
            x = machine.hidden_states(1, 64, machine.sizes.hidden, torch.float32)

            def step(model=model, sharded=sharded, optimizer=optimizer, x=x):
                model(x).square().mean().backward()
                sharded.step(optimizer)

            step()
            machine.settle()
            counted = costs.zero_bytes(1, 1, stage, precision)
            held = (machine.allocated() - before - x.nbytes) / count if machine.gpu else None
            added = machine.most(step)
            most = held + added / count if machine.gpu else None
            lines.append([precision, stage, counted, held, most])
            sharded.close()
            del model, sharded, optimizer, x, step
    return ["computes in", "stage", "paper", "between steps", "at most in a step"], lines


class Contest(NamedTuple):
    """`make` gives what is run, by name; a run returns tensors that `close` takes for equal."""

    name: str
    make: dict[str, Callable[[], Callable[[], list[torch.Tensor]]]]
    tolerance: float


def beside(machine):
    """Our kernels and torch's on one rank: time, and the most bytes that a run adds."""
    lines = []
    with measure.unchecked_group(timeout=60.0) as group:
        for contest in contests(machine, group):
            made = {name: make() for name, make in contest.make.items()}
            agree(contest, made)
            times = measure.interleaved(made, repeats=REPEATS, group=group)
            medians = {name: measure.median(series) for name, series in times.items()}
            own = next(iter(medians.values()))
            for name, run in made.items():
                peak = machine.most(run)
                ratio = medians[name] / own
                size = None if peak is None else show.size(peak)
                lines.append([contest.name, name, show.seconds(medians[name]), ratio, size])
            del made, run
            gc.collect()
    return ["work", "engine", "a run", "over the first", "bytes it adds"], lines


def agree(contest, made):
    """Raise AssertionError where a contender's result is not the first one's."""
    first = None
    for name, run in made.items():
        result = [x.detach().float().clone() for x in run()]
        first = first or result
        for x, other in zip(result, first, strict=True):
            off = ((x - other).norm() / other.norm()).item()
            if not off <= contest.tolerance:
                raise AssertionError(f"{contest.name}: {name} is off by {off:.1e}")


def contests(machine, group):
    """What is compared, in the order in which it is told."""
    sizes, device = machine.sizes, machine.name
    for hidden in (sizes.hidden, 2 * sizes.hidden):
        torch.manual_seed(0)
        blocks = machine.block(hidden, sizes.sequence, blocks=sizes.blocks)
        x = machine.hidden_states(sizes.rows, sizes.sequence, hidden, torch.float32)
        yield sharded(blocks, x, group)
        blocks, x = blocks.to(torch.bfloat16), x.bfloat16()
        yield replicas(blocks, x, group)
    yield recomputing(blocks, x)
    yield one_stage(blocks, x, group)
    for rows, sequence in ((sizes.rows, sizes.sequence), (1, 32 * sizes.sequence)):
        shape = 3, rows, sizes.hidden // 64, sequence, 64
        yield attention(*torch.randn(shape, device=device, dtype=torch.bfloat16), group)
    yield experts(machine, group)
    yield cross_entropy(machine, group)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def replicas(blocks, x, group):
    def trained(wrap):
        model = copy.deepcopy(blocks)
        called = wrap(model)

        def run():
            model.zero_grad()
            called(x).float().square().mean().backward()
            return gradients(model)

        return run

    def ours(model):
        data_parallel.DDP(model, group)
        return model

    make = {
        "the model alone": lambda model: model,
        "naranhi": ours,
        "torch DistributedDataParallel": partial(
            DistributedDataParallel, process_group=group, gradient_as_bucket_view=True
        ),
    }
    make = {name: partial(trained, wrap) for name, wrap in make.items()}
    return Contest(f"data parallelism, width {x.shape[-1]:,}", make, 1e-2)


def recomputing(blocks, x):
    def trained(call):
        model, given = copy.deepcopy(blocks), x.clone().requires_grad_()

        def run():
            model.zero_grad()
            y = given
            for block in model:
                y = call(block, y)
            y.float().square().mean().backward()
            return gradients(model)

        return run

    make = {
        "nothing": lambda block, y: block(y),
        "naranhi": recompute,
        "torch checkpoint": partial(checkpoint, use_reentrant=False),
    }
    make = {name: partial(trained, call) for name, call in make.items()}
    return Contest(f"recomputation, width {x.shape[-1]:,}", make, 1e-2)


def one_stage(blocks, x, group, microbatches=4):
    """1F1B on one rank: a micro-batch after the other."""
    target = torch.zeros_like(x)

    def loss(output, target):
        return (output.float() - target.float()).square().sum() / x.numel()

    def loop():
        model = copy.deepcopy(blocks)

        def run():
            model.zero_grad()
            for part, goal in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
                loss(model(part), goal).backward()
            return gradients(model)

        return run

    def ours():
        layers = list(copy.deepcopy(blocks))
        pipe = pipeline.Pipeline(layers, schedules.one_f_one_b(1, microbatches), loss, group=group)

        def run():
            nn.ModuleList(layers).zero_grad()
            pipe.step(x, target, 1)
            return gradients(nn.ModuleList(layers))

        return run

    def torchs():
        model = copy.deepcopy(blocks)
        stage = PipelineStage(model, 0, 1, x.device, group=group)
        engine = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)

        def run():
            model.zero_grad()
            engine.step(x, target=target, losses=[], return_outputs=False)
            return gradients(model)

        return run

    make = {"a loop": loop, "naranhi": ours, "torch Schedule1F1B": torchs}
    return Contest(f"1F1B, {microbatches} micro-batches", make, 1e-2)


def sharded(blocks, x, group):
    """ZeRO-3 with weights in fp32 that compute in bf16, a step of SGD."""
    rate = 0.1

    def ours():
        model = copy.deepcopy(blocks)
        engine = zero.Zero(model, 3, units=model, precision="bf16", group=group)
        optimizer = torch.optim.SGD(engine.param_groups, lr=rate)

        def run():
            loss = model(x).square().mean()
            loss.backward()
            engine.step(optimizer)
            return [loss]

        return run

    def torchs():
        model = copy.deepcopy(blocks)
        mesh = DeviceMesh.from_group(group, x.device.type)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)

        def run():
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss]

        return run

    def deepspeeds():
        deepspeed = baselines.deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")
        model = copy.deepcopy(blocks)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=rate),
            config={
                "train_micro_batch_size_per_gpu": len(x),
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )

        def run():
            loss = engine(x.bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
            return [loss]

        return run

    make = {"naranhi": ours, "torch fully_shard": torchs}
    if importlib.util.find_spec("deepspeed"):
        make["DeepSpeed"] = deepspeeds
    return Contest(f"ZeRO-3, width {x.shape[-1]:,}", make, 1e-2)


def attention(q, k, v, group):
    def trained(call):
        own = [part.clone().requires_grad_() for part in (q, k, v)]

        def run():
            for part in own:
                part.grad = None
            call(*own).float().sum().backward()
            return [part.grad for part in own]

        return run

    make = {
        "torch, fused": partial(F.scaled_dot_product_attention, is_causal=True),
        "naranhi ring": partial(context_parallel.ring_attention, group=group),
        "naranhi gathered": partial(context_parallel.gathered_attention, group=group),
        "naranhi Ulysses": partial(context_parallel.ulysses_attention, group=group),
    }
    make = {name: partial(trained, call) for name, call in make.items()}
    return Contest(f"attention, {q.shape[2]:,} tokens", make, 2e-2)


def experts(machine, group):
    """Eight experts, two for each token, beside a loop over the experts without any dispatch."""
    sizes, device = machine.sizes, machine.name
    torch.manual_seed(1)
    moe = expert_parallel.MoE(sizes.hidden, 4 * sizes.hidden, 8, 2, group).to(device)
    tokens = machine.hidden_states(1, sizes.rows * sizes.sequence, sizes.hidden, torch.float32)[
        0
    ].requires_grad_()

    def loop(tokens):
        probabilities = moe.router(tokens).softmax(-1)
        values, chosen = probabilities.topk(2)
        gates = values / values.sum(-1, keepdim=True)
        output = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(moe.up, moe.down, strict=True)):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            done = F.gelu(tokens[token] @ up) @ down
            output = output.index_add(0, token, gates[token, choice, None] * done)
        return output

    def trained(call):
        def run():
            moe.zero_grad()
            tokens.grad = None
            call(tokens).square().mean().backward()
            return [moe.up.grad, moe.down.grad, tokens.grad]

        return run

    make = {"a loop over the experts": loop, "naranhi": lambda tokens: moe(tokens)[0]}
    make = {name: partial(trained, call) for name, call in make.items()}
    return Contest("8 experts, fp32", make, 1e-3)


def cross_entropy(machine, group):
    count, words = machine.sizes.rows * machine.sizes.sequence, 50 * machine.sizes.hidden
    logits = torch.randn(1, count, words, device=machine.name, requires_grad=True)
    targets = torch.randint(words, (1, count), device=machine.name)

    def trained(call):
        def run():
            logits.grad = None
            call().backward()
            return [logits.grad]

        return run

    make = {
        "torch": lambda: F.cross_entropy(logits[0], targets[0], reduction="sum"),
        "naranhi": lambda: vocabulary_cross_entropy(logits, targets, group=group),
    }
    return Contest(
        "cross-entropy", {name: partial(trained, call) for name, call in make.items()}, 1e-3
    )


TABLES = {
    "limits": limits,
    "block-parts": block_parts,
    "attention-memory": attention_memory,
    "recomputation": recomputation,
    "model-state": model_state,
    "beside": beside,
}


def shown(head, rows):
    """A table as text, as `show.table` writes it."""
    InteractiveShell.instance()
    with capture_output() as captured:
        show.table(rows, head, measured=True)
    return captured.outputs[0].data["text/plain"]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.one_gpu")
    parser.add_argument("--into", type=Path, required=True, help="the file of the tables")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--only", nargs="*", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    return record(options)


def record(options):
    """Make each table and write it; 1 if one of them failed, whose error is printed."""
    start, failed, machine = perf_counter(), False, Machine(options.device)
    options.into.parent.mkdir(parents=True, exist_ok=True)
    # The tables of an earlier run stay until all of these are there: a page shows them.
    part, left = options.into.with_suffix(".part.json"), {}
    if options.into.exists():
        left = json.loads(options.into.read_text())["cells"]
        left = {name: cell for name, cell in left.items() if name not in options.only}
    executed = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if machine.gpu else "gloo"
        store = dist.FileStore(f"{folder}/store", 1)
        os.environ["LOCAL_RANK"] = "0"  # which DeepSpeed reads
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        for name in options.only:
            begun = perf_counter()
            try:
                text = shown(*TABLES[name](machine))
            except Exception:  # the other tables are worth having
                traceback.print_exc()
                failed = True
                continue
            print(f"{name}, {perf_counter() - begun:.0f} s\n{text}\n", flush=True)
            cells[name] = {"outputs": [{"text": text}]}
            executed["seconds"] = round(perf_counter() - start)
            content = {"executed": executed, "cells": {**left, **cells}}
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        dist.destroy_process_group()
    if cells and (not failed or not options.into.exists()):
        part.replace(options.into)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
