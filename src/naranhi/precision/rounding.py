"""Round to bf16 up or down at random, so that the mean of many roundings is the value itself.

Source: Gupta et al., "Deep learning with limited numerical precision" (2015), section 3.1.
"""

from __future__ import annotations

import torch


def stochastic_round(
    tensor: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round fp32 to one of the two neighbouring bf16 numbers; the nearer is the more likely.

    The chance of each is such that the expected result is the value itself. A number that bf16 can
    represent stays as it is; so do infinity and NaN.

    bf16 is the upper half of the bits of fp32. Adding a random number to the lower half carries
    into the upper half with exactly this probability.

    Args:
        tensor: fp32, any shape.
        generator: the source of randomness; default: torch's for the tensor's device. Ranks that
            hold the same parameters need the same numbers, or their parameters drift apart.

    Returns:
        bf16, of the same shape, without a gradient.

    Raises:
        TypeError: the tensor is not fp32.
    """
    if tensor.dtype != torch.float32:
        raise TypeError(f"stochastic_round takes float32, not {tensor.dtype}")
    tensor = tensor.detach()
    bits = tensor.contiguous().view(torch.int32)
    noise = torch.randint(
        2**16, bits.shape, generator=generator, dtype=torch.int32, device=bits.device
    )
    rounded = ((bits + noise) & -(2**16)).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor).bfloat16()
