"""Train GPT-2 with DeepSpeed's ZeRO: the stage is a number in the configuration.

deepspeed --num_gpus 4 deepspeed_zero.py --stage 3          on a node of GPUs
torchrun --standalone --nproc-per-node 4 deepspeed_zero.py  anywhere; on CPUs DS_ACCELERATOR=cpu
"""

import sys
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
    rows_per_rank,
    summed_loss,
)
from saving import (
    check_new,
    check_settings,
    check_shared,
    parse,
    set_new_lr,
    settings,
    write_settings,
)
from torch.utils.data import DataLoader, DistributedSampler

if not torch.cuda.is_available():  # else DeepSpeed spends minutes compiling for CPUs
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def arguments():
    options = parser(__doc__)
    options.add_argument("--stage", type=int, default=3, help="of ZeRO: 0 to 3")
    options.add_argument("--bf16", action="store_true", help="parameters in bfloat16")
    options.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    return parse(options)


def main():
    options = arguments()
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = load_model(options)
    torch.manual_seed(options.seed + 1 + rank)  # for dropout: a different mask on each rank
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(options, model.parameters()),
        config={
            "train_batch_size": options.batch,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,  # without it, DeepSpeed rejects SGD
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
        rows_per_rank(options, ranks),
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )

    start, layout = 0, {"--stage": options.stage, "--bf16": options.bf16, "WORLD_SIZE": ranks}
    kept = settings(options, data) | layout  # shards are in other files, or other pieces, otherwise
    if options.save:
        check_shared(options.save)  # before the first step, and not after the last
        if not options.resume:
            check_new(options.save)
    if options.resume:
        latest = options.save / "latest"  # has the name of the last checkpoint
        if not latest.exists():
            sys.exit(f"no checkpoint in {options.save}")
        check_settings(options.save / latest.read_text(), kept)
        _, client_state = engine.load_checkpoint(options.save)
        set_new_lr(engine.optimizer, options)
        start = client_state["step"]
        torch.manual_seed(options.seed + 1 + rank + ranks * start)  # not the first steps' masks
    if rank == 0 and start >= options.steps:
        print(f"already at step {start}")
    for step, batch in enumerate(islice(loader, start, options.steps), start):
        batch = batch.to(engine.device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count)
        loss = summed_loss(engine, batch) / count
        engine.backward(ranks * loss)  # DeepSpeed averages gradients over the ranks
        engine.step()  # and sets the gradients to zero
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.save and start < options.steps:
        tag = f"step{options.steps}"
        write_settings(options.save / tag, kept)
        state = {"step": options.steps}
        engine.save_checkpoint(options.save, tag, client_state=state)  # every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
