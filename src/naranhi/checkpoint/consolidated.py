"""The whole model on one rank, assembled from the parts on the ranks of a mesh."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist

from naranhi.checkpoint.layout import merge
from naranhi.checkpoint.parts import Model
from naranhi.checkpoint.ranks import gather, none_lost, on_all
from naranhi.checkpoint.state import State
from naranhi.distributed import device_of
from naranhi.distributed.agreement import bytes_of

OF_MODEL = "parameters.", "buffers."


def consolidated_state_dict(
    model: Model, group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor] | None:
    """Return the state_dict of the whole model, in CPU memory, on the first rank of a group.

    Its names are those of one list of layers, unsplit, so `nn.ModuleList(layers).load_state_dict`
    takes it. Pass `strict=False` if parameters are tied (each is there once, under its first name)
    or if the pipeline's loss has weights (their names begin with "loss_fn."). Extra state of
    modules is left out. Each element is sent once, box after box, so the other ranks need extra
    memory only for a copy of one box, and for copies of parameters that are not contiguous.

    Args:
        model: as `Checkpoints.save` takes it, between two steps.
        group: the ranks that together have the model, all of which call this; None for all ranks.

    Returns:
        {name: tensor} on the first rank of the group, None on the others.

    Raises:
        CheckpointError: on every rank: the ranks' parts do not make a whole model, a Zero that was
            not passed trains the model, or the first rank lacks memory for it.
        LostRankError: a rank was lost.
    """
    group = dist.group.WORLD if group is None else group
    rank, device = dist.get_rank(group), device_of(group)
    state = on_all(lambda: State(model, None), group)
    layout = merge(gather(state.summary(), group))

    def empty():
        """Return tensors to be filled, on the first rank."""
        if rank:
            return {}
        # A pipeline's stages may have optimizers, whose state is in the layout, too.
        return {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in layout.tensors.items()
            if name.startswith(OF_MODEL)
        }

    whole = on_all(empty, group)
    with none_lost(), torch.no_grad():
        for (name, box), writer in layout.writes.items():
            if not name.startswith(OF_MODEL):
                continue
            if writer == rank:
                values = state.tensors[name].views[box]
                if rank:
                    dist.send(bytes_of(values).to(device), group=group, group_dst=0)
            elif rank == 0:
                size = prod(box.sizes) * whole[name].element_size()
                received = torch.empty(size, dtype=torch.uint8, device=device)
                dist.recv(received, group=group, group_src=writer)
                values = received.cpu().view(whole[name].dtype).view(box.sizes)
            if rank == 0:
                place = tuple(map(slice, box.offset, map(sum, zip(*box, strict=True))))
                whole[name][place] = values
    if rank:
        return None
    return {name.partition(".")[2]: tensor for name, tensor in whole.items()}
