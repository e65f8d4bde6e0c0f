"""DeepSpeed, made ready to run beside ours: on the ranks that are there, with or without a GPU.

It is called from notebooks, tests and benchmarks, to compare with. No kernel is built on it.
"""

import os

import torch.distributed as dist


def deepspeed():
    """The module `deepspeed`, ready to use the process group that exists. Call it on every rank.

    Where the ranks have no GPU of their own it runs on the CPU. It decides that when it is first
    imported, so nothing may have imported it before. Importing it takes some seconds of a core.

    Raises RuntimeError without a default process group, and without LOCAL_RANK in the environment,
    which torchrun and `naranhi.World` set and a `PipelineModule` asks for.
    """
    if not dist.is_initialized() or "LOCAL_RANK" not in os.environ:
        raise RuntimeError("a default process group is needed, and LOCAL_RANK in the environment")
    if dist.get_backend() == "gloo":  # fewer GPUs than ranks, or none
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # A collective through shared memory, for inference: a compiler would be busy with it for a
    # minute or two, if there is one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed
