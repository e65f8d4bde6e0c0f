"""Which tokens a token attends to."""

from __future__ import annotations

import torch


def visible_tokens(
    length: int, mask: torch.Tensor | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return which tokens each token sees: itself and those before it, without padding.

    Args:
        length: the number of tokens.
        mask: (batch, length), 1 for a token and 0 for padding; None without padding.
        device: where the tensor is made.

    Returns:
        A bool tensor, (length, length) or (batch, 1, length, length): True where the token of
        the row sees the token of the column.
    """
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if mask is None else visible & mask.bool()[:, None, None, :]
