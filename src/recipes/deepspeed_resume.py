"""Train a small network with DeepSpeed; started again after a crash, it goes on by itself.

deepspeed --num_gpus 2 deepspeed_resume.py --deepspeed_config config.json --save state
torchrun --standalone --nproc-per-node 2 deepspeed_resume.py ...  (the same options)
If --save has a checkpoint, it resumes from the last one; with --resume, it insists on one. On CPUs
both commands need DS_ACCELERATOR=cpu.
"""

import argparse
from itertools import islice
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import RepeatingLoader
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset


def arguments():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=8, help="in all; default: 8")
    options.add_argument("--save", required=True, help="a folder that all nodes share")
    options.add_argument("--interval", type=int, default=2, help="steps between them; default: 2")
    options.add_argument("--resume", action="store_true", help="stop if --save has no checkpoint")
    options.add_argument("--crash-at", type=int, help="a step in which the last rank fails")
    options.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    return deepspeed.add_config_arguments(options).parse_args()


def network():
    """Return a network with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))


def dataset():
    """Return 96 random inputs, and targets that are a function of them."""
    inputs = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :16].sin())


def train_step(engine, batches):
    """Train on the micro-batches of one step; return the step's loss, over all ranks."""
    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, targets = (part.to(engine.device) for part in next(batches))
        loss = mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / engine.gradient_accumulation_steps() / dist.get_world_size()


def check_shared(folder):
    """Raise unless all ranks see the same last checkpoint: they would resume at different steps."""
    latest, seen = Path(folder, "latest"), [None] * dist.get_world_size()
    dist.all_gather_object(seen, latest.read_text() if latest.exists() else "none")
    if len(set(seen)) > 1:
        raise RuntimeError(f"--save has to be a folder that all nodes share: the ranks see {seen}")


def main():
    options = arguments()
    if not torch.cuda.is_available():  # or DeepSpeed compiles a collective for CPUs: minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = network()
    engine, _, loader, _ = deepspeed.initialize(
        args=options, model=model, model_parameters=model.parameters(), training_data=dataset()
    )
    check_shared(options.save)
    path, client_state = engine.load_checkpoint(options.save)  # (None, None): no checkpoint
    if options.resume and path is None:
        raise FileNotFoundError(f"no checkpoint in {options.save}")
    start = client_state["step"] if client_state else 0
    if start >= options.steps and dist.get_rank() == 0:
        print(f"already at step {start}")
    accumulated = engine.gradient_accumulation_steps()
    batches = islice(RepeatingLoader(loader), start * accumulated, None)
    for step in range(start, options.steps):
        if step == options.crash_at and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError(f"failed in step {step}, as ordered")
        loss = train_step(engine, batches)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.7f}", flush=True)
        if (step + 1) % options.interval == 0:
            engine.save_checkpoint(options.save, client_state={"step": step + 1})  # every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
