"""Train GPT-2 on a pipeline of torch.distributed.pipelining: each rank has a run of its blocks.

torchrun --standalone --nproc-per-node 4 pipeline.py --microbatches 4
"""

import sys

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
    summed_cross_entropy,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, RandomSampler


def arguments():
    options = parser(__doc__)
    options.add_argument("--microbatches", type=int, default=4)
    given = options.parse_args()
    if given.microbatches < 1 or given.batch % given.microbatches:
        options.error(f"--microbatches {given.microbatches} has to divide --batch {given.batch}")
    return given


class Stage(torch.nn.Module):
    """This rank's run of blocks; the first rank also has the embeddings, the last the head."""

    def __init__(self, model, rank, ranks):
        super().__init__()
        gpt, blocks = model.transformer, list(model.transformer.h)
        ends = [len(blocks) * stage // ranks for stage in range(ranks + 1)]
        self.blocks = torch.nn.ModuleList(blocks[ends[rank] : ends[rank + 1]])
        self.wte, self.wpe, self.drop = (gpt.wte, gpt.wpe, gpt.drop) if rank == 0 else 3 * [None]
        self.ln_f, self.head = (gpt.ln_f, model.lm_head) if rank == ranks - 1 else (None, None)

    def forward(self, x):
        if self.wte is not None:
            x = self.drop(self.wte(x) + self.wpe.weight[: x.shape[1]])
        for block in self.blocks:  # attention is causal, and padding comes last: no mask is needed
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def main():
    options, device = arguments(), join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = load_model(options)
    if ranks > min(options.microbatches, len(model.transformer.h)):
        sys.exit(
            f"{ranks} ranks: each needs a block, of {len(model.transformer.h)}, and there have to "
            f"be as many --microbatches, of which there are {options.microbatches}"
        )
    stage = Stage(model, rank, ranks).to(device)
    torch.manual_seed(options.seed + 1 + rank)  # for dropout: a different mask on each rank
    tied = model.lm_head.weight  # and the embedding's: the first and the last rank have a copy each
    ends = dist.new_group(sorted({0, ranks - 1}))
    count = 0

    def loss_fn(logits, targets):  # of a micro-batch
        return summed_cross_entropy(logits, targets) / count

    schedule = Schedule1F1B(
        PipelineStage(stage, rank, ranks, device),
        options.microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    data = load_passages(options)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(options.seed))
    loader = DataLoader(
        data,
        options.batch,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions, "max_length"),
    )
    optimizer = make_optimizer(options, stage.parameters())

    for step, batch in zip(range(options.steps), loader, strict=False):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        losses = []
        inputs = [batch["input_ids"]] if rank == 0 else []
        schedule.step(*inputs, target=batch["targets"], losses=losses, return_outputs=False)
        if ranks > 1 and rank in (0, ranks - 1):
            dist.all_reduce(tied.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
        if rank == ranks - 1:
            print(f"step {step}: loss {sum(losses).item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
