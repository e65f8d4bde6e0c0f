"""Data parallelism: each rank has the whole model and a share of the batch; gradients are added up.

The loss of a step is the sum over what is valid (tokens, rows, ...) divided by how many are valid
in the *whole* step, over all micro-batches and ranks: `count`, as in `pipeline.Pipeline`. Each rank
divides its summed loss by that one count before its backward,

    (loss(model(inputs), targets) / total_count(valid_here)).backward()

so that the *sum* of the ranks' gradients is the average over the step, also where shares are of
unequal size. (The mean of the ranks' means would give a token of a short share more weight.)

Three ways to add them up, each with less waiting than the one before:

    sum_gradients(model)        after the backward, one parameter after the other
    sum_in_buckets(model)       after the backward, in few long messages
    Overlapped(model)           in buckets, while the backward still runs

All three give every rank the same bits. The first two use our own ring, the third the backend's
asynchronous all-reduce. The models are to be equal first (`replicas.make_equal`, which `Overlapped`
calls itself), and gradients None before a step (`optimizer.zero_grad()`): sums of an earlier step
would be added up again. A parameter that has a gradient on no rank keeps none. A rank without any
sample runs its model all the same, on rows that do not count (whose targets are all -100, say) or
on no rows. `group` is the process group, None for the default one.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
for buckets in reverse order and for the overlap.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from naranhi.buckets import BUCKET, buckets, pack, unpack
from naranhi.collectives import all_reduce
from naranhi.replicas import broadcast_buffers, make_equal, require_finite, with_gradient


def total_count(count, group=None):
    """How many are valid in the whole step: the sum of the ranks' own `count`, an int.

    Raises ValueError on every rank when it is 0: there is no loss to average.
    """
    group = group or dist.group.WORLD
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor([count], device=device)
    all_reduce(total, group)
    if not total.item():
        raise ValueError("no rank has anything valid in this step")
    return total.item()


# --- 1: after the backward -----------------------------------------------------------------------


def sum_gradients(model, group=None):
    """Add up each parameter's gradients over the ranks, in place, one parameter after the other.

    Raises RuntimeError on every rank, before any is added, where a parameter has a gradient on some
    ranks only; it names the parameter and the ranks.
    """
    for parameter in with_gradient(model, group):
        parameter.grad = parameter.grad.contiguous()
        all_reduce(parameter.grad, group, algorithm="ring")


# --- 2: in buckets -------------------------------------------------------------------------------


def sum_in_buckets(model, group=None, bucket_bytes=BUCKET):
    """`sum_gradients` in fewer, longer messages, of about `bucket_bytes` each; see `buckets`."""
    for bucket in buckets(with_gradient(model, group), bucket_bytes):
        gradients = [parameter.grad for parameter in bucket]
        flat = pack(gradients)
        all_reduce(flat, group, algorithm="ring")
        unpack(flat, gradients)


# --- 3: while the backward still runs ------------------------------------------------------------


class Overlapped:
    """Gradients are added up in buckets, each as soon as the backward has filled it.

        parallel = Overlapped(model)
        for inputs, targets in shares[:-1]:  # micro-batches, if there are several: no message
            (loss(model(inputs), targets) / count).backward()
        with parallel.summing():             # the last
            (loss(model(inputs), targets) / count).backward()

    model: made on every rank alike; construction calls `make_equal`.
    bucket_bytes: see `buckets`. Small ones start early, large ones cost less each.
    buffers: whether `broadcast_buffers` ends each step.
    finite: whether `require_finite` does.
    tell: called as tell("gradient", name) when a parameter's last gradient has come, and as
        tell("start", i) and tell("end", i) when bucket i begins to be added up, and when it is
        known to have been, which is after the backward.

    Gradients live in the buckets, of which `.grad` is a view. Backwards and the `summing` blocks
    raise RuntimeError where gradients of the step before are still there, and for a second gradient
    of one parameter in a block (two backwards in it, say); the block, on every rank, where a
    parameter has a gradient on some ranks only. After an error gradients are not to be used.
    """

    def __init__(self, model, group=None, bucket_bytes=BUCKET, buffers=True, finite=False,
                 tell=None):
        make_equal(model, group)
        self.model, self.group, self.buffers, self.finite = model, group, buffers, finite
        self.tell = tell or (lambda event, what: None)
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.buckets = [_Bucket(some) for some in buckets(list(self.names), bucket_bytes)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._summed = set()  # parameters whose gradient is a sum over the ranks already
        self._started = None  # how many buckets of this step are under way; None outside a block
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.names]

    def close(self):
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def summing(self):
        """Around the last backward of a step. At its end all gradients are sums over the ranks."""
        for bucket in self.buckets:
            bucket.awaited = set(bucket.views)
        self._started = 0
        try:
            yield
            while self._started < len(self.buckets):  # those with a parameter that got no gradient
                self._start_next()
        except BaseException:
            for bucket in self.buckets[:self._started]:  # or it would write into later gradients
                bucket.work.wait()
            raise
        finally:
            self._started = None
        alike = True
        for i, bucket in enumerate(self.buckets):
            alike &= bucket.finish()
            self.tell("end", i)
        if not alike:
            with_gradient(self.model, self.group)  # raises, and says of which ranks
        self._summed = {p for p in self.names if p.grad is not None}
        if self.buffers:
            broadcast_buffers(self.model, self.group)
        if self.finite:
            require_finite(self.model)

    def _arrived(self, parameter):
        """The backward has added to a parameter's gradient."""
        bucket = self._bucket_of[parameter]
        self._move(parameter, bucket)
        if self._started is None:
            return
        if parameter not in bucket.awaited:
            raise RuntimeError(f"parameter {self.names[parameter]} got a second gradient in one "
                               "summing block, when the first may be under way")
        bucket.awaited.remove(parameter)
        self.tell("gradient", self.names[parameter])
        # In one order on all ranks, whatever order gradients come in.
        while self._started < len(self.buckets) and not self.buckets[self._started].awaited:
            self._start_next()

    def _start_next(self):
        bucket = self.buckets[self._started]
        for parameter in bucket.views:
            self._move(parameter, bucket)
        bucket.start(self.group)
        self.tell("start", self._started)
        self._started += 1

    def _move(self, parameter, bucket):
        """Let a gradient live in its bucket."""
        view = bucket.views[parameter]
        if parameter.grad is not view:  # None, or a new one
            self._summed.discard(parameter)
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view
        elif parameter in self._summed:
            raise RuntimeError(f"parameter {self.names[parameter]} still has the gradient of the "
                               "step before: call zero_grad() first, which sets it to None")


class _Bucket:
    """Gradients in one piece of memory; behind them, two numbers for each parameter: whether it has
    a gradient, and whether it lacks one. When both sums are above 0, the ranks are not alike."""

    def __init__(self, parameters):
        sizes = [one.numel() for one in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + 2 * len(sizes))
        *pieces, flags = self.flat.split([*sizes, 2 * len(sizes)])
        self.views = {one: piece.view(one.shape)
                      for one, piece in zip(parameters, pieces, strict=True)}
        self.flags = flags.view(2, -1)
        self.awaited, self.work = set(), None

    def start(self, group):
        # What is in the place of a gradient that there is not is added up too, and read by nobody.
        has = [one.grad is not None for one in self.views]
        self.flags.copy_(torch.tensor([has, [not here for here in has]]))
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self):
        """Wait for the sum; whether all ranks had gradients of the same parameters."""
        self.work.wait()
        return not (self.flags > 0).all(0).any().item()
