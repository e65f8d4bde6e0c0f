"""Which GPU is whose, by what each rank sees."""

import pytest

from naranhi.distributed import gpus

ALL = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


@pytest.mark.parametrize(
    ("visible", "local_ranks", "indices"),
    [
        ([ALL] * 4, [0, 1, 2, 3], [0, 1, 2, 3]),
        ([ALL] * 2, [0, 1], [0, 1]),
        ([[gpu] for gpu in ALL], [0, 1, 2, 3], [0, 0, 0, 0]),
        ([ALL[:2], ALL[2:]], [0, 1], [0, 1]),
        ([ALL[:2]] * 2 + [ALL[2:]] * 2, [0, 1, 0, 1], [0, 1, 0, 1]),
        ([ALL[:2]] * 2 + [ALL[2:3], ALL[3:]], [0, 1, 0, 1], [0, 1, 0, 0]),
    ],
    ids=["all, of all", "all, of fewer", "one each", "two each", "two nodes", "one node each way"],
)
def test_each_rank_has_a_gpu_of_its_own(visible, local_ranks, indices):
    assert gpus.allot(visible, local_ranks) == indices


@pytest.mark.parametrize(
    ("visible", "local_ranks", "why"),
    [
        ([ALL[:1]] * 4, [0, 1, 2, 3], "ranks 0 and 1 would share a GPU"),
        ([ALL[:3]] * 4, [0, 1, 2, 3], "ranks 0 and 3 would share a GPU"),
        ([ALL[:1], [], ALL[2:]], [0, 1, 2], "rank 1 sees no GPU"),
        ([[], []], [0, 1], "rank 0 sees no GPU"),
    ],
)
def test_ranks_without_one(visible, local_ranks, why):
    with pytest.raises(ValueError, match=f"^{why}$"):
        gpus.allot(visible, local_ranks)
