"""Make a sharded model whole for a while, to read or write it; at other times both are errors.

The next forward, step or block detects a write at another time, if torch counts the write: writes
through `.data` are not counted, and are lost.

While the model is whole, its parameters are views of new memory with the values that the optimizer
works on (in mixed precision the masters, in fp32). ZeRO does not free that memory: a `state_dict`
or a detached tensor that is taken from it keeps it alive for as long as it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from naranhi.autograd.hooks import ModuleHook
from naranhi.autograd.transforms import differentiates, transforms
from naranhi.collectives import ring
from naranhi.collectives.chunks import overlap
from naranhi.distributed import agree, from_all_ranks

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.zero import Zero


class Whole:
    """The whole model of a `zero.Zero`: `state` is "read" or "written" in a block, otherwise None.

    Its hooks raise RuntimeError if the state of the model, or of a part of it, is read, loaded or
    copied while the parameters do not hold it: at stage 3 they are sharded, in mixed precision bf16
    copies of the masters. The hooks keep the `Zero` alive as long as any module with parameters.

    Args:
        zero: The sharded model.
    """

    zero: Zero
    state: str | None

    def __init__(self, zero: Zero) -> None:
        self.zero, self.state = zero, None
        self.flats: list[FlatParam] = [flat for unit in zero.units for flat in unit.flats]
        self._versions = {}
        self.note_versions(self.flats)

    def hooks(self) -> Iterator[RemovableHandle]:
        """Yield the handles of hooks of all modules, since a submodule's state may be read, too."""
        for module in self.zero.model.modules():
            held = any(True for _ in module.parameters())  # without any, copying loses nothing
            copying = self.require_readable if held else None
            reading = ModuleHook(self._before_reading, copying=copying)
            yield module.register_state_dict_pre_hook(reading)
            yield module.register_load_state_dict_pre_hook(ModuleHook(self._before_loading))

    # --- whole for a while -----------------------------------------------------------------------

    @contextmanager
    def gathered(self, write: bool) -> Iterator[None]:
        """Implement `Zero.gathered`.

        Args:
            write: As in `Zero.gathered`.
        """
        if self.state:
            if write and self.state != "written":
                raise RuntimeError("this model is in gathered(write=False): leave that block first")
            yield
            return
        self.require_own_memory()
        rows = self.unshard()
        self.state = "written" if write else "read"
        try:
            yield
            if write:
                self._keep(rows)
        finally:
            self.state = None
            for flat in rows:
                flat.use_sharded()
            self.note_versions(self.flats)  # writes of the block are kept, or lost on purpose
        if write:
            self.zero.refresh(list(rows))  # frozen parameters, too

    def unshard(self) -> dict[FlatParam, torch.Tensor]:
        """Make the model whole; return {flat parameter: its whole values, in one flat tensor}.

        At stages 1 and 2 in fp32 it is whole already.
        """
        self.zero.reshard()
        if self._is_itself:
            return {flat: flat.whole for flat in self.flats}
        rows, kernels = {}, []
        for flat in self.flats:
            rows[flat] = flat.master.new_empty(flat.ranks * flat.size)
            blocks = rows[flat].view(flat.ranks, -1).unbind()
            blocks[flat.rank].copy_(flat.master)
            kernels.append(ring.all_gather(blocks, flat.group, flat.rank, flat.ranks))
        overlap(kernels)
        for flat, row in rows.items():
            flat.use_unsharded(row)
        return rows

    def _keep(self, rows):
        """Copy what was written into the masters.

        Unless all ranks have written the same, raise ValueError on every rank and leave the masters
        as they were. (At stages 1 and 2 in fp32 the parameters are the masters and are written
        already.)
        """
        values = {}  # by the axes over whose ranks they have to be the same
        for flat, row in rows.items():
            views, own = flat.cut(row), values.setdefault(flat.axes, {})
            for name, param, view in zip(flat.names, flat.parameters, views, strict=True):
                if param.data_ptr() != view.data_ptr():  # `param.data = ...` was assigned
                    view.copy_(param.detach())
                own[f"parameter {name}"] = view
        problem = None
        for axes, own in values.items():
            try:
                agree(axes, **own) if axes else None
            except ValueError as error:
                problem = str(error)
        if len(values) > 1:  # experts, whose copies may be on other ranks than those of all else
            for axes in (self.zero.axes, *filter(None, values), self.zero.axes):
                problem = next(filter(None, from_all_ranks(problem, axes)), None)
        if problem:
            raise ValueError(problem)
        for flat, row in rows.items():
            flat.master.copy_(row[flat.shard_slice])

    # --- an error otherwise ----------------------------------------------------------------------

    @property
    def _is_itself(self):
        """Return whether the parameters share memory with what is trained, and are always whole."""
        return self.zero.stage < 3 and self.zero.precision == "fp32"

    @property
    def _what(self):
        return (
            "this model is sharded"
            if self.zero.stage == 3
            else "this model's parameters are copies in bf16 of the masters in fp32"
        )

    def require_readable(self) -> None:
        """Raise RuntimeError unless the model's parameters hold its state."""
        if not (self.state or self._is_itself):
            raise RuntimeError(
                f"{self._what}: read it inside of Zero.gathered(), or save it by naranhi.checkpoint"
            )

    def passes_by(self) -> bool:
        """Return whether torch.func takes gradients of the model now: then the hooks do nothing.

        Raises:
            RuntimeError: If so, and the parameters do not hold the model's state. At stage 3, also
                for a transform that takes none, such as `torch.vmap`.
        """
        inside = differentiates()
        transformed = inside or (self.zero.stage == 3 and transforms())
        if transformed and not (self.state or self._is_itself):
            raise RuntimeError(
                f"{self._what}, and torch.func cannot transform it: do that inside of "
                "Zero.gathered()"
            )
        return inside

    def require_forward(self, recording: bool) -> None:
        """Raise RuntimeError for parameters in other memory, or for a recorded forward on masters.

        The latter is a forward in a `gathered` block in mixed precision.

        Args:
            recording: Whether autograd records the forward.
        """
        if not self.state:
            self.require_own_memory()
        if self.state and self.zero.precision == "bf16" and recording:
            raise RuntimeError(
                "inside of gathered() parameters are the masters in fp32: leave the "
                "block before a forward that is to be trained"
            )

    def require_backward(self, whole: bool) -> None:
        """Raise RuntimeError at stage 3 in a block for a backward through a forward from before it.

        The parameters of that forward have been freed.

        Args:
            whole: Whether the forward was in a block.
        """
        if self.state and not whole and self.zero.stage == 3:
            raise RuntimeError(
                "inside of gathered() a backward cannot go through a forward from before the "
                "block, whose parameters stage 3 has freed: run the backward outside of the block"
            )

    def require_outside(self, what: str, moved: bool = False) -> None:
        """Raise RuntimeError inside a `gathered` block, or for parameters in other memory.

        Args:
            what: What was called, for the message.
            moved: Whether parameters may be in other memory.
        """
        if self.state:
            raise RuntimeError(f"{what} inside of a gathered() block: leave the block first")
        if not moved:
            self.require_own_memory()

    def require_own_memory(self) -> None:
        """Raise RuntimeError for a parameter in other memory, or written: values would be lost."""
        name = next((name for flat in self.flats for name in flat.in_other_memory()), None)
        if name is not None:
            raise RuntimeError(
                f"parameter {name} is no longer in the memory that Zero trains: its .data was "
                "assigned, or the model was converted after Zero was made; convert it before, and "
                "write into parameters inside of gathered(write=True)"
            )
        for flat, versions in self._versions.items():
            now = _versions(flat)
            if now != versions:
                name = next(
                    name
                    for name, old, new in zip(flat.names, versions, now, strict=True)
                    if old != new
                )
                raise RuntimeError(
                    f"parameter {name} was written while {self._what}, so the change is lost: call "
                    "refresh() of Zero to go on, and write inside of gathered(write=True)"
                )

    def note_versions(self, flats: Iterable[FlatParam]) -> None:
        """Accept all writes into parameters so far: they are kept, or lost on purpose.

        Args:
            flats: The flat parameters of these parameters.
        """
        if not self._is_itself:
            self._versions.update((flat, _versions(flat)) for flat in flats)

    def _before_reading(self, module, prefix, keep_vars):
        self.require_readable()

    def _before_loading(self, module, state, prefix, metadata, *others):
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that "
                "Zero has sharded: load without assign"
            )
        if not (self.state == "written" or self._is_itself):
            raise RuntimeError(
                f"{self._what}: load into it inside of Zero.gathered(write=True), "
                "or load a checkpoint by naranhi.checkpoint"
            )


def _versions(flat):
    """Return how often torch has seen each parameter written in place."""
    return [param._version for param in flat.parameters]
