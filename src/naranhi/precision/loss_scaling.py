"""Scale a loss so that its gradients fit into fp16, and find the scale while training.

Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2; the rules are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LossScaler:
    """A factor for the loss that halves after an overflow and doubles after a run without one.

    Args:
        scale: the factor to start with.
        growth: the multiplier of the factor after `interval` steps without an overflow, above 1.
        backoff: the multiplier of the factor after a step with an overflow, between 0 and 1.
        interval: the number of steps without an overflow after which the factor grows.

    Attributes:
        scale: the factor for the next loss.

    Raises:
        ValueError: the scale is not positive, `growth` does not grow, `backoff` does not shrink, or
            `interval` is below 1.
    """

    scale: float

    def __init__(
        self,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        if not (scale > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                "expected scale > 0, growth > 1, 0 < backoff < 1 and interval >= 1, "
                f"not {scale}, {growth}, {backoff} and {interval}"
            )
        self.scale = scale
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._good_steps = 0

    def unscale_(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Divide gradients by the scale, in place; return whether all of them are finite.

        Call it once in a step, on fp32 gradients, before anything that looks at their size, such as
        clipping. In fp16, division would bring the underflow back.
        """
        finite = True
        for gradient in gradients:
            values = gradient._values() if gradient.is_sparse else gradient
            values.mul_(1.0 / self.scale)
            finite = finite and bool(values.isfinite().all())
        return finite

    def update(self, finite: bool) -> None:
        """Choose the next scale.

        If `finite` is False the caller has skipped the step. With gradients in shards, `finite` has
        to be the same on all ranks: all-reduce it with MIN. The scale does not grow beyond fp32.

        Raises:
            RuntimeError: the scale has fallen below the smallest normal number of fp32.
        """
        self._good_steps = self._good_steps + 1 if finite else 0
        limits = torch.finfo(torch.float32)
        if not finite:
            self.scale *= self._backoff
            if self.scale < limits.tiny:
                raise RuntimeError(
                    f"the scale has fallen to {self.scale:.3g}, and gradients are still inf or "
                    "NaN: no scale makes them finite; find the operation that produces them with "
                    "precision.first_nonfinite"
                )
        elif self._good_steps == self._interval:
            if self.scale * self._growth <= limits.max:
                self.scale *= self._growth
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed training needs: the scale, and how far it is from growing."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` has returned; growth, backoff and interval stay."""
        self.scale, self._good_steps = state["scale"], int(state["good_steps"])
