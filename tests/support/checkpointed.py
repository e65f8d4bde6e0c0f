"""What checkpoints are made of: a small GPT-2 on any mesh, a sharded MLP, and the boxes of both."""

import json
from functools import partial

import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi import models, schedules
from naranhi.checkpoint import CheckpointError, Checkpoints
from naranhi.checkpoint.layout import from_json
from naranhi.checkpoint.state import State
from naranhi.distributed import Mesh
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import gpt2_plan, parallelize, vocabulary_cross_entropy
from naranhi.zero import Zero, ZeroStages

ROWS, LENGTH, WORDS = 12, 6, 51  # an odd vocabulary: two tensor ranks pad it


def batch(step):
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return (tokens, torch.ones_like(tokens)), tokens.roll(-1, 1)


class Run:
    """kind: "plain", "zero3", "zero3 copied" (over pairs of ranks), or a mesh of data x tensor x
    pipeline, "2x2x2", or one whose stages are sharded, "2x2x2 zero3". "untied" may follow.

    The optimizer has two parameter groups, and a learning rate that falls.
    """

    def __init__(self, kind, group=None):
        torch.manual_seed(0)
        config = models.gpt2_config(
            vocabulary=WORDS, positions=LENGTH, hidden=16, heads=2, blocks=2
        )
        kind, untied = kind.removesuffix(" untied"), kind.endswith(" untied")
        layers = models.gpt2(config, tied=not untied, dropout=0.0)
        self.kind, self.mesh, self.group, self.sharded = kind, None, group, None
        if kind.startswith("zero"):
            whole = nn.Sequential(*layers)
            groups, axes = grouped(whole.named_parameters()), {"group": group}
            if kind.endswith("copied"):
                pairs = Mesh(data=dist.get_world_size() // 2, tensor=2)
                axes = {"group": pairs.tensor, "replicas": pairs.data}
            self.model = Zero(whole, int(kind[4]), param_groups=groups, **axes)
            groups = self.model.param_groups
        elif kind == "plain":
            self.model = layers
            groups = grouped(nn.ModuleList(layers).named_parameters())
        else:
            kind, _, sharded = kind.partition(" zero")
            data, tensor, pipeline = map(int, kind.split("x"))
            self.mesh, loss = Mesh(data=data, tensor=tensor, pipeline=pipeline), models.loss
            if tensor > 1:
                parallelize(layers, gpt2_plan(), self.mesh.tensor)
                loss = partial(vocabulary_cross_entropy, group=self.mesh.tensor)
            schedule = (
                schedules.interleaved(pipeline, 2, 2)
                if kind == "1x1x2"
                else schedules.gpipe(pipeline, 2)
            )
            axes, shard = {"group": self.mesh.pipeline, "replicas": self.mesh.data}, None
            if sharded:
                schedule = schedules.with_sharding(schedule, int(sharded))
                shard = partial(ZeroStages, param_groups=grouped)
            self.model = Pipeline(layers, schedule, loss, **axes, sharding=shard)
            self.sharded = self.model.sharded
            groups = grouped(nn.ModuleList(self.model.stages.values()).named_parameters())
            if self.sharded:
                groups = self.sharded.param_groups
        # With a smaller eps, Adam makes whole steps of gradients that are nothing but rounding (the
        # bias of the keys), which is another on each mesh and on each processor.
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
        self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self, number):
        """Train on a batch: the loss of the whole."""
        (tokens, mask), targets = batch(number)
        count = targets.numel()
        if self.kind == "plain":
            self.optimizer.zero_grad()
            value = tokens, mask
            for layer in self.model:
                value = layer(value)
            loss = models.loss(value, targets) / count
            loss.backward()
            self.optimizer.step()
        elif self.mesh is None:
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
            loss = models.loss(self.model.model((tokens[rows], mask[rows])), targets[rows]) / count
            loss.backward()
            self.model.step(self.optimizer)
        else:
            several, own = self.mesh.sizes.data, self.mesh.place.data
            rows = [tensor.chunk(several)[own] for tensor in (tokens, mask, targets)]
            if not self.sharded:
                self.optimizer.zero_grad()
            loss = self.model.step(tuple(rows[:2]), rows[2], count)
            self.sharded.step(self.optimizer) if self.sharded else self.optimizer.step()
            has_loss = loss is not None and self.mesh.place.tensor == 0
            loss = loss if has_loss else torch.zeros(())
        self.rates.step()
        total = loss.detach().clone()
        if self.kind != "plain":
            dist.all_reduce(total, group=self.group)
        return total.item()

    def checkpoints(self, folder, **options):
        return Checkpoints(folder, group=self.group, **options)

    def save(self, checkpoints, step, method="save"):
        getattr(checkpoints, method)(
            step, self.model, self.optimizer, rates=self.rates.state_dict()
        )

    def load(self, checkpoints, step=None):
        saved = checkpoints.load(self.model, self.optimizer, step)
        self.rates.load_state_dict(saved.state["rates"])
        return saved

    def boxes(self):
        return boxes_of(self.model, self.optimizer)

    def close(self):
        if self.mesh:
            self.model.close()
            self.mesh.close()


def boxes_of(model, optimizer):
    """What this rank has: {name: [(offset, values)]}; and {parameter: steps counted}."""
    state = State(model, optimizer)
    tensors = {
        name: [(box.offset, view.clone()) for box, view in boxes.views.items()]
        for name, boxes in state.tensors.items()
    }
    return tensors, {name: float(kept["step"]) for name, kept in state.scalars.items()}


def grouped(named):
    """Matrices with weight decay, vectors without; by name, so alike on every stage and mesh."""
    named = list(named)
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def shapes_in(path):
    """{name: shape} of the tensors of a checkpoint, as its manifest says."""
    manifest = json.loads((path / "manifest.json").read_text())
    return {name: shape for name, (shape, _) in from_json(manifest["tensors"]).items()}


def put_together(of_ranks, shapes):
    """Whole tensors from the boxes of all ranks, which agree where they overlap.

    shapes: {name: shape} of the tensors."""
    whole = {name: torch.full(tuple(shape), torch.nan) for name, shape in shapes.items()}
    for tensors, _ in of_ranks:
        for name, boxes in tensors.items():
            for offset, values in boxes:
                place = tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True))
                before = whole[name][place]
                assert before.isnan().all() or torch.equal(before, values), name
                whole[name][place] = values
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def made(ranks, width=4, seed=0, steps=1, kind=torch.optim.AdamW, units=None, groups=None):
    """On the first ranks: (a sharded model, its optimizer), after some steps; None on the rest."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    torch.manual_seed(seed)
    model = nn.Sequential(*models.mlp(2, width, 6))
    zero = Zero(model, 3, group=group, units=units, param_groups=groups and groups(model))
    optimizer = kind(zero.param_groups, lr=0.25)
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        zero.step(optimizer)
    return zero, optimizer


def numbers(zero, optimizer):
    """This rank's shards, and what the optimizer keeps for them."""
    return [
        [
            piece.tolist(),
            *(kept.tolist() for _, kept in sorted(optimizer.state.get(piece, {}).items())),
        ]
        for unit in zero.units
        for flat in unit.flats
        for piece in flat.pieces.values()
    ]


def refusal(function):
    """The words of the CheckpointError; None without one."""
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return None
