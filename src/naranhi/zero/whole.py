"""Make a sharded model whole for a while, to read or write it; at other times that is an error.

While it is whole, its parameters are views of new memory with the values that the optimizer works
on (in mixed precision the masters, in fp32). Nobody frees that memory: what is taken out of it, a
`state_dict` or a detached tensor, keeps it alive for as long as it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from naranhi.autograd.hooks import ModuleHook
from naranhi.collectives import ring
from naranhi.collectives.chunks import overlap
from naranhi.distributed import agree

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.zero import Zero


class Whole:
    """How a `zero.Zero` makes its model whole; `state` is "read" or "written" while it is, or None.

    Its hooks raise RuntimeError if the model's state is read, loaded or copied while it is not
    there: at stage 3 there are shards, in mixed precision bf16 copies of what is trained.

    Args:
        zero: The sharded model.
    """

    zero: Zero
    state: str | None

    def __init__(self, zero: Zero) -> None:
        self.zero, self.state = zero, None

    def hooks(self) -> Iterator[RemovableHandle]:
        """Yield the handles of hooks of all modules, since a submodule's state may be read, too."""
        for module in self.zero.model.modules():
            yield module.register_state_dict_pre_hook(ModuleHook(self._before_reading))
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
                raise RuntimeError("this model is gathered to be read: leave that block first")
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
        if write:
            self.zero.refresh(list(rows))  # frozen parameters, too

    def unshard(self) -> dict[FlatParam, torch.Tensor]:
        """Make the model whole; return {flat parameter: its whole values, in one flat tensor}.

        At stages 1 and 2 in fp32 it is whole already.
        """
        self.zero.reshard()
        flats = [flat for unit in self.zero.units for flat in unit.flats]
        if self._is_itself:
            return {flat: flat.whole for flat in flats}
        rows, kernels = {}, []
        for flat in flats:
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
        values = {}
        for flat, row in rows.items():
            views = flat.cut(row)
            for name, param, view in zip(flat.names, flat.parameters, views, strict=True):
                if param.data_ptr() != view.data_ptr():  # `param.data = ...` was assigned
                    view.copy_(param.detach())
                values[f"parameter {name}"] = view
        agree(self.zero.axes, **values)
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

    def require_forward(self, recording: bool) -> None:
        """Raise RuntimeError for parameters in other memory, and for a forward in mixed precision.

        That is one to be trained in a `gathered` block.

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
        """Raise RuntimeError if a parameter was put into other memory: its values would be lost."""
        flats = [flat for unit in self.zero.units for flat in unit.flats]
        name = next((name for flat in flats for name in flat.in_other_memory()), None)
        if name is not None:
            raise RuntimeError(
                f"parameter {name} is no longer in the memory that Zero trains: its .data was "
                "assigned, or the model was converted after Zero was made; convert it before, and "
                "write into parameters inside of gathered(write=True)"
            )

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
