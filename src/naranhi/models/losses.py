"""The loss of a language model: a sum over the valid targets.

It is divided by the number of valid targets in the whole step, over all micro-batches and ranks.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

IGNORE_INDEX = -100  # the target where there is nothing to predict


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, summed over the valid targets, in nats.

    If no target is valid, the sum is 0, and so is its gradient. Logits in fp16 or bf16 are copied
    to fp32 first, as under autocast, and the sum is in fp32: in fp16 it would be infinite beyond
    65,504 nats, some 10,000 tokens of a new model, and in bf16 it would have three digits.

    Args:
        logits: (rows, length, vocabulary).
        targets: (rows, length), -100 where there is nothing to predict.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
