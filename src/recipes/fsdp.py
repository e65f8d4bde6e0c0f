"""Train GPT-2 with fully_shard (FSDP2): each rank has a shard of every parameter.

torchrun --standalone --nproc-per-node 4 fsdp.py --bf16 --save state
torchrun --standalone --nproc-per-node 2 fsdp.py --bf16 --save state --resume --steps 100
"""

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
from saving import (
    check_new,
    check_settings,
    check_shared,
    finish_save,
    parse,
    save,
    set_new_lr,
    settings,
)
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def arguments():
    options = parser(__doc__)
    options.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    return parse(options)


def shard(options, device):
    """Return the model in shards; only rank 0 loads all of it, on the CPU."""
    with torch.device("meta"):  # shapes without memory
        model = without_weights(options)
    policy = MixedPrecisionPolicy()
    if options.bf16:  # but reduce in fp32: a sum over many ranks needs more digits
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    whole = load_model(options).state_dict() if dist.get_rank() == 0 else {}
    from_rank_0 = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole, options=from_rank_0)
    return model


def main():
    options, device = arguments(), join()
    rank, ranks, data = dist.get_rank(), dist.get_world_size(), load_passages(options)
    kept = settings(options, data)
    if options.save:
        check_shared(options.save.parent)  # before the first step, and not after the last
        finish_save(options.save)
    if options.resume:
        check_settings(options.save, kept)
    elif options.save:
        check_new(options.save)
    model = shard(options, device)
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
        set_new_lr(optimizer, options)
    start = state["step"]
    if rank == 0 and start >= options.steps:
        print(f"already at step {start}")
    # For dropout: a different mask on each rank, and after a resume.
    torch.manual_seed(options.seed + 1 + rank + ranks * start)
    for step, batch in enumerate(islice(loader, start, options.steps), start):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count)
        loss = summed_loss(model, batch) / count
        (ranks * loss).backward()  # fully_shard averages gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        state["step"] = step + 1
    if options.save and state["step"] > start:
        state["model"], state["optimizer"] = states.get_state_dict(model, optimizer)
        save(state, kept, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
