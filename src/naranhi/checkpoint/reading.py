"""A checkpoint from disk: the newest that is as it was written, read before anything is changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from naranhi.checkpoint import random_state, rest
from naranhi.checkpoint.layout import Layout, compare, from_json, merge
from naranhi.checkpoint.parts import Model
from naranhi.checkpoint.planners import LoadBoxes
from naranhi.checkpoint.state import Loading, State
from naranhi.checkpoint.storage import CheckpointError, DamagedError, Storage
from naranhi.checkpoint.writing import causes
from naranhi.distributed import from_all_ranks, raise_on_all


class Found(NamedTuple):
    """A committed checkpoint whose files are as they were written.

    Args:
        step: its step.
        manifest: its manifest.
        skipped: {step: why} of newer checkpoints that are damaged.
    """

    step: int
    manifest: dict[str, Any]
    skipped: dict[int, str]


def find(place: Storage, group: dist.ProcessGroup, step: int | None) -> Found:
    """Return the newest checkpoint that is not damaged, or that of a step.

    Args:
        place: where to look.
        group: the ranks, which share the work of reading the files.
        step: the step; None for the newest.

    Raises:
        CheckpointError: on every rank: there is none, or it is damaged or of another format.
    """
    listed = raise_on_all(place.steps, group, kind=CheckpointError)
    steps = from_all_ranks(listed, group)[0]  # a network file system may show ranks different ones
    if not steps or step not in (None, *steps):
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        others = f"it has {', '.join(map(str, steps))}" if steps else "nothing was saved there"
        raise CheckpointError(
            f"{place.folder} has no {which}: {others}, or a save was not finished"
        )
    skipped = {}
    for candidate in reversed(steps) if step is None else [step]:
        try:
            return Found(candidate, _checked(place, group, candidate), skipped)
        except DamagedError as error:
            skipped[candidate] = str(error)
    why = "; ".join(skipped.values())
    if step is not None:
        raise CheckpointError(f"step {step} of {place.folder} cannot be loaded: {why}")
    raise CheckpointError(f"{place.folder} has no checkpoint that can be loaded: {why}")


def _checked(place, group, step):
    """Return a manifest whose files are as they were written; each rank reads some of them."""
    manifest = problem = None
    try:
        manifest = place.manifest(step)
        share = slice(dist.get_rank(group), None, dist.get_world_size(group))
        place.verify(step, manifest, share)
    except CheckpointError as error:
        problem = error
    problems = [error for error in from_all_ranks(problem, group) if error]
    for error in sorted(problems, key=lambda error: isinstance(error, DamagedError)):
        raise error
    return manifest


def read(
    place: Storage,
    group: dist.ProcessGroup,
    found: Found,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer; return what the caller saved beside them.

    Args:
        place: where it is.
        group: the ranks that have parts of the model.
        found: the checkpoint.
        model: as `Checkpoints.load` takes it.
        optimizer: its optimizer, or None.

    Raises:
        CheckpointError: on every rank, before anything is changed: it is of another model or
            optimizer.
    """

    def begin():
        path = place.path(found.step) / rest.NAME
        return State(model, optimizer), torch.load(path, map_location="cpu", weights_only=True)

    state, content = raise_on_all(begin, group, kind=CheckpointError)
    layout = merge(from_all_ranks(state.summary(), group))
    saved = Layout.of(from_json(found.manifest["tensors"]), content)
    compare(saved, layout, with_optimizer=bool(layout.kind))
    loading = raise_on_all(
        lambda: Loading(state, saved.tensors, saved.scalars), group, kind=CheckpointError
    )
    try:
        dcp.load(
            loading.tensors,
            storage_reader=dcp.FileSystemReader(place.path(found.step)),
            planner=LoadBoxes(),
            process_group=group,
        )
    except CheckpointException as error:  # on every rank
        raise CheckpointError(causes(error)) from error
    loading.apply(saved.options, saved.extra)
    if saved.digests == layout.digests:  # every rank has the elements that it had then
        random_state.put(content["random"][dist.get_rank(group)])
    else:
        random_state.renew(found.step)
    return content["state"]
