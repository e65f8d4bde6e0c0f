"""ZeRO: optimizer state, gradients and parameters in shards."""

from naranhi.zero.checkpoint import StateError
from naranhi.zero.units import children, joined
from naranhi.zero.zero import Zero

__all__ = ["StateError", "Zero", "children", "joined"]
