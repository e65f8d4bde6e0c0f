"""Find the backend that a process group uses for each kind of device.

A group can have two backends: gloo for tensors on CPUs and NCCL for those on GPUs, as in trainers
that save checkpoints through CPUs. `dist.get_backend` then returns `"cpu:gloo,cuda:nccl"`. Where
torch chose the backends, as in `dist.init_process_group()` and `init_device_mesh`, it returns
`"undefined"`. Use `backend_for` instead.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist


def backend_for(device: torch.device | str, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name of the backend that sends a group's tensors of this kind of device.

    Args:
        device: a device, such as a tensor's, or its type.
        group: the process group; None for the default one.

    Returns:
        `"gloo"`, `"nccl"` or another; None if the group sends nothing from such a device.
    """
    kind = device.type if isinstance(device, torch.device) else device
    return _by_device(dist.get_backend_config(group)).get(kind)


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors the group's ranks exchange: this rank's GPU, or the CPU.

    Args:
        group: the process group; None for the default one.

    Returns:
        The current CUDA device if NCCL sends from it, otherwise the CPU.
    """
    if backend_for("cuda", group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def _by_device(config):
    """Return the backends in a text such as `cpu:gloo,cuda:nccl`, by type of device."""
    return dict(pair.split(":") for pair in config.split(","))
