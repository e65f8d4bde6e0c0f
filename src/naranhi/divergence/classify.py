"""How the ranks' tensors differ from one process's: which axis, which factor, which missing sum."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch

from naranhi.divergence.axes import ROWS, Axes


class Held(NamedTuple):
    """One rank's part of a tensor.

    Args:
        value: the rank's part.
        slot: which part it is.
        expected: one process's part, in float64; None if there is nothing to compare with.
        allowed: the largest distance of two elements that counts as equal.
    """

    value: torch.Tensor
    slot: Hashable
    expected: torch.Tensor | None
    allowed: float

    @property
    def wrong(self) -> bool:
        """Return whether the part differs from one process's by more than `allowed`."""
        return self.expected is not None and distance(self.value, self.expected) > self.allowed


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two elements; inf where only one of them is finite."""
    if value.dtype == torch.bool or not value.numel():
        return float(not torch.equal(value, expected))
    if value.is_complex():
        value, expected = torch.view_as_real(value), torch.view_as_real(expected)
    value, expected = value.double(), expected.double()
    same = (value == expected) | (value.isnan() & expected.isnan())
    gaps = (value - expected).abs().masked_fill(same, 0.0)
    return gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def factor_between(value: torch.Tensor, expected: torch.Tensor, allowed: float) -> float | None:
    """Return the constant by which `value` is a multiple of `expected`, or None."""
    value, expected = value.double().flatten(), expected.double().flatten()
    if not expected.numel() or not value.isfinite().all() or not expected.isfinite().all():
        return None
    square = expected.dot(expected).item()
    factor = value.dot(expected).item() / square if square else 0.0
    rest = distance(value, factor * expected)
    large = value.abs().max().item() > allowed  # a tensor of zeros is a multiple of any
    return factor if large and rest <= allowed * max(1.0, abs(factor)) else None


def classify(held: Mapping[int, Held], axes: Axes) -> tuple[str | None, float | None, str]:
    """Return the axis, the constant factor and a description of what is wrong.

    The description is empty if ranks agree up to rounding and no part is wrong.

    Args:
        held: {rank: its part} of the ranks that have a part of the tensor.
        axes: where the ranks are on the mesh.
    """
    wrong = [rank for rank, part in held.items() if part.wrong]
    for axis in axes.sizes:
        if what := _disagreement(held, axes, axis):
            return axis, None, what
    if not wrong:
        return None, None, ""
    factors = {
        factor_between(part.value, part.expected, part.allowed)
        for rank, part in held.items()
        if rank in wrong
    }
    several = len(held) > 1 and len(wrong) == len(held)
    who = "all ranks" if several else ", ".join(map(axes.where, wrong))
    if None not in factors and max(factors) - min(factors) < 1e-3 * max(map(abs, factors)):
        factor = sum(factors) / len(factors)
        axis = next((axis for axis, size in axes.sizes.items() if _is(factor, size)), None)
        hint = f", as by the {axes.sizes[axis]} {axis} ranks" if axis else ""
        verb = "differ" if several else "differs"
        return axis, factor, f"{who} {verb} from one process by a factor of {factor:.3f}{hint}"
    axis = _axis_of(wrong, held, axes)
    verb = "differ" if several or len(wrong) > 1 else "differs"
    moved = all(_reordered(held[rank]) for rank in wrong)
    hint = f", along the {axis} axis" if several and axis else ""
    hint += ": they have the same elements in another order" if moved else ""
    return axis, None, f"{who} {verb} from one process{hint}"


def _reordered(part):
    value, expected = (x.double().flatten().sort().values for x in (part.value, part.expected))
    return distance(value, expected) <= part.allowed


def _is(factor, size):
    return any(abs(factor / ratio - 1) < 1e-3 for ratio in (size, 1 / size))


def _lines(held, axes, axis):
    """Yield the lines of ranks along an axis that hold the same part of the tensor."""
    for line in axes.neighbours(axis):
        line = [rank for rank in line if rank in held]
        if len(line) > 1 and len({held[rank].slot for rank in line}) == 1:
            yield line


def _disagreement(held, axes, axis):
    """Say how ranks along an axis differ among themselves where they hold the same part."""
    for line in _lines(held, axes, axis):
        first, *others = (held[rank] for rank in line)
        gap = max(distance(first.value, other.value) for other in others)
        if gap <= 2 * first.allowed:
            continue
        what = f"the {axis} ranks {_list(line)} differ among themselves, and must agree"
        if first.expected is not None:
            right = [rank for rank in line if not held[rank].wrong]
            if right:
                return f"{what}: {_list(right)} {'has' if len(right) == 1 else 'have'} it right"
            total = torch.stack([held[rank].value.double() for rank in line]).sum(0)
            if distance(total, first.expected) <= len(line) * first.allowed:
                return f"{what}: their sum is what one process has"
        return what
    return None


def _axis_of(wrong, held, axes):
    """Return an axis whose coordinates separate the wrong ranks from the right ones, or None.

    If all ranks are wrong, return the only axis whose ranks compute the tensor together, or None.
    """
    if len(wrong) == len(held):
        together = [axis for axis in axes.sizes if axis not in ROWS and _several(held, axes, axis)]
        return together[0] if len(together) == 1 else None
    for axis in axes.sizes:
        places = {axes.places[rank][axis] for rank in wrong}
        others = {axes.places[rank][axis] for rank in held if rank not in wrong}
        if not places & others:
            return axis
    return None


def _several(held, axes, axis):
    return any(sum(rank in held for rank in line) > 1 for line in axes.neighbours(axis))


def _list(ranks):
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}" if len(ranks) > 1 else str(*ranks)
