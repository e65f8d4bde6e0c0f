"""A sharded model made whole for a while, to be read or written; at other times that is refused.

While it is whole, its parameters are views of new memory with the values that the optimizer works
on (in mixed precision the masters, in fp32). Nobody frees that memory: what is taken out of it, a
`state_dict` or a detached tensor, keeps it for as long as it is needed.
"""

from contextlib import contextmanager

from naranhi.autograd.hooks import ModuleHook
from naranhi.collectives import ring
from naranhi.collectives.chunks import overlap
from naranhi.distributed import agree


class Whole:
    """How a `zero.Zero` makes its model whole; `state` is "read" or "written" while it is, or None.

    Raises RuntimeError where the model's state would be read, loaded or copied and is not there: at
    stage 3 there are shards, in mixed precision copies in bf16 of what is trained.
    """

    def __init__(self, zero):
        self.zero, self.state = zero, None

    def hooks(self):
        """Handles of hooks of all modules: also a part's state may be asked for."""
        for module in self.zero.model.modules():
            yield module.register_state_dict_pre_hook(ModuleHook(self._before_reading))
            yield module.register_load_state_dict_pre_hook(ModuleHook(self._before_loading))

    # --- whole for a while -----------------------------------------------------------------------

    @contextmanager
    def gathered(self, write):
        """The kernel of `Zero.gathered`, which says what it does."""
        if self.state:
            if write and self.state != "written":
                raise RuntimeError("this model is gathered to be read: leave that block first")
            yield
            return
        rows = self.gather()
        self.state = "written" if write else "read"
        try:
            yield
            if write:
                self._keep(rows)
        finally:
            self.state = None
            for flat in rows:
                flat.hide()
        if write:
            self.zero.follow(list(rows))  # what is frozen, too

    def gather(self):
        """Make the model whole; {flat: its row}. Stages 1 and 2 have it whole in fp32."""
        self.zero.free()
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
            flat.show(row)
        return rows

    def _keep(self, rows):
        """Put what was written into the masters. ValueError on every rank, and they stay as they
        were, unless all have written the same. (At stages 1 and 2 in fp32 it is there already.)"""
        values = {}
        for flat, row in rows.items():
            views = flat.cut(row)
            for name, param, view in zip(flat.names, flat.parameters, views, strict=True):
                if param.data_ptr() != view.data_ptr():  # `param.data = ...` was assigned
                    view.copy_(param.detach())
                values[f"parameter {name}"] = view
        agree(self.zero.group, **values)
        for flat, row in rows.items():
            flat.master.copy_(row[flat.mine])

    # --- refused otherwise -----------------------------------------------------------------------

    @property
    def _is_itself(self):
        """Whether parameters and what is trained are the same memory, and whole, at any time."""
        return self.zero.stage < 3 and self.zero.precision == "fp32"

    @property
    def _what(self):
        return (
            "this model is sharded"
            if self.zero.stage == 3
            else "this model's parameters are copies in bf16 of the masters in fp32"
        )

    def require_readable(self):
        if not (self.state or self._is_itself):
            raise RuntimeError(
                f"{self._what}: read it inside of Zero.gathered(), or use Zero.save()"
            )

    def require_forward(self, recording):
        if self.state and self.zero.precision == "mixed" and recording:
            raise RuntimeError(
                "inside of gathered() parameters are the masters in fp32: leave the "
                "block before a forward that is to be trained"
            )

    def require_outside(self, what):
        if self.state:
            raise RuntimeError(f"{what} inside of a gathered() block: leave the block first")

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
                "or use Zero.load()"
            )
