"""Bugs that make no noise: nothing crashes, the loss falls, and the model is not what it should be.

Each is a bug that projects have shipped or people have reported, in its smallest form: a function
with the bug, the corrected function, and a tiny training run that uses either.

    bug = gallery.BUGS["mean of means"]
    bug.losses(20), bug.losses(20, fixed=True)     # the symptom
    print(bug.hunt())                              # the finder's answer
    print(bug.hunt(fixed=True))                    # "no divergence: ..."

Five questions find most of them. Which division (`division`)? Which ranks must draw the same random
numbers (`randomness`)? Who sums what (`sums`)? Who decides for the whole model (`decisions`)? Who
sees which part of the data, and in what order (`layout`, `ring_attention`)?
"""

from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.divergence.gallery.decisions import LONELY_SKIP, NORM_OF_A_SHARD
from naranhi.divergence.gallery.division import DIVIDED_TWICE, MEAN_OF_MEANS
from naranhi.divergence.gallery.layout import FUSED_COLUMNS, POSITIONS_FROM_ZERO, SAME_BATCH
from naranhi.divergence.gallery.randomness import DIFFERENT_MASKS, SAME_SEED
from naranhi.divergence.gallery.ring_attention import STALE_BLOCKS
from naranhi.divergence.gallery.sums import (
    AROUND_THE_WRAPPER,
    MISSING_BACKWARD,
    TIED_WEIGHT,
    UNSUMMED_NORM,
)

BUGS: dict[str, Bug] = {
    bug.name: bug
    for bug in (
        *(MEAN_OF_MEANS, DIVIDED_TWICE),
        *(SAME_SEED, DIFFERENT_MASKS),
        *(MISSING_BACKWARD, TIED_WEIGHT, UNSUMMED_NORM, AROUND_THE_WRAPPER),
        *(NORM_OF_A_SHARD, LONELY_SKIP),
        *(SAME_BATCH, FUSED_COLUMNS, POSITIONS_FROM_ZERO, STALE_BLOCKS),
    )
}

__all__ = ["BUGS", "Bug", "Case", "Expected"]
