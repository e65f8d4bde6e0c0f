"""Sum gradients in buckets while the backward still runs, by hooks.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from naranhi.autograd.containers import tensors_of
from naranhi.autograd.hooks import Attached, Backward, Handles, Hook, ModuleHook
from naranhi.autograd.transforms import differentiates
from naranhi.collectives.buckets import BUCKET, buckets
from naranhi.data_parallel.bucket import GradientBucket, read_flags, strides_of
from naranhi.data_parallel.supported import (
    require_first_sums,
    require_gradient,
    require_same_parameters,
    require_supported,
)
from naranhi.data_parallel.sync import (
    broadcast_buffers,
    broadcast_parameters,
    require_finite,
    with_gradient,
)
from naranhi.distributed import agree, raise_on_all


class DDP(Attached):
    """Data parallelism that sums gradients in buckets, each as soon as the backward has filled it.

        parallel = DDP(model)
        with parallel.no_sync():                # micro-batches, if there are several: no message
            for inputs, targets in shares[:-1]:
                (loss(model(inputs), targets) / count).backward()
        (loss(model(inputs), targets) / count).backward()  # the last
        optimizer.step()

    As with torch's `DistributedDataParallel`, a backward ends with gradients that are sums over the
    ranks, unless it begins in `no_sync()`. Three things differ: the forward may run anywhere, sums
    are not divided by the number of ranks, and whatever would let replicas diverge raises an error.

    `torch.autograd.grad` through the model counts as a backward: while there are gradients, call it
    in `no_sync()`.

    Gradients live in the buckets; `.grad` is a view of a bucket. RuntimeError is raised

    - by a backward, if gradients of the step before are still there, a parameter gets a second
      gradient (from reentrant checkpoints that share it), a gradient has a graph
      (`create_graph=True`) or a hook has removed it, or a parameter requires a gradient but did
      not at construction;
    - by a backward, on every rank, if a parameter has a gradient on some ranks only;
    - by a backward, if another rank's backward has failed: it waits until that rank begins its next
      backward, which sends the missing buckets, marked as failed (a rank that skips a step, say
      after an error in its forward, is not noticed: from then on its gradients are summed with
      those of the other ranks' previous step);
    - by the step of a torch optimizer, before it changes anything, if a gradient is this rank's
      alone because all backwards were in `no_sync()`.

    A gradient that is not dense raises TypeError. Do not use gradients after an error.

    Args:
        model: Built alike on every rank; construction calls `require_supported` (TypeError) and
            `broadcast_parameters` (ValueError). The model keeps this object alive until `close()`.
        group: The process group; None for the default one.
        bucket_bytes: See `buckets`. Small buckets start early; large ones cost less per byte. They
            start from the last registered parameter to the first (torch's DDP learns the order of
            the first backward), so register layers in the order in which they run.
        buffers: Whether each step ends with `broadcast_buffers`.
        check_finite: Whether each step ends with `require_finite`.
        on_event: Called as on_event("gradient", name) when a parameter's last gradient has arrived,
            as on_event("start", i) when the reduction of bucket i starts, and as on_event("end", i)
            when it is known to have ended, which is after the backward (on a GPU: when kernels
            launched from then on will run after the reduction).
    """

    model: nn.Module
    group: dist.ProcessGroup | None
    buffers: bool
    check_finite: bool
    on_event: Callable[[str, str | int], object]
    names: dict[nn.Parameter, str]
    buckets: list[GradientBucket]

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET,
        buffers: bool = True,
        check_finite: bool = False,
        on_event: Callable[[str, str | int], object] | None = None,
    ) -> None:
        require_supported(model, group)
        raise_on_all(lambda: require_first_sums(model), group, kind=TypeError)
        broadcast_parameters(model, group)
        agree(
            group,
            bucket_bytes=bucket_bytes,
            buffers=buffers,
            check_finite=check_finite,
            memory_layout={
                name: strides_of(param)
                for name, param in model.named_parameters()
                if not param.is_contiguous()
            },
        )
        self.model, self.group = model, group
        self.buffers, self.check_finite = buffers, check_finite
        self.on_event = on_event or (lambda event, what: None)
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.buckets = [GradientBucket(some) for some in buckets(list(self.names), bucket_bytes)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._summed = set()  # parameters whose gradient is already a sum over the ranks
        self._local = set()  # parameters whose gradient is this rank's alone so far
        self._sync = True
        self._started = 0  # how many buckets of this step are in flight
        self._backward = Backward()  # a backward that ends with sums
        self._handles = Handles(
            last=[
                p.register_post_accumulate_grad_hook(Hook(self.gradient_arrived))
                for p in self.names
            ],
            others=[
                model.register_forward_hook(ModuleHook(self._after_forward, keep=True)),
                register_optimizer_step_pre_hook(Hook(self._before_step)),
            ],
        )
        weakref.finalize(self, self._handles.others[-1].remove).atexit = False

    def close(self) -> None:
        """Remove all hooks, and leave the model alone from now on."""
        self._handles.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards that begin inside add to this rank's own gradients, and send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronize(self) -> None:
        """Sum what was accumulated in `no_sync()`, without another backward.

        Every rank calls it, including one that had no backward (if others had, all raise an error).
        """
        self._prepare()
        self.finish()

    # --- the backward ----------------------------------------------------------------------------

    def _after_forward(self, module, inputs, output):
        """Register hooks on the outputs, so that `_begin` runs when the backward reaches them.

        This also covers last layers that are recomputed in an inner backward, whose end is not the
        end of the whole backward.
        """
        if differentiates():
            return
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(Hook(self._begin))

    def _begin(self, gradient=None):
        if self._sync and not self._backward.running:
            self._prepare()
            self._backward.begin(self.finish)

    def _prepare(self):
        if self._backward.failed:
            self._give_up()
        require_same_parameters(self.model, self.names, "DDP")
        self._handles.order()
        for bucket in self.buckets:
            bucket.awaited = set(bucket.views)
        self._started = 0

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient, to which the backward has just added, into its bucket.

        Then start every bucket that is next in order and full.

        Args:
            parameter: The parameter whose gradient arrived.
        """
        self._begin()
        bucket = self._bucket_of[parameter]
        require_gradient(self.names[parameter], parameter.grad)
        self._move(parameter, bucket)
        self._local.add(parameter)
        if not self._backward.running:
            return
        if parameter not in bucket.awaited:
            raise RuntimeError(
                f"parameter {self.names[parameter]} got a second gradient in one "
                "backward, when the first may be in flight"
            )
        bucket.awaited.remove(parameter)
        self.on_event("gradient", self.names[parameter])
        # In the same order on all ranks, in whatever order gradients arrive.
        while self._started < len(self.buckets) and not self.buckets[self._started].awaited:
            self.start_next()

    def start_next(self) -> None:
        """Start the all-reduce of the next bucket in order."""
        bucket = self.buckets[self._started]
        for parameter in bucket.views:
            self._move(parameter, bucket)
        bucket.start(self.group)
        self.on_event("start", self._started)
        self._started += 1

    def finish(self) -> None:
        """Start the buckets that lack a gradient, now that the backward is over, and wait for all.

        Raises:
            RuntimeError: If another rank's backward has failed, or, on every rank, if a parameter
                has a gradient on some ranks only.
            FloatingPointError: With `check_finite`, on every rank, if a gradient is not finite.
            ValueError: With `buffers`, on every rank, if the ranks' buffers differ in kind.
        """
        while self._started < len(self.buckets):
            self.start_next()
        self._backward.end()
        for i, bucket in enumerate(self.buckets):
            bucket.work.wait()
            self.on_event("end", i)
        alike, failed = read_flags(self.buckets)
        if failed:
            raise RuntimeError("the backward of another rank has failed in this step")
        if not alike:
            with_gradient(self.model, self.group)  # raises, naming the ranks
            raise RuntimeError("a parameter has a gradient on some ranks only")
        self._summed = {p for p in self.names if p.grad is not None}
        self._local.clear()
        # Not after torch.autograd.grad, whose graph may still need the buffers.
        if self.buffers and self._summed:
            broadcast_buffers(self.model, self.group)
        if self.check_finite:
            require_finite(self.model)

    def _give_up(self):
        """Send what other ranks wait for after a failed backward, marked as failed.

        Otherwise they would take the next step's buckets for this step's.
        """
        self._backward.end()
        for bucket in self.buckets[self._started :]:
            bucket.start(self.group, failed=True)
        for bucket in self.buckets:
            bucket.work.wait()

    # --- gradients -------------------------------------------------------------------------------

    def _move(self, parameter, bucket):
        """Make a parameter's gradient a view of its bucket."""
        view = bucket.views[parameter]
        if parameter.grad is not view:  # None, or a new tensor
            self._summed.discard(parameter)
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view
        elif parameter in self._summed:
            raise RuntimeError(
                f"parameter {self.names[parameter]} still has the gradient of the "
                "step before: call zero_grad() first, which sets it to None, or "
                "torch.autograd.grad in no_sync()"
            )

    def _before_step(self, optimizer, args, kwargs):
        """Raise before any torch optimizer uses local gradients: replicas would diverge."""
        for group in optimizer.param_groups if self._local else ():
            for parameter in group["params"]:
                if parameter in self._local and parameter.grad is not None:
                    raise RuntimeError(
                        f"the gradient of parameter {self.names[parameter]} is not yet summed: "
                        "run the last backward of a step outside of no_sync(), or call "
                        "synchronize()"
                    )
