"""Train GPT-2 on DeepSpeed's pipeline engine: the model as a list of layers, cut by the engine.

deepspeed --num_gpus 4 deepspeed_pipeline.py                    on a node of GPUs
torchrun --standalone --nproc-per-node 4 deepspeed_pipeline.py  anywhere; on CPUs DS_ACCELERATOR=cpu
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from model_and_data import (
    IGNORE_INDEX,
    Collate,
    load_model,
    load_passages,
    make_optimizer,
    parser,
    summed_cross_entropy,
)
from torch.utils.data import DataLoader, RandomSampler

if not torch.cuda.is_available():  # else DeepSpeed spends minutes compiling for CPUs
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def arguments():
    options = parser(__doc__)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    given = options.parse_args()
    if given.microbatches < 1 or given.batch % given.microbatches:
        options.error(f"--microbatches {given.microbatches} has to divide --batch {given.batch}")
    return given


class Embedding(torch.nn.Module):
    """Token and position embeddings; as the last layer, with the same weight, the head."""

    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        self.drop = model.transformer.drop

    def forward(self, tokens):
        return self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])


def layers(model):
    """Return GPT-2 as a list of layers; the engine keeps those of its stage."""
    tied = partial(TiedLayerSpec, "embedding", Embedding, model, tied_weight_attr="wte.weight")
    head = tied(forward_fn=lambda layer, x: x @ layer.wte.weight.t())
    return [tied(), *model.transformer.h, model.transformer.ln_f, head]


def main():
    options = arguments()
    deepspeed.init_distributed()
    ranks, pieces = dist.get_world_size(), options.microbatches
    model = load_model(options)
    cut = layers(model)
    if ranks > len(cut):
        sys.exit(f"{ranks} ranks: each needs a layer, and the model has {len(cut)}")

    def loss_fn(logits, labels):  # of a micro-batch; DeepSpeed divides by the number of these
        targets, count = labels
        return pieces * summed_cross_entropy(logits, targets) / count[0]

    module = PipelineModule(
        cut,
        num_stages=ranks,
        loss_fn=loss_fn,
        partition_method="uniform",
        dynamic_shape=True,
    )
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # for dropout
    optimizer = make_optimizer(options, module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_batch_size": options.batch,
            "train_micro_batch_size_per_gpu": options.batch // pieces,  # else one micro-batch
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )
    data, collate = load_passages(options), Collate(options, model.config.n_positions)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(options.seed))
    loader = DataLoader(
        data, options.batch, sampler=sampler, drop_last=True, num_workers=1, collate_fn=collate
    )

    def micro_batches():
        for batch in loader:
            tokens, targets = batch["input_ids"], batch["targets"]
            count = (targets != IGNORE_INDEX).sum().expand(options.batch)  # of the whole step
            parts = zip(*(one.chunk(pieces) for one in (tokens, targets, count)), strict=True)
            yield from ((tokens, (targets, count)) for tokens, targets, count in parts)

    batches = micro_batches()
    for step in range(options.steps):
        loss = engine.train_batch(batches)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
