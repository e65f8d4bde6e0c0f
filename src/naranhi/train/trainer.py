"""The training of GPT-2 on a mesh of ranks: data, pipeline and tensor parallelism in one step.

Every rank makes the same model from the same seed and goes through the same batches. Of the model
it keeps its shard of its stage; of each batch it takes the rows of its pipeline. What a step does:

    forwards and backwards         of the schedule, along the pipeline; in each, a tensor group adds
                                   up activations; losses are divided by what is valid in the
                                   *whole* batch
    gradients of replicas          are added up, once the pipeline is empty
    gradients of tied weights      are added up over first and last stage, which so stay equal
    gradients outside the shards,  where the sequence is split, are added up in the tensor group
    their norm is clipped          that of the whole model, if asked for
    the optimizer's step           on each rank for what it keeps

So the result is that of one process, whatever the mesh, but for the rounding of sums.
"""

import math
import random
from functools import partial
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from naranhi import data, models, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.distributed import Mesh, agree
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    gpt2_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)

RATE = {"random": 2e-3, "trained": 3e-5}  # Adam's; a model that is trained already needs far less
MULTIPLE = 8  # of what lengths are multiples: the stages try their layers once for each length


class UsageError(Exception):
    """A user's error. `raise_on_all` puts one distinct message on a line."""


class Step(NamedTuple):
    """What is known of a step, on every rank alike but for the seconds. tokens: how many targets
    are valid. padding: how many tokens are padding."""

    step: int
    loss: float
    tokens: int
    padding: int
    seconds: float


class Training:
    """Goes through the steps when it is iterated over, once: a `Step` for each.

        with Training(train.parse(["--dp", "2"])) as training:
            losses = [step.loss for step in training]

    options: as `naranhi.train.parse` returns them. device: this rank's, by default that of the
    default group's backend. Every rank of the default group makes it, and goes through it, at the
    same time. Raises UsageError on every rank for what cannot be done, before the first step; and
    in a step whose loss is no number.

    Attributes: `about`, a line on model and corpus; `mesh`, `pipeline`, `optimizer`.
    """

    def __init__(self, options, device=None):
        if device is None:
            gpu = dist.get_backend() == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        self.options, self.device = options, device
        raise_on_all(
            lambda: agree(
                **{f"--{name}": value for name, value in vars(options).items() if name != "log"}
            )
        )
        self.mesh = raise_on_all(partial(make_mesh, options))
        layers, sequences, pad, self.about = raise_on_all(lambda: build_model_and_data(options))
        ends = [token for one in sequences for token in (*one, -1)]
        raise_on_all(partial(agree, weights=nn.ModuleList(layers), passages=torch.tensor(ends)))
        loss, place, sizes = models.loss, self.mesh.place, self.mesh.sizes
        if sizes.tensor > 1:
            raise_on_all(
                partial(
                    parallelize, layers, gpt2_plan(), self.mesh.tensor, options.sequence_parallel
                )
            )
            loss = partial(vocabulary_cross_entropy, group=self.mesh.tensor)
        # Dropout: other numbers on each stage of each pipeline, the same in a tensor group.
        drawn = random.Random(f"{options.seed}/{place.data}/{place.pipeline}")
        torch.manual_seed(drawn.getrandbits(63))
        schedule = getattr(schedules, options.schedule)(sizes.pipeline, options.microbatches)
        if actions_of(schedule, "I"):
            layers = splittable(layers)
        nn.ModuleList(layers).to(device)
        self.pipeline = raise_on_all(
            partial(
                Pipeline,
                layers,
                schedule,
                loss,
                options.balance,
                self.mesh.pipeline,
                replicas=self.mesh.data,
            )
        )
        del layers  # the other stages' are not needed any more
        rate = options.lr or RATE["trained" if options.model else "random"]
        self.optimizer = torch.optim.Adam(self.pipeline.parameters(), lr=rate)
        self._batches = data.stream(sequences, options.batch, options.seed, pad, MULTIPLE)

    def __iter__(self):
        for step, batch in enumerate(islice(self._batches, self.options.steps)):
            start = perf_counter()
            try:
                loss = self._step(batch)
            except FloatingPointError as error:  # of `clip_grad_norm_`, on every rank
                raise UsageError(f"step {step}: {error}: a lower --lr may help") from None
            if not math.isfinite(loss):
                raise UsageError(f"the loss of step {step} is {loss}: a lower --lr may help")
            yield Step(step, loss, batch.count, batch.padding, round(perf_counter() - start, 6))

    def _step(self, batch):
        """One step of the optimizer on a whole batch; its loss, a number."""
        share = data.Batch(
            *(one.chunk(self.mesh.sizes.data)[self.mesh.place.data] for one in batch)
        ).to(self.device)
        self.optimizer.zero_grad()
        loss = self.pipeline.step(share.inputs, share.targets, batch.count)
        sum_sequence_gradients(nn.ModuleList(self.pipeline.stages.values()))
        if self.options.clip:
            self.pipeline.clip_grad_norm_(self.options.clip)
        self.optimizer.step()
        has_loss = loss is not None and self.mesh.place.tensor == 0  # once in a tensor group
        total = loss.clone() if has_loss else torch.zeros((), device=self.device)
        dist.all_reduce(total)
        return total.item()

    def close(self):
        """Close the channels and groups, when every rank is done."""
        self.pipeline.close()
        self.mesh.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def make_mesh(options):
    """The Mesh; its pipelines are as long as the world allows, when `options` does not say."""
    ranks, across = dist.get_world_size(), options.dp * options.tp
    if options.pp is None and ranks % across:
        raise UsageError(
            f"--dp {options.dp} and --tp {options.tp} cannot share "
            f"{ranks} ranks: they are for {across}, or a multiple of that"
        )
    if options.sequence_parallel and (options.tp == 1 or MULTIPLE % options.tp):
        raise UsageError(f"--sequence-parallel goes with --tp 2, 4 or {MULTIPLE}, not {options.tp}")
    return Mesh(options.dp, options.pp or ranks // across, options.tp)


def build_model_and_data(options):
    """The layers of the model, the passages as tokens, the padding token, and a line about them."""
    if options.batch % (options.dp * options.microbatches):
        shares = f"{options.dp} shares of " * (options.dp > 1)
        raise UsageError(
            f"--batch {options.batch} cannot be divided into "
            f"{shares}{options.microbatches} micro-batches of one size"
        )
    passages = data.contexts(options.corpus)
    distinct = data.unique(passages)
    tokenizer = data.tokenizer(options.model)
    torch.manual_seed(options.seed)
    source = options.model or models.gpt2_config(vocabulary=len(tokenizer))
    layers = models.gpt2(source, tied=not options.untied, dropout=options.dropout)
    words, positions = layers[0].wte.num_embeddings, layers[0].wpe.num_embeddings
    if len(tokenizer) > words:
        raise UsageError(
            f"the tokenizer of {options.model} has {len(tokenizer)} words, its model only {words}"
        )
    sequences = data.encode(tokenizer, distinct, positions)
    parameters = sum(one.numel() for one in nn.ModuleList(layers).parameters())
    about = (
        f"{len(sequences):,} passages ({len(passages) - len(distinct):,} repeated ones left out), "
        f"{sum(map(len, sequences)):,} tokens, unigram entropy "
        f"{data.unigram_entropy(sequences):.3f} nats a token; {parameters:,} parameters"
    )
    if options.recompute:
        layers[1:-1] = map(Recompute, layers[1:-1])
    return layers, sequences, tokenizer.pad_token_id, about


def actions_of(schedule, kind):
    """The actions of a kind, "U" or "I" or another, in a schedule."""
    return [action for row in schedule for action in row if action.kind == kind]


def raise_on_all(function):
    """What `function()` returns, when it returns on every rank of the default group.

    Where it raises on some what can be put right (UsageError, OSError, ValueError), UsageError is
    raised on every rank, with a line for each that says on which ranks: none waits for one that has
    gone.
    """
    result = wrong = None
    try:
        result = function()
    except (UsageError, OSError, ValueError) as error:
        wrong = str(error)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    if not any(told):
        return result
    lines = []
    for message in dict.fromkeys(filter(None, told)):
        ranks = [rank for rank, other in enumerate(told) if other == message]
        everywhere = len(ranks) == len(told)
        lines.append(message if everywhere else f"on rank {', '.join(map(str, ranks))}: {message}")
    raise UsageError("\n".join(lines))
