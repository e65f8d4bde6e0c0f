"""How far the tensors of ranks may be from those of one process.

# Note [Where the tolerance comes from]
Two correct ways to compute a tensor differ by rounding: sums are taken in another order. How far
rounding takes a tensor from its exact value depends on its dtype, on the length of the sums and on
how terms cancel, and cannot be derived from the tensor. So it is measured: one process computes the
step in its dtype and once more in float64, and the largest distance between the two is the noise of
that tensor. The ranks may be `TOLERANCE` times as far from float64, plus one rounding of the
tensor's largest element (for a tensor whose noise is 0 by chance).

A model in float64 would be its own referee, with no noise at all. Its step is computed in float32
instead, whose noise is scaled by the ratio of the two roundings (`FLOAT64`).

Source: Higham, "Accuracy and stability of numerical algorithms" (2002), section 3.1, for the bound
on the rounding error of a sum, which grows with its terms and holds in any order. The 16 is ours.
"""

from __future__ import annotations

import torch

FLOAT64 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
TOLERANCE = 16.0  # correct meshes stay below 4 times the noise, and wrong ones far above 100


def bound(own: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the allowed distance of a rank's tensor from the exact one, from one process's.

    Args:
        own: the tensor of one process, in the dtype of the training.
        exact: the same tensor, computed in float64.
    """
    finite = own.isfinite() & exact.isfinite()
    rounding = torch.finfo(own.dtype).eps * largest(exact[finite])
    return TOLERANCE * largest((own.double() - exact)[finite]) + rounding


def largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor; 0.0 if it is empty."""
    return tensor.abs().max().item() if tensor.numel() else 0.0
