"""DeepSpeed as a baseline, set up to run on the current ranks, with or without a GPU.

Notebooks, tests and benchmarks compare with it. No kernel is built on it.
"""

import os
from types import ModuleType

import torch.distributed as dist

from naranhi.distributed import backend_for, device_of


def deepspeed() -> ModuleType:
    """Return the module `deepspeed`, ready to use the existing process group.

    Call this on every rank. If ranks do not have a GPU each, DeepSpeed runs on the CPU. It decides
    that when it is first imported, so nothing may import it before this call. The import takes some
    seconds of a core.

    Raises:
        RuntimeError: there is no default process group, or LOCAL_RANK is not in the environment;
            torchrun and `naranhi.World` set it, and a `PipelineModule` reads it.
    """
    if not dist.is_initialized() or "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            "DeepSpeed needs a default process group, and LOCAL_RANK in the environment, which "
            "torchrun and naranhi.World set"
        )
    device = device_of()
    if device.type == "cpu":  # fewer GPUs than ranks, or none
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # A collective through shared memory, for inference: compiling it takes a minute or two, where
    # a compiler is installed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(backend_for(device), verbose=False)
    return deepspeed
