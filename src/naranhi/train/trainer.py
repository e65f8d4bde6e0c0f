"""Train GPT-2 on a mesh of ranks: data, pipeline and tensor parallelism in one step.

Every rank builds the same model from the same seed and iterates over the same batches. It keeps
only its shard of its stage of the model, and uses only its pipeline's rows of each batch. A step:

    forwards and backwards         follow the schedule, along the pipeline; in each, a tensor group
                                   reduces activations; losses are divided by the number of valid
                                   targets in the *whole* batch
    gradients of replicas          are summed, once the pipeline is empty
    gradients of tied weights      are summed over first and last stage, so the copies stay equal
    gradients outside the shards,  with sequence parallelism, are summed in the tensor group
    clipping, if requested,        uses the gradient norm of the whole model
    the optimizer's step           updates on each rank the parameters that it keeps

So the result is that of one process, whatever the mesh, except for the rounding of sums.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from naranhi import data, models, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.distributed import Mesh, agree, fingerprint
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    gpt2_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)
from naranhi.train.saves import Saves
from naranhi.train.usage import UsageError, raise_on_all

RATE = {
    "random": 2e-3,
    "trained": 3e-5,
}  # Adam's learning rates; a trained model needs a far smaller one
RESUMED = "batch", "seed", "clip", "dropout", "untied"  # as they were, when a run goes on
MULTIPLE = 8  # lengths are multiples of it: the stages do one dry run for each length


class Step(NamedTuple):
    """The result of a step: the same on every rank, except for `seconds`.

    Args:
        step: the index of the step, from 0.
        loss: the loss of the whole batch, in nats per valid target.
        tokens: the number of valid targets.
        padding: the number of padding tokens.
        seconds: the duration of the step, on this rank.
    """

    step: int
    loss: float
    tokens: int
    padding: int
    seconds: float


class Training:
    """A training, which runs its steps when iterated over, once, and yields a `Step` for each.

        with Training(train.parse(["--dp", "2"])) as training:
            losses = [step.loss for step in training]

    Every rank of the default group constructs it, and iterates over it, at the same time.

    Args:
        options: as `naranhi.train.parse` returns them.
        device: this rank's device; by default that of the default group's backend.

    Attributes:
        about: a line about model and corpus; with `--resume`, another about the checkpoint.
        start: the index of the first step: how many steps the resumed run has done.
        mesh: the `Mesh` of ranks.
        pipeline: this rank's `Pipeline`.
        optimizer: the optimizer of this rank's parameters.

    Raises:
        UsageError: raised on every rank, before the first step if the options cannot be met, or in
            a step whose loss, or clipped gradient norm, is not finite.
    """

    options: argparse.Namespace
    device: torch.device | str
    about: str
    start: int
    mesh: Mesh
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer

    def __init__(self, options: argparse.Namespace, device: torch.device | str | None = None):
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
        ends = [token for sequence in sequences for token in (*sequence, -1)]
        passages = torch.tensor(ends)
        raise_on_all(partial(agree, weights=nn.ModuleList(layers), passages=passages))
        loss, place, sizes = models.loss, self.mesh.place, self.mesh.sizes
        if sizes.tensor > 1:
            raise_on_all(
                partial(
                    parallelize,
                    layers,
                    gpt2_plan(),
                    self.mesh.tensor,
                    sequence=options.sequence_parallel,
                )
            )
            loss = partial(vocabulary_cross_entropy, group=self.mesh.tensor)
        # Dropout: different masks on each stage of each pipeline, the same in a tensor group.
        drawn = random.Random(f"{options.seed}/{place.data}/{place.pipeline}")
        torch.manual_seed(drawn.getrandbits(63))
        make = getattr(schedules, options.schedule)
        schedule = raise_on_all(partial(make, sizes.pipeline, options.microbatches))
        if actions_of(schedule, "I"):
            layers = splittable(layers)
        nn.ModuleList(layers).to(device)
        self.pipeline = raise_on_all(
            partial(
                Pipeline,
                layers,
                schedule,
                loss,
                balance=options.balance,
                group=self.mesh.pipeline,
                replicas=self.mesh.data,
            )
        )
        del layers  # free the layers of the other stages
        rate = options.lr or RATE["trained" if options.model else "random"]
        self.optimizer = torch.optim.Adam(self.pipeline.parameters(), lr=rate)
        settings = {f"--{name}": getattr(options, name) for name in RESUMED} | {"--lr": rate}
        corpus = {"corpus, or tokenizer": fingerprint(passages)[:12]}
        self._saves = Saves(options, corpus | settings)
        self._saves.resume(self.pipeline, self.optimizer)
        self.start = self._saves.start
        self.about += f"\n{self._saves.about}" if self._saves.about else ""
        self._batches = data.stream(
            sequences,
            options.batch,
            seed=options.seed,
            pad=pad,
            multiple=MULTIPLE,
            start=self.start,
        )

    def __iter__(self) -> Iterator[Step]:
        steps = self.options.steps
        batches = islice(self._batches, max(steps - self.start, 0))
        for step, batch in enumerate(batches, self.start):
            start = perf_counter()
            try:
                loss = self._step(batch)
            except FloatingPointError as error:  # from `clip_grad_norm_`, on every rank
                raise UsageError(f"step {step}: {error}: a lower --lr may help") from None
            if not math.isfinite(loss):
                raise UsageError(f"the loss of step {step} is {loss}: a lower --lr may help")
            yield Step(step, loss, batch.count, batch.padding, round(perf_counter() - start, 6))
            # Now the step is in the log: a run that goes on from here has its line.
            self._saves.after(step + 1, step + 1 == steps, self.pipeline, self.optimizer)

    def _step(self, batch):
        """Run one optimizer step on a whole batch, and return its loss as a float."""
        share = data.Batch(
            *(tensor.chunk(self.mesh.sizes.data)[self.mesh.place.data] for tensor in batch)
        ).to(self.device)
        self.optimizer.zero_grad()
        loss = self.pipeline.step(share.inputs, share.targets, batch.count)
        sum_sequence_gradients(nn.ModuleList(self.pipeline.stages.values()))
        if self.options.clip:
            self.pipeline.clip_grad_norm_(self.options.clip)
        self.optimizer.step()
        has_loss = (
            loss is not None and self.mesh.place.tensor == 0
        )  # count it once in a tensor group
        total = loss.clone() if has_loss else torch.zeros((), device=self.device)
        dist.all_reduce(total)
        return total.item()

    def close(self) -> None:
        """Close the channels and groups; call it when every rank is done.

        It does not wait for a checkpoint in the background; leaving a `with` block does.
        """
        self.pipeline.close()
        self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._saves.__exit__(*error)
        finally:
            self.close()


def make_mesh(options: argparse.Namespace) -> Mesh:
    """Return the Mesh; without `options.pp`, its pipelines are as long as the world allows.

    Raises:
        UsageError: the ranks cannot be divided, or `options` do not go together.
    """
    ranks, across = dist.get_world_size(), options.dp * options.tp
    if options.pp is None and ranks % across:
        raise UsageError(
            f"--dp {options.dp} and --tp {options.tp} cannot share "
            f"{ranks} ranks: they are for {across}, or a multiple of that"
        )
    if options.sequence_parallel and (options.tp == 1 or MULTIPLE % options.tp):
        raise UsageError(f"--sequence-parallel goes with --tp 2, 4 or {MULTIPLE}, not {options.tp}")
    return Mesh(options.dp, options.pp or ranks // across, options.tp)


def build_model_and_data(
    options: argparse.Namespace,
) -> tuple[list[nn.Module], list[list[int]], int, str]:
    """Return the model's layers, the passages as tokens, the padding token, and a line about them.

    Raises:
        UsageError: the batch cannot be divided, or model and tokenizer do not fit.
    """
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
    parameters = sum(param.numel() for param in nn.ModuleList(layers).parameters())
    about = (
        f"{len(sequences):,} passages ({len(passages) - len(distinct):,} repeated ones left out), "
        f"{sum(map(len, sequences)):,} tokens, unigram entropy "
        f"{data.unigram_entropy(sequences):.3f} nats a token; {parameters:,} parameters"
    )
    if options.recompute:
        layers[1:-1] = map(Recompute, layers[1:-1])
    return layers, sequences, tokenizer.pad_token_id, about


def actions_of(schedule: schedules.Schedule, kind: str) -> list[schedules.Action]:
    """Return the actions of a kind, such as "U" or "I", in a schedule."""
    return [action for row in schedule for action in row if action.kind == kind]
