"""ZeRO: data parallelism in which each rank keeps a shard of the model's state instead of a copy.

Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the parameters as well.
Every rank still computes with the whole model on its share of the batch, as in `data_parallel`
(whose rule for the loss holds here); what a rank does not keep is sent to it when it needs it.

    zero = Zero(model, stage=3)
    optimizer = torch.optim.AdamW(zero.param_groups, lr=1e-3)    # after sharding, over the shards
    with zero.no_sync():                                   # micro-batches, if there are several
        for inputs, targets in shares[:-1]:
            (loss(model(inputs), targets) / count).backward()
    (loss(model(inputs), targets) / count).backward()      # the last
    zero.clip_grad_norm_(1.0)                              # optional
    zero.step(optimizer)                                   # or zero.zero_grad(), to skip the step

Whole weights are there in a block:

    with zero.gathered():                                  # whole weights: read, save, copy
        state = model.state_dict()
    with zero.gathered(write=True):                        # or change them
        model.load_state_dict(state)

The model is split into *units*; each of them moves as one flat parameter (`flat_param.FlatParam`).
At stage 3:

    forward    all-gather a unit just before it computes, and the next unit meanwhile; free it after
    backward   the same from the last unit to the first; reduce-scatter the flat gradients of a unit
               whose backward is over while the unit before it computes
    step       each rank updates its own shards

At stage 2 parameters stay whole, and are all-gathered once, after the step; at stage 1 gradients
stay whole too, and are reduced by the last backward of a step only. The last backward is the one
that begins outside of `no_sync()`; there is one in a step. Messages match by order: all ranks must
run the same units in the same order.

What a step has accumulated is discarded by `zero_grad()` of `Zero` alone: the optimizer's is
refused, and the model's does not reach the sums in the shards. A backward is whatever goes through
the model, also `torch.autograd.grad`: before a step's last backward, call that in `no_sync()`.

At stage 3 a unit's backward finds parameters because hooks at its inputs and outputs gather them.
What a unit computes and keeps beside its output (a term of the loss in `self.aux`, as layers with
experts do) is not seen: a backward through it may read memory that is freed, and gives wrong
gradients or ends the process. Return it from the unit, or leave that module to the root, which
stays gathered until the backward is over.

At stage 3 parameters have no elements between forwards: sums over them, such as a norm of the
weights or a number of parameters, are 0 there and right inside of `gathered()`. A weight that is
used outside of its unit's forward (a tied head that reads `embedding.weight`) fails with a shape
error: leave its module to the root, by `units`. Units by default are children; of a model whose
blocks are all in one child, as Hugging Face's, name the blocks (`units=model.model.layers`).

Experts (`expert_parallel.MoE`) are sharded over the ranks with copies of them, the layer's
`replicas`, and all else over `group`, which has the ranks with the other experts too (`experts`).

With precision "bf16", gradients of micro-batches are added up in bf16 at stage 1, as in a model
in bf16; at stages 2 and 3 the sums over the ranks are added up in fp32.

On a GPU, make `Zero`, and call `gathered()`, under the stream on which the model is trained:
autograd adds gradients on the stream that was current then, `Zero` moves them on that of the
backward, and nothing orders the two.

Errors: construction raises ValueError for an argument that does not fit the model or the mesh, and
for ranks that were given different things; and TypeError for a model that cannot be sharded
(`data_parallel.supported.require_supported`). `step` raises TypeError for an optimizer that works
on whole parameters, and RuntimeError for one that was not made of `param_groups`, in a `gathered`
block, and without any gradient. `clip_grad_norm_` raises ValueError unless `max_norm` and
`norm_type` are above 0, and FloatingPointError if the norm is not finite.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models"
(2020); Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (2023), for
the hooks and the prefetch. In production: `fully_shard`, and DeepSpeed.
"""

from naranhi.zero.stages import ZeroStages
from naranhi.zero.units import children, joined
from naranhi.zero.zero import Zero

__all__ = ["Zero", "ZeroStages", "children", "joined"]
