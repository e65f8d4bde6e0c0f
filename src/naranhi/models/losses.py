"""The loss of a language model: a sum over the targets that count.

It is divided by the number of valid targets in the whole step, over all micro-batches and ranks.
"""

from torch.nn import functional as F

IGNORE_INDEX = -100  # the target where there is nothing to predict


def loss(logits, targets):
    """Cross-entropy, summed over the valid targets, in nats.

    logits: (rows, length, words); targets: (rows, length), -100 where there is none. Where none is
    valid at all the sum is 0, and so is its gradient.
    """
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
