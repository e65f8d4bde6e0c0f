"""A checkpoint from disk: the newest that is not damaged, read before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from naranhi.checkpoint import files, random_state, rest
from naranhi.checkpoint.layout import Layout, compare, from_json, merge, names
from naranhi.checkpoint.loading import Loading
from naranhi.checkpoint.parts import Model
from naranhi.checkpoint.planners import LoadBoxes
from naranhi.checkpoint.ranks import gather, none_lost, on_all
from naranhi.checkpoint.state import State
from naranhi.checkpoint.storage import CheckpointError, DamagedError, Storage
from naranhi.checkpoint.writing import causes


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
        CheckpointError: on every rank: there is none, or it is damaged or of another format, or a
            rank cannot read it.
    """
    listed = on_all(place.steps, group)
    steps = gather(listed, group)[0]  # a network file system may show ranks different ones
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
    """Return a manifest whose files are as they were written; each rank reads some of them.

    Damage shows in the files themselves, and an earlier checkpoint may be loaded instead. If a rank
    cannot read a file, the checkpoint may be intact: raise an error for a person to resolve, as the
    run would otherwise go on from an earlier step and replace a good checkpoint.
    """
    share = slice(dist.get_rank(group), None, dist.get_world_size(group))

    def check():
        """Return the manifest, what is damaged, and which file this rank does not see."""
        try:
            manifest = place.manifest(step)
            place.verify(step, manifest, share)
        except DamagedError as error:
            return None, str(error), None
        except FileNotFoundError as error:
            return None, f"{error.filename} cannot be read: {error.strerror}", error.filename
        return manifest, None, None

    manifest, *own = on_all(check, group)
    of_ranks = gather(own, group)
    for path in sorted({path for _, path in of_ranks if path}):
        if any(gather(on_all(lambda: files.is_there(Path(path)), group), group)):  # noqa: B023
            unseen = [str(rank) for rank, (_, missed) in enumerate(of_ranks) if missed == path]
            raise CheckpointError(
                f"{path} is there, but rank {', '.join(unseen)} did not see it within "
                f"{files.APPEARS:g} s: put the folder on a file system that all ranks see; if it "
                "is on one, load once more"
            )
    if damage := next((damage for damage, _ in of_ranks if damage), None):
        raise DamagedError(damage)
    return manifest


def read(
    place: Storage,
    group: dist.ProcessGroup,
    found: Found,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Load a checkpoint into a model and its optimizer.

    Args:
        place: where it is.
        group: the ranks that have parts of the model.
        found: the checkpoint.
        model: as `Checkpoints.load` takes it.
        optimizer: its optimizer, or None.
        strict: as `Checkpoints.load` takes it.

    Returns:
        What the caller saved beside them; the names that only the model has; and those that only
        the checkpoint has.

    Raises:
        CheckpointError: on every rank, before anything is changed: it is of another model or
            optimizer; or, after parts have been changed, a rank could not apply what was read.
    """

    def begin():
        if optimizer is not None and not strict:
            raise CheckpointError("strict=False loads a model alone, without an optimizer")
        path = place.path(found.step) / rest.NAME
        files.wait_for(path)
        return State(model, optimizer, strict), torch.load(
            path, map_location="cpu", weights_only=True
        )

    state, content = on_all(begin, group)
    layout = merge(gather(state.summary(), group))
    saved = Layout.of(from_json(found.manifest["tensors"]), content)
    compare(saved, layout, with_optimizer=bool(layout.kind), strict=strict)
    loading = on_all(lambda: Loading(state, saved.tensors, saved.scalars), group)
    try:
        with none_lost():
            dcp.load(
                loading.tensors,
                storage_reader=dcp.FileSystemReader(place.path(found.step)),
                planner=LoadBoxes(),
                process_group=group,
            )
    except CheckpointException as error:  # on every rank
        raise CheckpointError(causes(error)) from error
    on_all(lambda: loading.apply(saved.options, saved.extra), group)
    if saved.digests == layout.digests:  # every rank has the same elements as when saving
        random_state.put(content["random"][dist.get_rank(group)])
    else:
        random_state.renew(found.step)
    here, there = dict.fromkeys(names(layout)), dict.fromkeys(names(saved))
    missing = [name for name in here if name not in there]
    return content["state"], missing, [name for name in there if name not in here]
