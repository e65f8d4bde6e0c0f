"""What a layer keeps for its backward, for the sizes of any model.

The items are Korthikanti's, from `costs.transformer_layer_items`: for a GPT with an MLP four times
as wide as the model and as many key heads as query heads. Here each is scaled to fewer key-value
heads, a gate, a different width, experts, and an attention that keeps no scores.
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
    # The formula needs heads that divide `hidden`; otherwise `_factors` scales from tp heads, and
    # a width that tp does not divide loses the remainder.
    heads = model.heads if model.hidden % model.heads == 0 else plan.tp
    items = transformer_layer_items(
        sequence_length // plan.cp,
        plan.microbatch,
        model.hidden - model.hidden % heads,
        heads,
        plan.tp,
        plan.sequence_parallel,
        "selective" if engine.flash and plan.recompute == "none" else plan.recompute,
    )
    factors = _factors(model, plan, sparse, model.heads / heads)
    kept = sum(value * item.bytes * factors.get(item.item, 1) for item in items)
    if plan.recompute == "full":
        return kept / (plan.tp if plan.sequence_parallel else 1)
    if plan.recompute == "selective" and engine.selective:
        return _every_second_matmul(model, engine, plan, tokens, sparse, value)
    if engine.eager and model.gated:  # the activation, before its product with the other half
        kept += 2 * value * tokens * inner_width(model, sparse) / plan.tp
    kept += 2 * value * tokens * _latent(model) / (plan.tp if plan.sequence_parallel else 1)
    if engine.flash:  # the log-sum-exp, in fp32
        kept += 4 * tokens * model.heads / plan.tp
    return kept


def layer_scores(model: Model, plan: Plan, sequence_length: int) -> float:
    """Return the number of attention scores of a layer on a rank, for one micro-batch."""
    return plan.microbatch * model.heads / plan.tp * sequence_length**2 / plan.cp


def _every_second_matmul(model, engine, plan, tokens, sparse, value):
    """Return the bytes that torchtitan's selective activation checkpointing keeps.

    That is a layer's input, the output of its attention with its log-sum-exp, and the outputs of
    its first, third, fifth matmul and so on, in the order in which they run. No backward needs the
    last matmul's output, which is only added to the layer's input: a compiler sees the backward,
    and so does not keep that output.
    """
    head, inner = model.head_dim, inner_width(model, sparse)
    if model.latent:
        outputs = [matmul.columns for matmul in model.attention[:-1]]
    else:
        outputs = [model.heads * head, model.kv_heads * head, model.kv_heads * head]
        outputs = outputs if model.gated else [sum(outputs)]
    last = [model.hidden] if engine.eager else []
    outputs = [*outputs, model.hidden, *[inner] * (2 if model.gated else 1), *last]
    shards = plan.tp if plan.sequence_parallel else 1
    rows = sum(outputs[::2]) + model.heads * head
    return tokens * (
        2 * value * (rows / plan.tp + model.hidden / shards) + 4 * model.heads / plan.tp
    )


def _factors(model, plan, sparse, heads):
    """Return the factor of each item of the formula; items without one have factor 1."""
    inner = inner_width(model, sparse) / (4 * model.hidden)
    scores = plan.cp * heads  # each rank's queries meet the keys of all ranks
    keys_and_values = (model.heads + 2 * model.kv_heads) * model.head_dim
    if model.latent:
        _, _, rotary, key, value = model.latent
        keys_and_values = model.heads * (2 * (key + rotary) + value)
    # The copies of tokens that arrive for a rank's experts are kept as gathered (Megatron-
    # Core, `transformer/moe/token_dispatcher.py`); the formula shards the input along the sequence.
    copies = model.top_k * (plan.expert_tp if plan.sequence_parallel else 1) if sparse else 0
    return {
        "q, k, v": keys_and_values / (3 * model.hidden),
        "input of the projection": model.heads * model.head_dim / model.hidden,
        "input of the GELU": inner * (2 if model.gated else 1),
        "input of the MLP's second Linear": inner,
        "input of the MLP's first Linear": 1 + copies,
        "output of the softmax": scores,
        "attention after dropout": scores * model.dropout,
        "mask of the attention's dropout": scores * model.dropout,
        "mask of the projection's dropout": model.dropout,
        "mask of the MLP's dropout": model.dropout,
    }


def _latent(model):
    """Return the elements of the latent vectors that are kept, before and after their norms."""
    return 2 * (model.latent.query_rank + model.latent.key_rank) if model.latent else 0


def inner_width(model: Model, sparse: bool) -> int:
    """Return the inner size of the MLP, or of all experts together that a token visits."""
    if sparse:
        return (model.top_k + model.shared_experts) * model.expert_ffn
    return model.ffn
