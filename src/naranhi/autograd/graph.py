"""Search autograd's graph behind a layer's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


def graph_behind(
    nodes: Iterable[torch.autograd.graph.Node],
) -> Iterator[torch.autograd.graph.Node]:
    """Yield these nodes of autograd's graph and all behind them, each once."""
    nodes = list(nodes)
    seen = set(nodes)
    while nodes:
        yield (node := nodes.pop())
        nodes += (new := {parent for parent, _ in node.next_functions if parent} - seen)
        seen |= new


def find_stranger(
    nodes: Iterable[torch.autograd.graph.Node],
    known: Iterable[torch.Tensor],
) -> torch.Tensor | None:
    """Return a leaf of the graph behind these nodes that is not in `known`, or None.

    A leaf is a tensor that requires a gradient and was not computed.
    """
    return next(strangers(nodes, known), None)


def strangers(
    nodes: Iterable[torch.autograd.graph.Node],
    known: Iterable[torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graph behind these nodes that are not in `known`."""
    known = {id(tensor) for tensor in known}
    for node in graph_behind(nodes):
        if node.name().endswith("AccumulateGrad") and id(node.variable) not in known:
            yield node.variable


def has_group_norm(nodes: Iterable[torch.autograd.graph.Node], name: str) -> bool:
    """Return whether a group norm is in the graph behind these nodes.

    On a CPU, as of torch 2.13, the backward of a group norm crashes if its input is in
    channels_last and only the gradients of its weights are requested: request all gradients at
    once.

    Args:
        nodes: where the graph begins.
        name: the layer's name in errors.

    Raises:
        ValueError: if the input of such a group norm needs no gradient.
    """
    norms = [node for node in graph_behind(nodes) if node.name() == "NativeGroupNormBackward0"]
    for node in norms:
        (behind, _), *weights = node.next_functions
        is_asked_alone = behind is None and any(weight for weight, _ in weights)
        if is_asked_alone and not node._saved_input.is_contiguous():
            raise ValueError(
                f"{name} is a group norm of an input in channels_last that needs no gradient: "
                "torch crashes in its backward; make the input contiguous() before the layer"
            )
    return bool(norms)


def edge_of_leaf(parameter: torch.Tensor) -> GradientEdge:
    """Return the edge that leads to a leaf's gradient, whether it requires one now or is frozen."""
    frozen = not parameter.requires_grad
    try:
        return get_gradient_edge(parameter.requires_grad_())
    finally:
        parameter.requires_grad_(not frozen)
