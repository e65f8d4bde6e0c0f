"""Save and load the checkpoints of a run; the package's docstring says what is guaranteed."""

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
    """The result of `Checkpoints.load`, besides the state of model and optimizer.

    Args:
        step: the step of the checkpoint.
        state: the `state` that was saved with it.
        skipped: {step: why} of newer checkpoints that are damaged.
        missing: names that the model has and the checkpoint lacks: of parameters, buffers, and
            modules with extra state. Their values did not change.
        unexpected: names that the checkpoint has and the model lacks.
    """

    step: int
    state: dict[str, Any]
    skipped: dict[int, str]
    missing: list[str]
    unexpected: list[str]


class Checkpoints:
    """The checkpoints of a run, in one folder. Every rank makes one and calls the same methods.

    Args:
        folder: the same for all ranks, on a file system that all see; the first save creates it.
        keep: how many of the newest checkpoints remain; None for all.
        group: the ranks that have parts of the model; None for all ranks, in a new group whose
            timeout allows for slow disks (`ranks.PATIENCE`). A group that is passed is used as it
            is: nothing else may use it during a `save_async`, and the save fails if a rank reads
            or writes for longer than the group's timeout. It needs a backend for the CPU, such as
            gloo.

    Raises:
        ValueError: on every rank: `folder` or `keep` differs between ranks, or `keep` is invalid.
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
        # If a rank does not join a call, the others should notice within the training's timeout. So
        # ranks first meet in the training's group, then wait for disks in a separate one.
        self._meets_in = group
        raise_on_all(lambda: _require_number(keep), group, kind=ValueError)
        agree(group, folder=os.fspath(folder), keep=keep)
        # Background saves and the training send messages at the same time: use separate groups.
        self.group = new_group() if group is None else group
        self._thread, self._error, self._damaged = None, None, set()

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending, as rank 0 sees them.

        Ranks may see different steps on a network file system, but must all choose the same one.

        Raises:
            CheckpointError: a rank cannot read the folder; on every rank.
        """
        listed = raise_on_all(self._storage.steps, self._meets_in, kind=CheckpointError)
        return from_all_ranks(listed, self._meets_in)[0]

    def claim(self) -> None:
        """Lock the folder against saves of other runs; without this call, the first save does it.

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
            CheckpointError: the save failed; on every rank, or, if one is lost, on the others. The
                earlier checkpoints are unchanged.
        """
        write = self._prepare(step, model, optimizer, state, copy=False)
        self._run(write)

    def save_async(
        self, step: int, model: Model, optimizer: torch.optim.Optimizer | None = None, **state: Any
    ) -> None:
        """Save a checkpoint in the background; return once the state is copied to CPU memory.

        The checkpoint is committed later, unless the process is killed first; `wait` waits for it,
        and so does the next save or load. Arguments are those of `save`.

        Raises:
            CheckpointError: on every rank, if this save cannot start or the last one failed. The
                next save or load, `wait` or `close` raises an error from the background.
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
            CheckpointError: the save failed; on every rank.
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
        """Load a checkpoint, saved on any mesh, into the same model on this mesh.

        Random number generators get their saved states if every rank has the same elements as when
        they were saved. Otherwise they are seeded from torch's current state and the step.

        Args:
            model: as for `save`.
            optimizer: its optimizer; None loads the model alone.
            step: the step of the checkpoint; None for the newest that is not damaged.
            strict: False loads only names that both model and checkpoint have, as
                `torch.nn.Module.load_state_dict` does, and no optimizer: for a new head, say.

        Raises:
            CheckpointError: on every rank, before anything is changed: there is no such checkpoint;
                it is damaged, of a different model or optimizer, or of another format; or a rank
                cannot read one, which may be intact, so no earlier one is loaded. Also on every
                rank, after changes: a rank had no memory for what was read; the model is then only
                partly loaded, and must not be used.
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
        """Wait for the background save and all ranks; raise CheckpointError if `things` differ."""
        self.wait()
        try:
            agree(self._meets_in, **things)  # see Note [Where ranks meet]
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def _prepare(self, step, model, optimizer, values, copy):
        """Return what this rank writes, once this run holds the folder and the folder is ready."""
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
