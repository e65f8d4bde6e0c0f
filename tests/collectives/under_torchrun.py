"""`torchrun under_torchrun.py`: every collective on the default group, without a notebook."""

import torch.distributed as dist
from test_collectives import _differences


def main():
    dist.init_process_group("gloo")
    found = list(_differences(None, (3, 5), "float32", dist.get_world_size() - 1, seed=3))
    assert not found, found
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: every collective is its definition", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
