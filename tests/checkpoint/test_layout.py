"""The layout of all ranks' states."""

import pytest
import torch

from naranhi.checkpoint import CheckpointError
from naranhi.checkpoint.layout import RankState, merge


def state(tensors):
    return RankState(tensors, {}, {}, [], {})


def test_a_difference_names_the_first_rank_that_has_the_tensor():
    """Rank 0 is another stage of the pipeline; rank 1's shard of a small tensor is empty."""
    short, long = ((2,), torch.float32, ()), ((3,), torch.float32, (((0, 3),),))
    with pytest.raises(CheckpointError, match=r"weight has .* on rank 1, .* on rank 2: give all"):
        merge([state({}), state({"weight": short}), state({"weight": long})])
