"""What a layer keeps for its backward, in the sizes of the model at hand.

The items are Korthikanti's, from `costs.transformer_layer_items`: of a GPT with an MLP four times
as wide as the model and as many heads of keys as of queries. Here each is scaled to fewer heads of
keys and values, a gate, another width, experts, and an attention that keeps no scores.
Units: bytes.
"""

from functools import lru_cache

from naranhi.costs import transformer_layer_items
from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan


@lru_cache(maxsize=4096)
def layer_activations(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, sparse: bool = False
) -> float:
    """Return the bytes that one layer keeps of one micro-batch, on one rank."""
    engine = cluster.runs
    tokens = plan.microbatch * (sequence_length // plan.cp)
    value = 2 if plan.precision == "fp32" else 1  # in multiples of 16 bits
    # What the formula needs in order to count scores; sizes that it cannot cut have none here.
    heads = model.heads if model.hidden % model.heads == 0 else plan.tp
    items = transformer_layer_items(
        sequence_length // plan.cp,
        plan.microbatch,
        model.hidden,
        heads,
        plan.tp,
        plan.sequence_parallel,
        "selective" if engine.flash and plan.recompute == "none" else plan.recompute,
    )
    factors = _factors(model, plan, sparse, model.heads / heads)
    kept = sum(value * item.bytes * factors.get(item.item, 1) for item in items)
    if plan.recompute == "full":
        return kept / (plan.tp if plan.sequence_parallel else 1)
    if engine.eager:
        # Without fused kernels, copies are kept beside the originals: q, k and v as the attention
        # wants them, its output as the projection wants it, the activation before its gate.
        rows = 2 * (model.heads + model.kv_heads) * model.head_dim
        rows += _inner(model, sparse) if model.gated else 0
        kept += 2 * value * tokens * rows / plan.tp
    if plan.recompute == "selective":
        kept *= 1 - engine.selective
    if engine.flash:  # the logarithm of the sum of exponentials, in fp32
        kept += 4 * tokens * model.heads / plan.tp
    return kept


def _factors(model, plan, sparse, heads):
    """Return by what each item of the formula is multiplied; 1 for those that are not here."""
    inner = _inner(model, sparse) / (4 * model.hidden)
    scores = plan.cp * heads  # each rank's queries meet the keys of all
    return {
        "q, k, v": (model.heads + 2 * model.kv_heads) * model.head_dim / (3 * model.hidden),
        "input of the projection": model.heads * model.head_dim / model.hidden,
        "input of the GELU": inner * (2 if model.gated else 1),
        "input of the MLP's second Linear": inner,
        "input of the MLP's first Linear": 1 + (model.top_k if sparse else 0),
        "output of the softmax": scores,
        "attention after dropout": scores * model.dropout,
        "mask of the attention's dropout": scores * model.dropout,
        "mask of the projection's dropout": model.dropout,
        "mask of the MLP's dropout": model.dropout,
    }


def _inner(model, sparse):
    """Return the inner elements of the MLP, or of all experts, that a token goes through."""
    if sparse:
        return (model.top_k + model.shared_experts) * model.expert_ffn
    return model.ffn
