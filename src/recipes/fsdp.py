"""Train GPT-2 with fully_shard (FSDP2): each rank has a shard of every parameter.

torchrun --standalone --nproc-per-node 4 fsdp.py --bf16 --save state
torchrun --standalone --nproc-per-node 2 fsdp.py --bf16 --save state --resume --steps 100
"""

import os
import shutil
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_and_data import (
    IGNORE_INDEX,
    Collate,
    join,
    load_model,
    load_passages,
    make_optimizer,
    parser,
    rows_per_rank,
    summed_loss,
    without_weights,
)
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def arguments():
    options = parser(__doc__)
    options.add_argument("--bf16", action="store_true", help="compute and reduce in bfloat16")
    options.add_argument("--save", help="a folder for the state after the last step")
    options.add_argument("--resume", action="store_true", help="begin with what is saved there")
    return options.parse_args()


def shard(options, device):
    """The model in shards. It is whole on rank 0 only, and there on the CPU."""
    with torch.device("meta"):  # shapes without memory
        model = without_weights(options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    whole = load_model(options).state_dict() if dist.get_rank() == 0 else {}
    from_rank_0 = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole, options=from_rank_0)
    return model


def save(state, folder):
    """Save beside the state that is there, then take its place: one of them is always whole."""
    new, old = f"{folder}.new", f"{folder}.old"
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)  # of a save that was killed
    dist.barrier()
    dcp.save(state, checkpoint_id=new)
    if dist.get_rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(folder):
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)


def main():
    options, device = arguments(), join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = shard(options, device)
    data = load_passages(options)
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(
        data,
        rows_per_rank(options, ranks),
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )
    optimizer = make_optimizer(options, model.parameters())

    state = {"step": 0}
    if options.resume:
        state["model"], state["optimizer"] = states.get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=options.save)  # shards for as many ranks as there are now
        states.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    # For dropout: another mask on each rank, and after a resume.
    torch.manual_seed(options.seed + 1 + rank + ranks * state["step"])
    for step, batch in enumerate(islice(loader, state["step"], options.steps), state["step"]):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count)
        loss = summed_loss(model, batch) / count
        (ranks * loss).backward()  # fully_shard divides the sum of the gradients by the ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        state["step"] = step + 1
    if options.save:
        state["model"], state["optimizer"] = states.get_state_dict(model, optimizer)
        save(state, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
