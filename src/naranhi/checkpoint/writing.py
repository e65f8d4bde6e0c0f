"""One checkpoint on its way to disk: agreed on by all ranks, copied, written, committed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from naranhi.checkpoint import files, random_state, rest, storage
from naranhi.checkpoint.boxes import Boxes
from naranhi.checkpoint.layout import as_json, merge
from naranhi.checkpoint.parts import Model
from naranhi.checkpoint.planners import SaveBoxes
from naranhi.checkpoint.ranks import gather, none_lost, on_all
from naranhi.checkpoint.state import State
from naranhi.checkpoint.storage import CheckpointError, Storage

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass
class Write:
    """What this rank writes of a checkpoint.

    Args:
        step: the step of the checkpoint.
        tensors: {name: Boxes} that this rank writes; all ranks' boxes have each element once.
        rest: the content of `rest.NAME`, which rank 0 writes.
        manifest: what the manifest says beside the files.
        place: where to write.
        group: the ranks that write.
    """

    step: int
    tensors: dict[str, Boxes]
    rest: bytes
    manifest: dict[str, Any]
    place: Storage
    group: dist.ProcessGroup

    def run(self, keep: int | None, damaged: Collection[int] = ()) -> None:
        """Write and commit: data first, then the manifest, then the rename.

        Args:
            keep: how many of the newest checkpoints remain; None for all.
            damaged: committed steps that do not count as checkpoints, except this step, now whole.

        Raises:
            CheckpointError: on every rank; nothing is committed, and no other checkpoint deleted.
            LostRankError: a rank was lost. If that was after the rename, this step is committed.
        """
        first, part = dist.get_rank(self.group) == 0, self.place.part(self.step)
        try:
            self._on_all(lambda: _require_seen(part))
            self._write_shards(part)
            written = gather(self._on_all(lambda: self._finish(part)), self.group)
            manifest = self.manifest | {
                "files": {name: file for of_rank in written for name, file in of_rank.items()}
            }
            # No rank goes on before the checkpoint is there.
            self._on_all(lambda: self.place.commit(self.step, manifest) if first else None)
        except CheckpointError:
            if first:
                self.place.abandon(self.step)
            raise
        if keep is not None:
            others = {step for step in damaged if step != self.step}
            self._on_all(lambda: self.place.keep(keep, others) if first else None)

    def _write_shards(self, part):
        try:
            with none_lost():
                dcp.save(
                    self.tensors,
                    storage_writer=_Writer(part, overwrite=False),
                    planner=SaveBoxes(),
                    process_group=self.group,
                )
        except CheckpointException as error:  # on every rank
            raise CheckpointError(causes(error)) from error

    def _finish(self, part):
        """Write what is not sharded, on rank 0; return the digests of this rank's files."""
        rank = dist.get_rank(self.group)
        written = files.digests(part, f"__{rank}_*.distcp")
        if rank == 0:
            storage.write(part / rest.NAME, self.rest)
            written |= files.digests(part, ".metadata") | files.digests(part, rest.NAME)
        return written

    def _on_all(self, function):
        return on_all(function, self.group)


class _Writer(dcp.FileSystemWriter):
    """A writer whose error says what the system said, such as that the disk is full.

    Where that fails, `torch.save` raises an error of its own about positions in the file.
    """

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None  # only the error itself is sent to the other ranks


def prepare(
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    values: Mapping[str, Any],
    place: Storage,
    group: dist.ProcessGroup,
    copy: bool,
) -> Write:
    """Return what this rank writes, once all ranks have checked that together they have it all.

    Args:
        step: how many steps the training has done.
        model: as `Checkpoints.save` takes it.
        optimizer: its optimizer, or None.
        values: what the caller saves beside model and optimizer.
        place: where to write.
        group: the ranks that write.
        copy: whether the tensors are copied, to CPU memory.

    Raises:
        CheckpointError: on every rank, before anything is written: the ranks differ, or their parts
            of a tensor are not the whole of it, or something is not element-wise or not plain.
    """
    state, digests = on_all(lambda: (State(model, optimizer), rest.digests(values)), group)
    of_ranks = gather(digests, group)
    for key in dict.fromkeys(key for own in of_ranks for key in own):
        if len({own.get(key) for own in of_ranks}) > 1:
            raise CheckpointError(
                f"{key} differs between the ranks: save what is the same on all of them"
            )
    layout = merge(gather(state.summary(), group))
    _warn_of_differences(gather(on_all(lambda: _checksums(state), group), group), group)
    content = {
        **layout.not_sharded(),
        "random": gather(on_all(random_state.get, group), group),
        "state": dict(values),
    }
    data = on_all(lambda: rest.serialized(content), group)
    tensors = state.written_by(dist.get_rank(group), layout)
    if copy:
        tensors = on_all(lambda: _copied(tensors), group)
    manifest = {
        "ranks": dist.get_world_size(group),
        "optimizer": layout.kind,
        "tensors": as_json(layout.tensors),
    }
    return Write(step, tensors, data, manifest, place, group)


def causes(error: CheckpointException) -> str:
    """Return the messages of the errors that DCP has gathered from the ranks, one per line."""
    return "\n".join(f"on rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())


def _checksums(state):
    """Return {(parameter, box): the sum of its elements' bits as integers, without their carry}.

    A sum in the elements' own width is ten times as fast as one that widens them.
    """
    return {
        (name, box): int(view.view(bits := BITS[view.element_size()]).sum(dtype=bits))
        for name, boxes in state.tensors.items()
        if name.startswith("parameters.") and boxes.dtype.itemsize in BITS
        for box, view in boxes.views.items()
    }


def _warn_of_differences(of_ranks, group):
    """Warn, on rank 0, of replicas that differ: the file has each parameter from one of them."""
    first, differ = {}, {}
    for rank, own in enumerate(of_ranks):
        for where, checksum in own.items():
            one, expected = first.setdefault(where, (rank, checksum))
            if checksum != expected:
                differ.setdefault(where[0].partition(".")[2], (one, rank))
    if differ and dist.get_rank(group) == 0:
        name, (one, rank) = next(iter(differ.items()))
        others = f" (and {len(differ) - 1} more parameters)" if len(differ) > 1 else ""
        warnings.warn(
            f"parameter {name} is not the same on rank {one} and rank {rank}{others}: the "
            "checkpoint takes each parameter from one rank, so it may match the model of no rank",
            stacklevel=2,
        )


def _copied(tensors):
    return {
        name: boxes._replace(
            views={box: view.to("cpu", copy=True) for box, view in boxes.views.items()}
        )
        for name, boxes in tensors.items()
    }


def _require_seen(folder):
    try:
        files.wait_for(folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}, which rank 0 has made, is not there: the folder has to be on a file system "
            "that all ranks see"
        ) from None
