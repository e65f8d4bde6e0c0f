"""ZeRO: data parallelism in which each rank keeps a shard of the model's state instead of a copy.

Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the parameters as well.
Every rank still computes with the whole model on its share of the batch, as in `data_parallel`
(whose rule for the loss holds here), and receives the parameters that it does not keep or update.

    zero = Zero(model, stage=3)
    optimizer = torch.optim.AdamW(zero.param_groups, lr=1e-3)    # after sharding, over the shards
    with zero.no_sync():                                   # micro-batches, if there are several
        for inputs, targets in shares[:-1]:
            (loss(model(inputs), targets) / count).backward()
    (loss(model(inputs), targets) / count).backward()      # the last
    zero.clip_grad_norm_(1.0)                              # optional
    zero.step(optimizer)                                   # or zero.zero_grad(), to skip the step

Whole weights are available inside a `gathered()` block:

    with zero.gathered():                                  # whole weights: read, save, copy
        state = model.state_dict()
    with zero.gathered(write=True):                        # or change them
        model.load_state_dict(state)

The model is split into *units*; each is communicated as a whole, in `flat_param.FlatParam`s.
At stage 3:

    forward    all-gather a unit just before it computes, and the next unit meanwhile; free it after
    backward   the same from the last unit to the first; reduce-scatter the flat gradients of a unit
               whose backward is over while the unit before it computes
    step       each rank updates its own shards

At stage 2 parameters stay whole, and are all-gathered once, after the step; at stage 1 gradients
stay whole too, and are reduced by the last backward of a step only. The last backward is the one
that begins outside of `no_sync()`; a step has exactly one. Messages match by order: all ranks must
run the same units in the same order.

Only `Zero.zero_grad()` discards what a step has accumulated: after the optimizer's `zero_grad()`
the next backward raises, and the model's does not reach the sums in the shards. Every backward
through the model counts, even `torch.autograd.grad`: before the last, call it in `no_sync()`.

At stage 3 hooks on a unit's inputs and outputs gather its parameters for the backward. They do not
see a tensor that the unit keeps beside its output (a term of the loss in `self.aux`, as layers with
experts do): a backward through that tensor may read freed memory, and then gives wrong gradients or
crashes the process. Return the tensor from the unit, put it into a list or dict among the unit's
inputs, or leave the module to the root, which stays gathered until the backward is over.

At stage 3 parameters have no elements between forwards: sums over them, such as a norm of the
weights or a parameter count, are 0 then, and right inside `gathered()`. A weight that is
used outside of its unit's forward (a tied head that reads `embedding.weight`) fails with a shape
error: leave its module out of `units`, to the root. By default the units are the model's children;
if one child has all blocks, as in Hugging Face's models, pass them: `units=model.model.layers`.

Experts (`expert_parallel.MoE`) are sharded over the ranks that hold copies of them (the layer's
`replicas`), all else over `group`, which also has the ranks with different experts (`experts`).

With precision "bf16", gradients of micro-batches are accumulated in bf16 at stage 1, as in a model
in bf16; at stages 2 and 3 the reduced gradients are accumulated in fp32.

On a GPU, construct `Zero` and call `gathered()` on the stream on which the model is trained:
autograd accumulates gradients on the stream that was current at that time, `Zero` moves them on the
stream of the backward, and nothing synchronizes the two.

Errors: construction raises ValueError for an argument that does not fit the model or the mesh, and
for ranks whose arguments or models differ; and TypeError for a model that cannot be sharded
(`data_parallel.supported.require_supported`). `step` raises TypeError for an optimizer that works
on whole parameters, and RuntimeError for one not built from `param_groups`, inside a `gathered`
block, and if no parameter has a gradient. `clip_grad_norm_` raises ValueError unless `max_norm` and
`norm_type` are above 0, and FloatingPointError if the norm is not finite.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models"
(2020); Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (2023), for
the hooks and the prefetch. In production: `fully_shard`, and DeepSpeed.
"""

from naranhi.zero.stages import ZeroStages
from naranhi.zero.units import children, joined
from naranhi.zero.zero import Zero

__all__ = ["Zero", "ZeroStages", "children", "joined"]
