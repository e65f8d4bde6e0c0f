"""Set up a notebook for its World: add `%%ranks`, and forbid process groups in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from naranhi.world.errors import RankError

if TYPE_CHECKING:
    from naranhi.world.world import World

current: World | None = None  # the notebook's one World
_original_init = None


def enter(world: World) -> None:
    """Make this World the one that `%%ranks` runs on."""
    global current, _original_init
    current = world
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    shell.register_magic_function(_run_cell, "cell", "ranks")
    import torch.distributed as dist

    if _original_init is None:
        _original_init = dist.init_process_group
        dist.init_process_group = _not_here


def leave(world: World) -> None:
    """Undo `enter`, if this World is still the current one."""
    global current, _original_init
    if current is not world:
        return
    current = None
    if _original_init is not None:
        import torch.distributed as dist

        dist.init_process_group = _original_init
        _original_init = None


def _not_here(*args, **kwargs):
    raise RankError(
        "this cell runs in the notebook's own process, which is not a rank and can join no process "
        "group; begin the cell with %%ranks to run it on the ranks, which have joined theirs"
    )


def _run_cell(line, cell):
    """Run the cell on every rank of the World."""
    if current is None:
        raise RankError("there are no ranks yet; start them: world = naranhi.World(4)")
    if line.strip():
        raise ValueError(f"%%ranks takes no arguments, and got {line.strip()!r}")
    current.execute(cell)
