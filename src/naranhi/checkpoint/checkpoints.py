"""Save and load the checkpoints of a run; see the package for what it promises."""

from __future__ import annotations

import os
import warnings
from threading import Thread
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from naranhi.checkpoint.parts import Model
from naranhi.checkpoint.ranks import new_group, on_all
from naranhi.checkpoint.reading import find, read
from naranhi.checkpoint.storage import CheckpointError, Storage
from naranhi.checkpoint.writing import prepare
from naranhi.distributed import agree, from_all_ranks, raise_on_all


class Saved(NamedTuple):
    """What `Checkpoints.load` has found beside the state of model and optimizer.

    Args:
        step: the step of the checkpoint.
        state: the `state` that was saved with it.
        skipped: {step: why} of newer checkpoints that are damaged.
        missing: what the model has, and the checkpoint has not: parameters, buffers, and modules
            with extra state. They are as they were.
        unexpected: what the checkpoint has, and the model has not.
    """

    step: int
    state: dict[str, Any]
    skipped: dict[int, str]
    missing: list[str]
    unexpected: list[str]


class Checkpoints:
    """The checkpoints of a run, in one folder. Every rank makes it, and calls its methods alike.

    Args:
        folder: the same for all ranks, on a file system that all see; made by the first save.
        keep: how many of the newest checkpoints remain; None for all.
        group: the ranks that have parts of the model; None for all, in a group of its own that
            waits for slow disks (`ranks.PATIENCE`). A group that is given is used as it is: for
            `save_async` nothing else may use it meanwhile, and a rank that reads or writes for
            longer than the group's timeout ends the save. It needs a backend for the CPU, such as
            gloo.

    Raises:
        ValueError: ranks were given different folders or `keep`; raised on every rank.
    """

    keep: int | None
    group: dist.ProcessGroup

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.keep, self._storage = keep, Storage(folder)
        # Note [Where ranks meet]
        # A rank that does not call what the others call is missed after the timeout of the training
        # itself. So ranks meet in the training's group, before they wait for disks in their own.
        self._meets_in = group
        raise_on_all(lambda: _require_number(keep), group, kind=ValueError)
        agree(group, folder=os.fspath(folder), keep=keep)
        # Saves in the background exchange messages while the training does: not in one group.
        self.group = new_group() if group is None else group
        self._thread, self._error, self._damaged = None, None, set()

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending, as rank 0 sees them.

        Ranks may see different ones on a network file system, and must not go different ways.

        Raises:
            CheckpointError: a rank cannot read the folder; on every rank.
        """
        listed = raise_on_all(self._storage.steps, self._meets_in, kind=CheckpointError)
        return from_all_ranks(listed, self._meets_in)[0]

    def claim(self) -> None:
        """Take the folder for this run, so that no other saves into it; the first save does it.

        Raises:
            CheckpointError: another run saves into it, or it cannot be written; on every rank.
        """
        self._meet()
        self._on_first(self._storage.claim)

    def save(
        self, step: int, model: Model, optimizer: torch.optim.Optimizer | None = None, **state: Any
    ) -> None:
        """Save a checkpoint; return once it is committed.

        Args:
            step: how many steps the training has done; more than at any earlier save.
            model: a `zero.Zero`, a `pipeline.Pipeline`, a `data_parallel.DDP`, or a module or list
                of layers, whole or split by `tensor_parallel`; between two steps. What its modules
                return by `get_extra_state` is saved, too, if ranks with the same module agree.
            optimizer: its optimizer; None leaves its state out. (A pipeline whose schedule updates
                weights within a step has optimizers of its own, which are saved.)
            **state: plain values and tensors, the same on every rank.

        Raises:
            CheckpointError: on every rank, or, if one is lost, on those that are left; the earlier
                checkpoints are as they were.
        """
        write = self._prepare(step, model, optimizer, state, copy=False)
        self._run(write)

    def save_async(
        self, step: int, model: Model, optimizer: torch.optim.Optimizer | None = None, **state: Any
    ) -> None:
        """Save a checkpoint in the background; return once the state is copied, to CPU memory.

        It is committed some time later, unless the process is killed before; `wait` waits for it,
        and so does the next save. Arguments are those of `save`.

        Raises:
            CheckpointError: on every rank, for what is wrong with this save, or was with the one
                before. What goes wrong in the background is raised by the next save, or by `wait`.
        """
        write = self._prepare(step, model, optimizer, state, copy=True)

        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def background():
            if device is not None:
                torch.cuda.set_device(device)  # a new thread begins with the first GPU
            try:
                self._run(write)
            except Exception as error:  # `wait` raises it
                self._error = error

        self._thread = Thread(target=background, name=f"checkpoint of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in the background is committed.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
    ) -> Saved:
        """Load a checkpoint that any mesh has saved into the same model on this one.

        Random number generators get the states that they had, if every rank has the elements that
        it had then. Otherwise they are seeded anew, from what they were seeded with and the step.

        Args:
            model: as for `save`.
            optimizer: its optimizer; None loads the model alone.
            step: of the checkpoint; None for the newest that is as it was written.
            strict: False loads what model and checkpoint both have by name, and no optimizer, as
                `torch.nn.Module.load_state_dict` does: to go on with a new head, for example.

        Raises:
            CheckpointError: on every rank, before anything is changed on any: there is no such
                checkpoint, or it is damaged, of another model or optimizer, or of a newer format;
                or a rank cannot read one, which may be whole, so none before it is loaded. Also
                on every rank: one of them had no room for what was read; then the model is loaded
                in part, and not to be used.
        """
        self._meet(step=step, strict=strict)
        newest = find(self._storage, self.group, step)
        if newest.skipped and dist.get_rank(self.group) == 0:
            damage = "; ".join(newest.skipped.values())
            warnings.warn(f"loading step {newest.step} instead: {damage}", stacklevel=2)
        state, *others = read(self._storage, self.group, newest, model, optimizer, strict)
        self._damaged.update(newest.skipped)
        return Saved(newest.step, state, newest.skipped, *others)

    def close(self) -> None:
        """Wait for the save in the background, and let other runs save into the folder.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._storage.release()
            if self._meets_in is None and self.group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except (CheckpointError, RuntimeError) as failed:
            if error is None:
                raise
            error.add_note(f"the save in the background has failed as well: {failed}")

    def _meet(self, **things):
        """Wait for the save in the background and for the other ranks; all have the same things."""
        self.wait()
        try:
            agree(self._meets_in, **things)  # see Note [Where ranks meet]
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def _prepare(self, step, model, optimizer, values, copy):
        """Return what this rank writes, when the folder is this run's and ready for it."""
        self._meet(step=step)
        write = prepare(step, model, optimizer, values, self._storage, self.group, copy)
        self._on_first(lambda: self._storage.begin(step, self._damaged))
        return write

    def _run(self, write):
        write.run(self.keep, self._damaged)
        self._damaged.discard(write.step)  # it has been replaced

    def _on_first(self, function):
        """Call `function()` on rank 0; raise CheckpointError on every rank if it fails."""
        first = dist.get_rank(self.group) == 0
        on_all(lambda: function() if first else None, self.group)


def _require_number(keep):
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a whole number of at least 1, or None, not {keep!r}")
