"""Train GPT-2 with DistributedDataParallel: the whole model on each rank, other rows on each.

torchrun --standalone --nproc-per-node 4 ddp.py
"""

import torch
import torch.distributed as dist
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
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    options, device = parser(__doc__).parse_args(), join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = load_model(options).to(device)
    torch.manual_seed(options.seed + 1 + rank)  # for dropout: a different mask on each rank
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = load_passages(options)
    sampler = DistributedSampler(data, seed=options.seed)  # the same order, different rows
    loader = DataLoader(
        data,
        rows_per_rank(options, ranks),
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )
    optimizer = make_optimizer(options, model.parameters())

    for step, batch in zip(range(options.steps), loader, strict=False):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count)  # of the whole step: ranks have different numbers of targets
        loss = summed_loss(parallel, batch) / count
        (ranks * loss).backward()  # DDP averages gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
