"""Each part of the kernels, small, on tensors of a device: run by ranks of any backend.

`PARTS[name](device)` is called on every rank of the default group and raises where the result is
not that of one process, or of torch's own collective. On one rank nothing travels, but every branch
for the device is taken.
"""

import tempfile
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import small_gpt2
import torch
import torch.distributed as dist
from torch import nn

from naranhi import (
    collectives,
    context_parallel,
    data_parallel,
    divergence,
    expert_parallel,
    measure,
    models,
    pipeline,
    schedules,
    train,
    zero,
)
from naranhi.autograd import recompute, splittable
from naranhi.checkpoint import Checkpoints
from naranhi.data_parallel import DDP
from naranhi.distributed import Mesh, streams
from naranhi.divergence import gallery
from naranhi.tensor_parallel import gpt2_plan, parallelize, vocabulary_cross_entropy
from naranhi.tensor_parallel.random import fork_rng

WIDTH, ROWS = 16, 8


def squared_error(output, target):
    return (output - target).square().sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def mlp(device, blocks=4):
    torch.manual_seed(0)
    layers = [layer.to(device) for layer in models.mlp(blocks, WIDTH)]
    inputs, targets = torch.randn(2, ROWS, WIDTH).to(device)
    return layers, inputs, targets


def gpt2(device):
    torch.manual_seed(0)
    config = models.gpt2_config(vocabulary=48, positions=12, hidden=16, heads=2, blocks=1)
    layers = [layer.to(device) for layer in models.gpt2(config, dropout=0.0)]
    return layers, torch.randint(48, (4, 10)).to(device)


def place():
    return dist.get_rank(), dist.get_world_size()


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def run_collectives(device):
    rank, ranks = place()
    own = torch.arange(6.0, device=device) + 10 * rank
    rows = torch.stack([torch.arange(6.0, device=device) + 10 * peer for peer in range(ranks)])
    for algorithm in ("ring", "halving_doubling", "doubling"):
        total = own.clone()
        collectives.all_reduce(total, algorithm=algorithm)
        assert torch.equal(total, rows.sum(0)), algorithm
    gathered = torch.empty_like(rows)
    collectives.all_gather(gathered, own)
    assert torch.equal(gathered, rows)
    part = torch.empty_like(own)
    collectives.reduce_scatter(part, rows + rank)
    assert torch.equal(part, ranks * rows[rank] + sum(range(ranks)))
    exchanged = torch.empty_like(rows)
    collectives.all_to_all(exchanged, rows + 100 * rank)
    assert torch.equal(exchanged, torch.stack([rows[rank] + 100 * peer for peer in range(ranks)]))
    copied = own.clone()
    collectives.broadcast(copied, ranks - 1)
    assert torch.equal(copied, rows[-1])
    reduced = own.clone()
    collectives.reduce(reduced)
    assert torch.equal(reduced, rows.sum(0) if rank == 0 else own)
    collectives.gather(gathered.zero_() if rank == 0 else None, own)
    assert rank or torch.equal(gathered, rows)
    collectives.scatter(part, rows if rank == 0 else None)
    assert torch.equal(part, rows[rank])
    large = torch.full([2**20 + 3], rank + 1.0, device=device)  # several chunks in flight
    collectives.all_reduce(large)
    assert large.eq(ranks * (ranks + 1) / 2).all()
    theirs = own.clone()
    dist.all_reduce(theirs)
    assert torch.equal(theirs, rows.sum(0))


def run_pipeline(device):
    _, ranks = place()
    kinds = {
        "gpipe": schedules.gpipe(ranks, 4),
        "1F1B": schedules.one_f_one_b(ranks, 4),
        "interleaved": schedules.interleaved(ranks, 4, 2),
        "H1": schedules.zero_bubble_h1(ranks, 4),
        "ZB-V": schedules.zero_bubble_v(ranks, 4),
    }
    for name, schedule in kinds.items():
        layers, inputs, targets = mlp(device)
        expected = deepcopy(layers)
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (squared_error(nn.Sequential(*expected)(x), y) / inputs.numel()).backward()
        if name in ("H1", "ZB-V"):
            layers = splittable(layers)
        with pipeline.Pipeline(layers, schedule, squared_error) as pipe:
            for _ in range(3):  # see Note [The first steps between GPUs]
                for layer in layers:
                    layer.zero_grad()
                pipe.step(inputs, targets, inputs.numel())
            for stage in pipe.stages.values():
                for number, layer in enumerate(stage.layers, stage.first):
                    for param, other in zip(
                        layer.parameters(), expected[number].parameters(), strict=True
                    ):
                        close(param.grad, other.grad)


def run_pipedream(device):
    _, ranks = place()
    schedule = schedules.pipedream(ranks, 4)
    layers, inputs, targets = mlp(device)
    before = [param.detach().clone() for param in nn.ModuleList(layers).parameters()]
    with pipeline.Pipeline(layers, schedule, squared_error, optimizer=sgd) as pipe:
        losses = [pipe.step(inputs, targets, inputs.numel() // 4) for _ in range(12)]
        own = {id(param) for stage in pipe.stages.values() for param in stage.parameters()}
    for param, old in zip(nn.ModuleList(layers).parameters(), before, strict=True):
        assert torch.equal(param, old) == (id(param) not in own)
    if losses[0] is not None:
        assert losses[-1] < losses[0]


def run_data_parallel(device):
    rank, ranks = place()
    layers, inputs, targets = mlp(device)
    expected, model = nn.Sequential(*deepcopy(layers)), nn.Sequential(*layers)
    (squared_error(expected(inputs), targets) / ROWS).backward()
    shares = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
    count = data_parallel.global_count(len(shares[0]))
    assert count == ROWS
    parallel = DDP(model, bucket_bytes=2000, check_finite=True)
    (squared_error(model(shares[0]), shares[1]) / count).backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        close(param.grad, other.grad)
    parallel.close()


def run_zero(device):
    rank, ranks = place()
    for stage in (1, 2, 3):
        for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.03)):
            layers, inputs, targets = mlp(device)
            expected, model = nn.Sequential(*deepcopy(layers)), nn.Sequential(*layers)
            theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
            sharded = zero.Zero(model, stage, precision=precision)
            ours = torch.optim.SGD(sharded.param_groups, lr=0.1)
            for _ in range(2):
                theirs.zero_grad()
                (squared_error(expected(inputs), targets) / inputs.numel()).backward()
                norm = nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
                theirs.step()
                x, y = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
                (squared_error(model(x), y) / inputs.numel()).backward()
                close(torch.tensor(sharded.clip_grad_norm_(1.0)), norm.cpu(), tolerance)
                sharded.step(ours)
            with sharded.gathered():
                for param, other in zip(model.parameters(), expected.parameters(), strict=True):
                    close(param, other, tolerance)


def run_checkpoint(device):
    """Weights, moments and random numbers of the device are those that were saved."""
    layers, inputs, targets = mlp(device)
    sharded = zero.Zero(nn.Sequential(*layers), 3)
    optimizer = torch.optim.AdamW(sharded.param_groups, lr=0.1)

    def step():
        (squared_error(sharded.model(inputs), targets) / inputs.numel()).backward()
        sharded.step(optimizer)
        with sharded.gathered():
            weights = [param.detach().cpu().clone() for param in sharded.model.parameters()]
        return weights, torch.rand(4, device=device).cpu()

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    step()
    with Checkpoints(folder[0]) as checkpoints:
        checkpoints.save_async(1, sharded, optimizer)
        (expected, drawn), _ = step(), step()
        checkpoints.load(sharded, optimizer)
        weights, drawn_again = step()
    close(weights, expected)
    assert torch.equal(drawn_again, drawn)


def run_tensor_parallel(device):
    layers, tokens = gpt2(device)
    whole = deepcopy(layers)
    targets = tokens.roll(-1, 1)
    expected = models.loss(nn.Sequential(*whole)(tokens), targets) / targets.numel()
    expected.backward()
    parallelize(layers, gpt2_plan())
    output = nn.Sequential(*layers)(tokens)
    loss = vocabulary_cross_entropy(output, targets) / targets.numel()
    loss.backward()
    close(loss.detach(), expected.detach())
    norm = next(
        (param.grad, other.grad)
        for (name, param), (_, other) in zip(
            nn.ModuleList(layers).named_parameters(),
            nn.ModuleList(whole).named_parameters(),
            strict=True,
        )
        if "ln_1.weight" in name
    )
    close(*norm)


def run_random_numbers(device):
    """Outside a split region all ranks draw alike, inside each its own; and it leaves no trace."""
    _, ranks = place()
    torch.manual_seed(3)
    x, drawn = torch.ones(64, device=device), []
    for inside in (False, True, False):
        with fork_rng(x) if inside else nullcontext():
            own = torch.rand_like(x)
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, own)
        different = [peer for peer in range(1, ranks) if not torch.equal(every[peer], every[0])]
        assert different == (list(range(1, ranks)) if inside else [])
        drawn.append(own)
    torch.manual_seed(3)
    assert torch.equal(torch.rand_like(x), drawn[0])
    # On a CPU one number is drawn outside, to seed what is inside; alone nothing is forked.
    if ranks > 1 and x.is_cuda:
        assert torch.equal(torch.rand_like(x), drawn[2])


def run_divergence(device):
    """Whether a step draws random numbers is known, whichever generator it draws from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device)
    inputs = torch.randn(ROWS, WIDTH).to(device)
    for drops in True, False:
        run = lambda model: model(inputs).square().sum().backward()  # noqa: E731
        assert divergence.trace(model.train(drops), run).draws is drops


def run_context_parallel(device):
    """Three ways of attention on parts of a sequence: outputs and gradients of the whole."""
    _, ranks = place()
    torch.manual_seed(0)
    heads = 2 * ranks, ranks, ranks  # of queries, keys and values
    whole = [torch.randn(2, number, 8 * ranks, 4).to(device) for number in heads]
    gradient = torch.randn_like(whole[0])
    for order in context_parallel.ORDERS:
        cut = partial(context_parallel.split_sequence, order=order, dim=2)
        expected = [x.clone().requires_grad_() for x in whole]
        output = nn.functional.scaled_dot_product_attention(
            *expected, is_causal=True, enable_gqa=True
        )
        output.backward(gradient)
        for attention in (
            context_parallel.ring_attention,
            context_parallel.gathered_attention,
            context_parallel.ulysses_attention,
        ):
            own = [cut(x).requires_grad_() for x in whole]
            part = attention(*own, order=order)
            part.backward(cut(gradient))
            close(part, cut(output))
            for x, other in zip(own, expected, strict=True):
                close(x.grad, cut(other.grad))


def run_expert_parallel(device):
    """Experts on ranks that have other tokens: outputs and gradients of one process."""
    rank, ranks = place()
    alone = [dist.new_group([peer]) for peer in range(ranks)][rank]
    tokens = torch.randn(4 * ranks, 16, generator=torch.Generator().manual_seed(0)).to(device)
    outcomes = []
    for group, own in ((alone, tokens), (None, tokens.chunk(ranks)[rank])):
        torch.manual_seed(1)
        moe = expert_parallel.MoE(16, 32, 2 * ranks, 2, group).to(device)
        output, auxiliary = moe(own)
        (output.square().sum() + auxiliary).backward()
        if group is None:
            expert_parallel.sum_gradients(moe)
        outcomes.append((output, auxiliary, moe.router.weight.grad, moe.up.grad))
    (output, auxiliary, router, up), (own, same, summed, experts) = outcomes
    close(own, output.chunk(ranks)[rank])
    close(same, auxiliary)
    close(summed, router)
    close(experts, up.chunk(ranks)[rank])


def run_streams(device):
    """A copy and a product on a side stream, where there are streams."""
    stream = torch.cuda.Stream() if torch.device(device).type == "cuda" else None
    x = torch.arange(1000.0, device=device)
    later = streams.start(lambda value: value * 2, x, stream=stream)
    assert torch.equal(later.wait(), x * 2)


def run_training(device):
    """`naranhi.train` with the ranks as replicas, and as stages: the same losses."""
    rank, ranks = place()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    options = [small_gpt2.write(Path(folder[0])) if rank == 0 else None]
    dist.broadcast_object_list(options)
    common = [*options[0], "--steps", "3", "--microbatches", "2", "--batch", "4", "--lr", "1e-2"]
    replicas = train.losses(" ".join([*common, "--dp", str(ranks)]))
    assert replicas[-1] < replicas[0]
    stages = train.losses(" ".join([*common, "--pp", str(ranks)]))
    close(torch.tensor(stages), torch.tensor(replicas), 1e-4)


def run_recomputation(device):
    layers, inputs, targets = mlp(device)
    plain, model = nn.Sequential(*deepcopy(layers)), nn.Sequential(*layers, nn.Dropout(0.5))
    torch.manual_seed(1)
    squared_error(nn.functional.dropout(plain(inputs), 0.5), targets).backward()
    torch.manual_seed(1)
    squared_error(recompute(model, inputs), targets).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.grad, other.grad)


def run_profile(device):
    layers, inputs, _ = mlp(device)
    profiles = pipeline.profile(layers, inputs, repeats=2)
    assert all(each.forward > 0 and each.backward > 0 for each in profiles)
    assert {each.output_bytes for each in profiles} == {inputs.nbytes}


def run_recorder(device):
    _, ranks = place()
    schedule = schedules.gpipe(ranks, 2)
    layers, inputs, targets = mlp(device)
    recorder = measure.Recorder()
    with pipeline.Pipeline(layers, schedule, squared_error) as pipe:
        pipe.step(inputs, targets, ROWS, recorder=recorder)
    timeline = recorder.gather()
    assert [len(row) for row in timeline.rows] == [4] * ranks
    assert all(span.end > span.start for row in timeline.rows for span in row)


def run_timing(device):
    x = torch.ones(4, device=device)
    times = measure.interleaved({"a product": lambda: x * x}, repeats=3)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, times)
    assert all(each == times for each in every)
    assert len(times["a product"]) == 3
    assert all(seconds > 0 for seconds in times["a product"])


def run_mesh(device):
    _, ranks = place()
    with Mesh(data=ranks) as mesh:
        total = torch.ones(1, device=device)
        dist.all_reduce(total, group=mesh.data)
        assert total.item() == ranks


def run_gallery(device):
    """Its models, batches and messages are on the device that the ranks exchange from."""
    if place()[1] == 2:
        for name, bug in gallery.BUGS.items():
            assert str(bug.hunt(fixed=True)).startswith("no divergence: "), name


PARTS = {
    name.removeprefix("run_"): function
    for name, function in list(globals().items())
    if name.startswith("run_")
}
