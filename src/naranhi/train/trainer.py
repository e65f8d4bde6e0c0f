"""Train a language model on a mesh of ranks: up to five parallelisms in one step.

Every rank builds the same model, without values, and iterates over the same batches. It draws or
reads the values of its stage only, and keeps its shard of them and its experts. Of each batch it
uses only its rows, and its positions in these. A step:

    forwards and backwards         follow the schedule, along the pipeline; in each, a tensor group
                                   reduces activations, a context group passes on keys and values,
                                   and an expert group exchanges tokens; losses are divided by the
                                   number of valid targets in the *whole* batch
    gradients of replicas          are summed, once the pipeline is empty: of experts over data,
                                   context and tensor, of all else over data, expert and context;
                                   with ZeRO each rank gets the sum of its shard
    gradients of tied weights      are summed over first and last stage, so the copies stay equal
    gradients outside the shards,  with sequence parallelism, and those of routers, are summed in
                                   the tensor group
    clipping, if requested,        uses the gradient norm of the whole model
    the optimizer's step           updates on each rank the parameters that it keeps

So the result is that of one process, whatever the mesh, except for the rounding of sums. The loss
of a step does not include the auxiliary loss of experts; the gradients do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from naranhi import data, models
from naranhi.autograd import Recompute, splittable
from naranhi.distributed import Mesh, agree, device_of, fingerprint
from naranhi.pipeline import Pipeline
from naranhi.schedules.balance import uniform
from naranhi.tensor_parallel import sum_sequence_gradients
from naranhi.train.build import (
    build_model_and_data,
    computed_as,
    default_top_k,
    make_mesh,
    multiple_of,
    require_untied,
    share_of,
    with_own_experts,
)
from naranhi.train.export import export, require_new
from naranhi.train.options import RATE
from naranhi.train.part import divide, fill, own_layers, require_same_layers
from naranhi.train.saves import MODEL, PADDING, RESUMED, Saves
from naranhi.train.schedule import actions_of, make_schedule
from naranhi.train.usage import UsageError, raise_on_all
from naranhi.zero import ZeroStages


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
    """A training run: iterating over it, once, runs the steps and yields a `Step` for each.

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
            a step whose loss, clipped gradient norm, or update to be saved, is not finite.
    """

    options: argparse.Namespace
    device: torch.device | str
    about: str
    start: int
    mesh: Mesh
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer

    def __init__(self, options: argparse.Namespace, device: torch.device | str | None = None):
        self.options, self.device = options, device_of() if device is None else device
        raise_on_all(
            lambda: agree(
                **{f"--{name}": value for name, value in vars(options).items() if name != "log"}
            )
        )
        self.options = options = raise_on_all(partial(with_own_experts, options))
        self.mesh = raise_on_all(partial(make_mesh, options))
        with ExitStack() as undo:  # or the groups would stay after an error
            undo.callback(self.close)
            self._prepare()
            undo.pop_all()

    def _prepare(self):
        """Make everything except the mesh (model, pipeline, optimizer, data), and resume."""
        options = self.options
        model, sequences, pad, self.about = raise_on_all(lambda: build_model_and_data(options))
        computed, self._config = computed_as(model.config), model.config
        layers = nn.ModuleList(model.layers)
        self._tied = layers[0].wte.weight is layers[-1].lm_head.weight
        ends = [token for sequence in sequences for token in (*sequence, -1)]
        passages = torch.tensor(ends)
        weights = raise_on_all(model.fingerprint)
        alike = {"model": computed, "layers": layers, "weights": weights, "passages": passages}
        raise_on_all(partial(agree, padding=pad, **alike))
        self.pipeline = self._pipeline(model)
        rate = options.lr or RATE["trained" if options.model else "random"]
        sharded = self.pipeline.sharded
        trained = sharded.param_groups if sharded else self.pipeline.parameters()
        self.optimizer = torch.optim.Adam(trained, lr=rate)
        settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in RESUMED} | {
            "--lr": rate
        }
        settings[MODEL] = computed
        if options.experts is not None:
            settings["--microbatches"] = options.microbatches
            settings[PADDING] = pad  # which routers see
            settings["--top-k"] = options.top_k or default_top_k(options.experts)
        if options.mixture:  # it is in `MODEL`
            settings |= {"--experts": None, "--top-k": None}
        corpus = {"corpus, or tokenizer": fingerprint(passages)[:12]}
        if options.export is not None:
            raise_on_all(partial(require_new, options))
        self._saves = Saves(options, corpus | settings)
        self._saves.resume(self.pipeline, self.optimizer)
        self.start = self._saves.start
        self.about += f"\n{self._saves.about}" if self._saves.about else ""
        self._batches = data.stream(
            sequences,
            options.batch,
            seed=options.seed,
            pad=pad,
            multiple=multiple_of(options),
            start=self.start,
        )

    def _pipeline(self, model):
        """Return this rank's pipeline: cut the layers first, then give its own their values."""
        options, place, sizes = self.options, self.mesh.place, self.mesh.sizes
        schedule = raise_on_all(partial(make_schedule, options, sizes.pipeline))
        raise_on_all(partial(require_untied, options, schedule, self._tied))
        layers = model.layers
        balance = options.balance or raise_on_all(partial(uniform, layers, schedule.virtual_stages))
        own = raise_on_all(partial(own_layers, len(layers), schedule, balance, place.pipeline))
        loss = raise_on_all(partial(divide, model, own, options, self.mesh))
        digests = raise_on_all(partial(fill, model, own, options.seed, self.device))
        raise_on_all(partial(require_same_layers, digests))
        if options.recompute:
            layers[1:-1] = map(Recompute, layers[1:-1])
        if actions_of(schedule, "I"):
            layers = splittable(layers)
        # Dropout: different masks on each stage of each pipeline, the same in a tensor group.
        share = place.data * sizes.expert + place.expert
        torch.manual_seed(models.seed_of(options.seed, share, place.pipeline))
        return raise_on_all(
            partial(
                Pipeline,
                layers,
                schedule,
                loss,
                balance=balance,
                group=self.mesh.pipeline,
                replicas=self.mesh.replicas,
                sharding=ZeroStages if options.zero else None,
            )
        )

    def __iter__(self) -> Iterator[Step]:
        steps = self.options.steps
        batches = islice(self._batches, max(steps - self.start, 0))
        for step, batch in enumerate(batches, self.start):
            start = perf_counter()
            try:
                loss = self._step(batch)
            except FloatingPointError as error:  # from `clip_grad_norm_`, on every rank
                raise UsageError(f"step {step}: {error}: {self._saves.advice()}") from None
            if not math.isfinite(loss):
                raise UsageError(f"the loss of step {step} is {loss}: {self._saves.advice()}")
            yield Step(step, loss, batch.count, batch.padding, round(perf_counter() - start, 6))
            # Now the step is in the log: a run that resumes from this checkpoint has its line.
            self._saves.after(step + 1, step + 1 == steps, self.pipeline, self.optimizer)

    def _step(self, batch):
        """Run one optimizer step on a whole batch, and return its loss as a float."""
        inputs, targets = share_of(batch.to(self.device), self.options, self.mesh)
        sharded, kind = self.pipeline.sharded, torch.device(self.device).type
        self.optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=self.options.bf16):
            loss = self.pipeline.step(inputs, targets, batch.count)
        if not sharded:  # ZeRO sums these before it reduces them
            sum_sequence_gradients(nn.ModuleList(self.pipeline.stages.values()))
        if self.options.clip:
            self.pipeline.clip_grad_norm_(self.options.clip)
        if sharded:
            sharded.step(self.optimizer)
        else:
            self.optimizer.step()
        dtype = next(iter(self.pipeline.parameters())).dtype  # of the loss, on its ranks
        total = torch.zeros((), dtype=dtype, device=self.device)
        if loss is not None and self.mesh.place.tensor == 0:  # once in a tensor group
            total += loss
        dist.all_reduce(total)
        return total.item()

    def export(self) -> None:
        """Write the whole model and its tokenizer into the folder of `--export`, on rank 0.

        Raises:
            UsageError: on every rank: the folder is not empty, or cannot be written.
        """
        export(self.pipeline, self._config, self._tied, self.options)

    def close(self) -> None:
        """Close the channels and groups; call it when every rank is done.

        It does not wait for a checkpoint in the background; leaving a `with` block does.
        """
        if hasattr(self, "pipeline"):  # not if construction failed early
            self.pipeline.close()
        self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._saves.__exit__(*error)
        finally:
            self.close()
