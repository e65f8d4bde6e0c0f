"""Train GPT-2 on a 2-D mesh: layers are cut across `tp` ranks, and their parts by fully_shard.

torchrun --standalone --nproc-per-node 4 fsdp_tp.py --tp 2
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
    rows_per_rank,
    summed_loss,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler


def as_linear(conv):
    """Return GPT-2's Conv1D as an equivalent nn.Linear, which parallelize_module supports."""
    linear = torch.nn.utils.skip_init(torch.nn.Linear, conv.nx, conv.nf)
    linear.weight.data, linear.bias.data = conv.weight.data.t().contiguous(), conv.bias.data
    return linear


def cut(model, mesh):
    """Cut attention by heads, the MLP by columns, then rows; an all-reduce each."""
    ranks = mesh.size()
    for block in model.transformer.h:
        plan = {
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(),
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(),
        }
        for name in plan:
            block.set_submodule(name, as_linear(block.get_submodule(name)))
        # The rows are all queries, then all keys, then all values. A rank takes
        # consecutive rows, so first put its heads' queries, keys, values together.
        qkv = block.attn.c_attn
        for tensor in (qkv.weight, qkv.bias):
            tensor.data = tensor.data.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
        block.attn.split_size //= ranks
        parallelize_module(block, mesh, plan)


def draw_for_own_heads(model, device, seed):
    """Draw attention's dropout masks from another seed, because each rank has its own heads."""
    on_gpu = device.type == "cuda"
    used = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
    aside = torch.Generator(device).manual_seed(seed)

    def swap(*_):
        state = used.get_state()
        used.set_state(aside.get_state())
        aside.set_state(state)

    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(swap)  # between these two layers
        block.attn.c_proj.register_forward_pre_hook(swap)  # a rank has its own heads


def main():
    options = parser(__doc__)
    options.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    options, device = options.parse_args(), join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.tp < 1 or ranks % options.tp:
        sys.exit(f"--tp {options.tp} has to divide the number of ranks, which is {ranks}")
    sizes = ranks // options.tp, options.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    shares, share = mesh["dp"].size(), mesh["dp"].get_local_rank()
    model = load_model(options).to(device)
    if model.config.n_head % options.tp:
        sys.exit(f"--tp {options.tp} has to divide the model's {model.config.n_head} heads")
    cut(model, mesh["tp"])
    # For dropout: a different mask for each share of the rows, the same within a tp group.
    torch.manual_seed(options.seed + 1 + share)
    draw_for_own_heads(model, device, options.seed + 1 + shares + rank)  # except in attention
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    data = load_passages(options)
    # The ranks of a tp group work on the same rows.
    sampler = DistributedSampler(data, shares, share, seed=options.seed)
    loader = DataLoader(
        data,
        rows_per_rank(options, shares),
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )
    optimizer = make_optimizer(options, model.parameters())

    for step, batch in zip(range(options.steps), loader, strict=False):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        dist.all_reduce(count, group=mesh["dp"].get_group())
        loss = summed_loss(model, batch) / count
        (shares * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), group=mesh["dp"].get_group())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
