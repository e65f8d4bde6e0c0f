"""Activation memory of a Transformer layer in 16-bit training, by formula, item by item.

What is kept is not "the outputs of the layers" but what the backward of each operation needs.
`autograd.SavedTensors` counts it on a real model. Units: bytes. Source: Korthikanti et al.,
"Reducing activation recomputation in large Transformer models" (2022).
"""

from operator import index
from typing import NamedTuple

RECOMPUTE = ("none", "selective", "full")


class Item(NamedTuple):
    """One item of the memory: what is kept, its bytes, and why."""

    item: str
    bytes: int
    why: str


def transformer_layer_bytes(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> int:
    """Return the bytes that one Transformer layer keeps for its backward, per rank, in 16 bits.

    With s = sequence, b = microbatch, h = hidden, a = heads and t = tensor_parallel:

        recompute      none                         selective          full
        t = 1          sbh(34 + 5as/h)              34sbh              2sbh
        t              sbh(10 + 24/t + 5as/(ht))    sbh(10 + 24/t)     2sbh
        t, sequence    sbh(34/t + 5as/(ht))         34sbh/t            2sbh

    `models.TransformerLayer` keeps exactly this (t = 1). The result is the sum of
    `transformer_layer_items`, which raises the same errors. Not counted: the means and deviations
    of layer norms, biases, masks that every layer shares. With "full", the layer's input counts as
    whole on every rank, as in the paper; if each rank keeps only its shard and all-gathers the
    input again, it is 2sbh/t.

    Args:
        sequence: Tokens per sequence.
        microbatch: Sequences per micro-batch.
        hidden: The hidden size.
        heads: The number of attention heads.
        tensor_parallel: The number of ranks that share the layer.
        sequence_parallel: Whether those ranks also shard, along the sequence, what tensor
            parallelism leaves whole.
        recompute: "none"; "selective" to recompute the attention from q, k and v; "full" to
            recompute the whole layer from its input.

    Raises:
        TypeError: If a size is not an integer or `sequence_parallel` is not a bool.
        ValueError: If a size is below 1, `hidden` is not a multiple of `heads`, `tensor_parallel`
            does not divide `heads` (or, with sequence parallelism, `sequence`), or `recompute` is
            none of these words.

    Source: Korthikanti et al. (2022), sections 4 and 5 and table 2.
    """
    items = transformer_layer_items(
        sequence, microbatch, hidden, heads, tensor_parallel, sequence_parallel, recompute
    )
    return sum(item.bytes for item in items)


def transformer_layer_items(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> list[Item]:
    """Return the items that `transformer_layer_bytes` sums, in the order of the forward.

    Arguments and errors are those of `transformer_layer_bytes`.
    """
    s, b, h, a, t = (
        _size(name, value)
        for name, value in (
            ("sequence", sequence),
            ("microbatch", microbatch),
            ("hidden", hidden),
            ("heads", heads),
            ("tensor_parallel", tensor_parallel),
        )
    )
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel is True or False, not {sequence_parallel!r}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is one of {RECOMPUTE}, not {recompute!r}")
    for what, whole, name, parts in (
        ("hidden", h, "heads", a),
        ("heads", a, "tensor_parallel", t),
        ("sequence", s, "tensor_parallel", t if sequence_parallel else 1),
    ):
        if whole % parts:
            raise ValueError(f"{what} = {whole} is not a multiple of {name} = {parts}")

    tokens, scores = s * b * h, a * s * s * b
    shared = t if sequence_parallel else 1  # between the parts that tensor parallelism shards
    norm = "its mean and deviation are computed again from it"
    if recompute == "full":
        return [Item("input of the layer", 2 * tokens, "all else is computed again")]
    attention = [
        Item("output of the softmax", 2 * scores // t, "its derivative is made of its output"),
        Item("mask of the attention's dropout", scores // t, "elements kept, one byte each"),
        Item("attention after dropout", 2 * scores // t, "factor of the product with v"),
    ]
    return [
        Item("input of the first norm", 2 * tokens // shared, norm),
        Item("input of the q, k, v Linear", 2 * tokens // shared, "factor of its weights"),
        Item("q, k, v", 6 * tokens // t, "factors of the attention's two products"),
        *(attention if recompute == "none" else []),
        Item("input of the projection", 2 * tokens // t, "factor of its weights"),
        Item("mask of the projection's dropout", tokens // shared, "elements kept, one byte each"),
        Item("input of the second norm", 2 * tokens // shared, norm),
        Item("input of the MLP's first Linear", 2 * tokens // shared, "factor of its weights"),
        Item("input of the GELU", 8 * tokens // t, "its derivative is made of its input"),
        Item("input of the MLP's second Linear", 8 * tokens // t, "factor of its weights"),
        Item("mask of the MLP's dropout", tokens // shared, "elements kept, one byte each"),
    ]


def gpt2_block_items(
    sequence: int, microbatch: int, hidden: int, heads: int, device: str = "cpu"
) -> list[Item]:
    """Return what a Hugging Face GPT-2 block keeps in 16 bits: the formula, then each extra item.

    This holds for `transformers`' GPT2Block in training with dropout above 0,
    attn_implementation="eager" (the attention that the formula describes) and activation
    "gelu_new". The bytes of the items sum to what `SavedTensors` counts on such a block.

    Args:
        sequence: As for `transformer_layer_bytes`.
        microbatch: As for `transformer_layer_bytes`.
        hidden: As for `transformer_layer_bytes`.
        heads: As for `transformer_layer_bytes`.
        device: "cpu" or "cuda", whose dropout and norms keep different tensors.

    Raises:
        TypeError: As `transformer_layer_bytes` does.
        ValueError: As `transformer_layer_bytes` does, and if the device is unknown.
    """
    formula = transformer_layer_bytes(sequence, microbatch, hidden, heads)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is 'cpu' or 'cuda', not {device!r}")
    sequence, microbatch, hidden, heads = map(index, (sequence, microbatch, hidden, heads))
    tokens, scores = sequence * microbatch * hidden, heads * sequence * sequence * microbatch
    statistics = 4 * sequence * microbatch * (2 if device == "cpu" else 4)
    items = [
        Item("the formula", formula, "sbh(34 + 5as/h)"),
        Item(
            "steps of gelu_new",
            3 * 8 * tokens,
            "a GELU written out in tensors: x/2, tanh(...) and 1 + tanh(...) besides x",
        ),
        Item(
            "statistics of the norms",
            statistics,
            "mean and deviation of each token, kept instead of computed again",
        ),
    ]
    if device == "cpu":
        items += [
            Item(
                "attention's dropout mask, its second byte",
                scores,
                "on a CPU torch keeps the factors, 16 bits each",
            ),
            Item("other dropout masks, their second byte", 2 * tokens, "likewise"),
        ]
    return items


def _size(name, value):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if index(value) < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
    return index(value)
