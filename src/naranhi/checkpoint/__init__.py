"""Checkpoints of any parallelism: saved on one mesh, loaded on another.

    with Checkpoints("runs/gpt2", keep=3) as checkpoints:
        if checkpoints.steps():
            saved = checkpoints.load(model, optimizer)      # on any mesh, any number of ranks
            start, rates = saved.step, saved.state["rates"]
        ...
        checkpoints.save(step, model, optimizer, rates=scheduler.state_dict())

A rank's part of the model, however it is cut, is a set of boxes of named tensors (`parts`,
`boxes`). The ranks check that together they have every element exactly once, not counting replicas
(`layout`); then each writes some of the boxes, through `torch.distributed.checkpoint` (`planners`).
A save that is interrupted leaves the earlier checkpoints as they were (`storage`).

`consolidated_state_dict` returns the whole model on one rank, for other programs.

Load only checkpoints that you trust: torch's own file `.metadata` is read by pickle.
"""

from naranhi.checkpoint.checkpoints import Checkpoints, Saved
from naranhi.checkpoint.consolidated import consolidated_state_dict
from naranhi.checkpoint.storage import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Saved", "consolidated_state_dict"]
