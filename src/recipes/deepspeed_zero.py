"""Train GPT-2 with DeepSpeed's ZeRO: the stage is a number in the configuration.

deepspeed --num_gpus 4 deepspeed_zero.py --stage 3          on a node of GPUs
torchrun --standalone --nproc-per-node 4 deepspeed_zero.py  anywhere; on CPUs DS_ACCELERATOR=cpu
"""

from itertools import islice

import deepspeed
import torch
import torch.distributed as dist
from model_and_data import (
    IGNORE_INDEX,
    Collate,
    load_model,
    load_passages,
    make_optimizer,
    parser,
    summed_loss,
)
from torch.utils.data import DataLoader, DistributedSampler

if not torch.cuda.is_available():  # or DeepSpeed compiles a collective for CPUs: minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def arguments():
    options = parser(__doc__)
    options.add_argument("--stage", type=int, default=3, help="of ZeRO: 0 to 3")
    options.add_argument("--bf16", action="store_true", help="parameters in bfloat16")
    options.add_argument("--save", help="a folder for the state after the last step")
    options.add_argument("--resume", action="store_true", help="begin with what is saved there")
    options.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    return options.parse_args()


def main():
    options = arguments()
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = load_model(options)
    torch.manual_seed(options.seed + 1 + rank)  # for dropout: another mask on each rank
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(options, model.parameters()),
        config={
            "train_batch_size": options.batch,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,  # it knows Adam, and asks about others
            "zero_optimization": {"stage": options.stage},
            "bf16": {"enabled": options.bf16},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )
    data = load_passages(options)
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(
        data,
        options.batch // ranks,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )

    start = 0
    if options.resume:
        path, client_state = engine.load_checkpoint(options.save)
        if path is None:
            raise FileNotFoundError(f"no checkpoint in {options.save}")
        start = client_state["step"]
        torch.manual_seed(options.seed + 1 + rank + ranks * start)  # no mask of the first steps
    for step, batch in enumerate(islice(loader, start, options.steps), start):
        batch = batch.to(engine.device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count)
        loss = summed_loss(engine, batch) / count
        engine.backward(ranks * loss)  # DeepSpeed divides the sum of the gradients by the ranks
        engine.step()  # and sets the gradients to zero
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        start = step + 1
    if options.save:
        engine.save_checkpoint(options.save, client_state={"step": start})  # every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
