"""Run a step on ranks, and find the first tensor that differs from one process's.

A step goes through phases, and so does the finder: the batch, the forward, the gradients of the
layers' outputs, those of the parameters, these as the optimizer receives them, the weights after
its step. Within a phase tensors are compared in the order in which they are computed. The first one
that is wrong is where the bug is, or the last place it passed unseen; all that follow are wrong
because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from naranhi.distributed import Mesh, fingerprint, from_all_ranks, raise_on_all
from naranhi.divergence.axes import Axes, Part
from naranhi.divergence.classify import Held, classify, distance
from naranhi.divergence.data import (
    equal_rows,
    numbered,
    of_closest_rows,
    rows_of,
    shared_rows,
    wrong_rows,
)
from naranhi.divergence.models import layers_of, recorded_layers
from naranhi.divergence.random import wrong_masks
from naranhi.divergence.recorder import PHASES, Key, Recorder
from naranhi.divergence.reference import Reference, Update
from naranhi.divergence.report import Divergence, Report
from naranhi.divergence.requirements import require_calls, require_same_model
from naranhi.divergence.tolerance import TOLERANCE


class Finding(NamedTuple):
    """The comparison of one rank's tensor with one process's, or its digest for other ranks."""

    slot: Hashable
    error: float
    allowed: float
    digest: str


def find(
    model: Any,
    run: Callable[[Any], object],
    reference: Reference,
    *,
    mesh: Mesh | DeviceMesh,
    update: Callable[[Any], object] | None = None,
    scale: float = 1.0,
) -> Report:
    """Run a step on the ranks, and return the first place where it diverges from one process.

    Every rank of the world calls this. The step is a real one: it leaves gradients, and with
    `update` new weights. A rank keeps its step and the reference on its CPU, and receives from the
    other ranks their masks, a few numbers for each tensor, and the one tensor that is reported.

    If the step draws random numbers (dropout), masks cannot be those of one process. Then the ranks
    are compared with each other, where they must agree and where they must not.

    Args:
        model: this rank's part of the model: a module or list of layers (split by `parallelize` or
            whole), a `Pipeline`, a `Zero`, a `DDP` or torch's. Layers have the names that they have
            in the unsplit model.
        run: `run(model)` runs the forwards and backwards of the step on this rank's rows, with all
            reductions, so that gradients are those that the optimizer receives.
        reference: as `trace` returns it, of the same weights and the whole batch.
        mesh: the ranks; axes "data" and "expert" divide the rows of the batch. An axis that divides
            sequences gives each rank consecutive positions ("plain" order).
        update: `update(model)` makes an optimizer and steps, as in `trace`.
        scale: the factor by which `run` multiplies the loss before its backward, if gradients are
            divided by it afterwards: the number of data ranks for torch's
            `DistributedDataParallel`, which averages gradients.

    Raises:
        ValueError: raised on every rank. A parameter, or its shape, is not in the reference, or
            none of the ranks has it; the ranks' references differ; a layer's output has a shape
            that the mesh does not explain; a `Zero` computes in bf16; a pipeline's stages are
            sharded.
        RuntimeError: raised on every rank, if `run` has called no layer, or a reference without
            an update is compared with one.
    """
    axes = raise_on_all(lambda: Axes(mesh), kind=ValueError)
    layers = layers_of(model)
    require_same_model(model, reference, update)
    with Recorder(recorded_layers(layers), reference.first, masks=reference.draws) as records:
        run(model)
    step = Update(model, update)
    raise_on_all(lambda: require_calls(records), kind=RuntimeError)
    rows = raise_on_all(lambda: rows_of(records, reference, axes), kind=ValueError)
    rows = numbered(from_all_ranks(rows), axes)
    if not any(rows):
        raise RuntimeError(
            f"run(model) has not called {reference.first or 'the model'} on any rank"
        )
    if divergence := wrong_rows(rows, reference, axes):
        return Report(divergence, 0)
    own = shared_rows(rows, axes, dist.get_rank())
    parts = raise_on_all(
        lambda: dict(_parts(layers, records, step, reference, own, axes, scale)), kind=ValueError
    )
    compare = _among_ranks if reference.draws else _with_one_process
    return compare(parts, records, step, reference, own, axes)


def _with_one_process(parts, records, step, reference, rows, axes):
    findings = raise_on_all(
        lambda: {key: _finding(key, part, reference) for key, part in parts.items()},
        kind=ValueError,
    )
    gathered = from_all_ranks(findings)
    wrong = {
        key for own in gathered for key, finding in own.items() if finding.error > finding.allowed
    }
    compared = sum(map(len, gathered))
    margin = max(
        (
            finding.error / finding.allowed
            for own in gathered
            for finding in own.values()
            if finding.allowed
        ),
        default=0.0,
    )
    stepped = _wrong_steps(step, reference, axes)
    order = _order(reference)
    first = min(wrong, key=order, default=None)
    if stepped and (first is None or order(first) > order(Key("step", ""))):
        return Report(stepped, compared, margin)
    if first is None:
        return Report(None, compared, margin)
    every = {key for own in gathered for key in own if key.phase == first.phase}
    some = [key for key in wrong if key.phase == first.phase]
    return Report(
        _divergence(first, parts, reference, axes, len(some), len(every)), compared, margin
    )


def _among_ranks(parts, records, step, reference, rows, axes):
    """Compare the ranks' copies of the same part of a tensor, and the masks that they draw."""
    if wrong := wrong_masks(records, reference, rows, axes):
        return Report(wrong, 0)
    findings = {
        key: Finding(part.slot, 0.0, 0.0, fingerprint(part.value)) for key, part in parts.items()
    }
    gathered = from_all_ranks(findings)
    for key in sorted({key for own in gathered for key in own}, key=_order(reference)):
        seen = {}
        for own in gathered:
            if key in own:
                seen.setdefault(own[key].slot, set()).add(own[key].digest)
        if all(len(digests) == 1 for digests in seen.values()):
            continue
        part = parts.get(key)
        large = part.value.double().abs().max().item() if part and part.value.numel() else 0.0
        is_rounded = part and part.value.is_floating_point()
        eps = torch.finfo(part.value.dtype).eps if is_rounded else 0.0
        own = part and Held(part.value, part.slot, None, TOLERANCE * eps * large)
        held = {rank: part for rank, part in enumerate(from_all_ranks(own)) if part}
        axis, _, what = classify(held, axes)
        if what:
            apart = Divergence(*key[:3], *_apart(held, axis, what))
            return Report(apart, len(gathered[0]))
    return Report(_wrong_steps(step, reference, axes), sum(map(len, gathered)))


def _apart(held, axis, what):
    """Return the fields of a Divergence of ranks that hold the same part, and other values."""
    same, ranks, error, allowed = {}, [], 0.0, 0.0
    for rank, part in held.items():
        same.setdefault(part.slot, []).append(rank)
    for first, *others in same.values():
        gap = max((distance(held[first].value, held[rank].value) for rank in others), default=0.0)
        if gap > 2 * held[first].allowed:
            ranks += [first, *others]
            error, allowed = max((error, allowed), (gap, 2 * held[first].allowed))
    return tuple(sorted(ranks)), axis, what, error, allowed


def _parts(layers, records, step, reference, rows, axes, scale) -> Iterator[tuple[Key, Part]]:
    """Yield every tensor of this rank that one process has, too, as a part of the whole one."""
    values, equal = records.values(), equal_rows(reference)
    for key in records.missing():  # where one process has a gradient, autograd was cut
        values[key] = torch.zeros_like(values[key._replace(phase="forward")])
    for key, value in values.items():
        whole = reference.values.get(key._replace(microbatch=0))
        if whole is None or key.microbatch >= len(rows):
            continue
        taken, by_rows = rows[key.microbatch], reference.by_rows.get(key._replace(microbatch=0), 0)
        if not by_rows and _grows_with_rows(value, whole, taken, reference):
            continue
        if key.phase == "backward" and by_rows and value.shape[:1] != (len(taken),):
            continue  # a sum over these rows: of positions, where one process took row by row
        value = value / scale if key.phase == "backward" else value
        part_of = partial(
            axes.part_of_output, value, whole.shape, by_rows=by_rows, layer=layers[key.layer]
        )
        try:
            part = part_of(taken)
        except ValueError as error:
            raise ValueError(f"{key.layer}, {key.phase}: {error}") from error
        if key.phase == "backward" and not equal.keys().isdisjoint(taken):
            part = of_closest_rows(part, part_of, taken, equal, whole, reference.allowed(key))
        yield key, part
    for phase, parts in step.parts.items():
        for name, part in reversed(parts.items()):
            key = Key(phase, reference.parameters[name])
            if key in reference.values:
                yield key, part


def _grows_with_rows(value, whole, taken, reference):
    """Return whether an output may be rows times something: flattened tokens, states of an LSTM.

    With several micro-batches in one process such outputs differ, and are not in the reference.
    With one, nothing distinguishes them from a table of positions.
    """
    return (
        reference.microbatches == 1
        and value.dim() == whole.dim()
        and len(taken) != reference.rows
        and any(
            own * reference.rows == size * len(taken)
            for own, size in zip(value.shape, whole.shape, strict=True)
        )
    )


def _finding(key, part, reference):
    expected = part.cut(reference.values[key._replace(microbatch=0)])
    return Finding(part.slot, distance(part.value, expected), reference.allowed(key), "")


def _order(reference):
    """Return a sort key for keys: their places in the order in which one process computes."""
    places = {key: place for place, key in enumerate(reference.values)}

    def order(key):
        place = places.get(key._replace(microbatch=0), -1)
        return PHASES.index(key.phase), key.microbatch, place

    return order


def _divergence(key, parts, reference, axes, wrong, compared):
    part = parts.get(key)
    own = part and Held(
        part.value,
        part.slot,
        part.cut(reference.values[key._replace(microbatch=0)]),
        reference.allowed(key),
    )
    held = {rank: part for rank, part in enumerate(from_all_ranks(own)) if part}
    ranks = tuple(rank for rank, part in held.items() if part.wrong)
    axis, factor, what = classify(held, axes)
    error = max(distance(held[rank].value, held[rank].expected) for rank in ranks)
    allowed = reference.allowed(key)
    return Divergence(
        key.phase,
        key.layer,
        key.microbatch,
        ranks,
        axis,
        what,
        error,
        allowed,
        factor,
        wrong,
        compared,
    )


def _wrong_steps(step, reference, axes):
    """Return the Divergence of ranks that step, or skip a step, unlike one process; or None."""
    stepped = from_all_ranks(step.stepped)
    ranks = tuple(rank for rank, own in enumerate(stepped) if own != reference.stepped)
    if not ranks or (reference.draws and len(set(stepped)) == 1):
        return None
    did, alone = ("did not step", "did") if reference.stepped else ("stepped", "did not")
    who = "all ranks" if len(ranks) == len(stepped) else ", ".join(map(axes.where, ranks))
    what = f"the optimizer of {who} {did}; one process {alone}"
    axis = next(
        (
            axis
            for axis in axes.sizes
            if any(len({stepped[rank] for rank in line}) > 1 for line in axes.neighbours(axis))
        ),
        None,
    )
    return Divergence("step", "", 0, ranks, axis, what)
