"""Measure each layer of a model: seconds forward and backward, bytes returned, saved and owned.

The layers run in one process, one at a time; one forward of the whole model counts what is saved.
`naranhi.schedules.balance` finds from this where to cut. Units: seconds, bytes.

Source:
    Narayanan et al., "PipeDream" (2019), section 3.1.
"""

from collections.abc import Iterable
from statistics import median
from time import perf_counter

import torch
from torch import nn

from naranhi.autograd import SavedTensors
from naranhi.autograd.calls import put_together, take_apart
from naranhi.autograd.containers import tensors_of
from naranhi.schedules.balance import LayerProfile


def profile(
    layers: Iterable[nn.Module],
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    repeats: int = 10,
    warmup: int = 2,
) -> list[LayerProfile]:
    """Return a `LayerProfile` of each layer, in order.

    Set torch to as many threads as a rank will have, and the layers to the mode in which they will
    train. Whatever else a forward changes (running means, random numbers) changes here too. The
    inputs stay the same, even if the first layer works in place.

    Args:
        layers: modules, each taking what the previous one returns: a tensor or a tuple of tensors.
        inputs: one micro-batch for the first layer, of the shape that training will have.
        repeats: how many runs of the whole model are timed.
        warmup: how many untimed runs come first.

    Returns:
        A `LayerProfile` of each layer, with these fields:

        forward, backward: the median over `repeats` runs, in seconds. The backward computes the
            gradients of the layer's weights, and of its input where that needs one; it does not
            touch `.grad`. On a GPU a time lasts until the device has finished.
        output_bytes: of the tensors that the layer returns.
        saved_bytes: of the storages that are kept for the backward, each counted once in the model,
            for the layer that saved it first. A layer's input is therefore not counted again where
            the previous layer has kept it as its output.
        parameter_bytes: of the storages of its parameters, each counted once in a layer. A
            parameter that two layers share counts in both: if they are cut apart, each stage has
            it.

    Raises:
        ValueError: there are no layers, fewer than one repetition, or a negative warm-up.
    """
    layers = list(layers)
    if not layers or repeats < 1 or warmup < 0:
        raise ValueError(
            f"layers and repeats must be at least 1, and warmup at least 0, not {len(layers)}, "
            f"{repeats} and {warmup}"
        )
    saved, output_bytes = _count(layers, inputs)
    runs = [_time(layers, inputs) for _ in range(warmup + repeats)][warmup:]
    profiles = []
    for place, (name, layer) in enumerate(saved.layers.items()):
        forwards, backwards = zip(*(run[place] for run in runs), strict=True)
        storages = {parameter.untyped_storage() for parameter in layer.parameters()}
        profiles.append(
            LayerProfile(
                name,
                median(forwards),
                median(backwards),
                output_bytes[place],
                saved.by_layer[name],
                sum(storage.nbytes() for storage in storages),
            )
        )
    return profiles


def _count(layers, inputs):
    """Return what a forward of the whole model saves, and the bytes that each layer returns."""
    output_bytes, value = [], _copy(inputs)
    with torch.enable_grad(), SavedTensors(layers) as saved:
        for layer in layers:
            value = layer(value)
            output_bytes.append(sum(tensor.nbytes for tensor in tensors_of(value)))
    return saved, output_bytes


def _time(layers, inputs):
    """Return (forward, backward) of each layer, in seconds, in one run of the model."""
    times, value = [], _copy(inputs)
    for layer in layers:
        tensors, nest = take_apart(value)
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        # Copies, because autograd does not let a layer change a leaf in place.
        value = put_together(nest, [tensor.clone() for tensor in tensors])
        weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        wanted = [tensor for tensor in tensors if tensor.requires_grad] + weights
        start = _now()
        with torch.enable_grad():
            value = layer(value)
        middle = _now()
        outputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
        given = [torch.ones_like(tensor) for tensor in outputs]
        before = _now()
        if outputs:
            torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        times.append((middle - start, _now() - before))
    return times


def _copy(inputs):
    tensors, nest = take_apart(inputs)
    return put_together(nest, [tensor.detach().clone() for tensor in tensors])


def _now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
