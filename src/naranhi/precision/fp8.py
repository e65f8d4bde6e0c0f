"""fp8 with scales: one for a whole tensor, or one for each block of consecutive elements.

Source: Micikevicius et al., "FP8 formats for deep learning" (2022); Rouhani et al., "Microscaling
data formats for deep learning" (2023), for blocks whose scales are powers of two.
"""

from __future__ import annotations

import torch


def quantize(
    tensor: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: int | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide by a scale and round to fp8, so that the largest element of each block just fits.

    Args:
        tensor: finite values, any shape.
        dtype: an fp8 dtype.
        block: the number of consecutive elements, in the tensor's flat order, that share a scale;
            None is one scale for the whole tensor.
        power_of_two: whether to round the scales up to powers of two.

    Returns:
        (values, scales): fp8 of shape (blocks, block), and fp32 of shape (blocks, 1).

    Raises:
        ValueError: the number of elements is not a multiple of `block`.
    """
    block = max(tensor.numel(), 1) if block is None else block
    if block < 1 or tensor.numel() % block:
        raise ValueError(f"{tensor.numel()} elements cannot be cut into blocks of {block}")
    blocks = tensor.detach().float().reshape(-1, block)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scales = largest / torch.finfo(dtype).max
    if power_of_two:
        scales = scales.log2().ceil().exp2()
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # A block of zeros has a scale too.
    limit = torch.finfo(dtype).max
    return (blocks / scales).clamp(-limit, limit).to(dtype), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of the shape of `values`, each multiplied by its block's scale.

    Near the end of fp32's range a value that was rounded up may be too large for it, with a scale
    that is a power of two: it becomes fp32's largest.

    Args:
        values: fp8, shape (blocks, block).
        scales: fp32, shape (blocks, 1).
    """
    largest = torch.finfo(torch.float32).max
    return (values.float() * scales).clamp(-largest, largest)
