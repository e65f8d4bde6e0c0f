"""Random masks: ranks and one process draw different ones, so masks are compared among ranks.

Where the ranks of a group hold the same activations, their masks must be equal, or the activations
diverge. Where each holds a part of the activations, masks must differ: two heads, or two halves of
a sequence, would lose the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from naranhi.distributed import from_all_ranks, raise_on_all
from naranhi.divergence.axes import ROWS, Axes
from naranhi.divergence.recorder import Key, Recorder, row_size
from naranhi.divergence.reference import Reference
from naranhi.divergence.report import Divergence

LEAST = 32  # bits: two masks that say less may well be equal by chance


def wrong_masks(
    records: Recorder, reference: Reference, rows: Sequence[Sequence[int]], axes: Axes
) -> Divergence | None:
    """Return the first mask that is wrongly equal, or wrongly different, on ranks; None if none is.

    Args:
        records: this rank's step.
        reference: one process's step, which knows how many elements each mask has for a row.
        rows: the rows of this rank's micro-batches.
        axes: where the ranks are on the mesh.
    """
    masks = raise_on_all(lambda: dict(_masks(records, reference, rows)), kind=ValueError)
    gathered = from_all_ranks(masks)
    for key in sorted({key for own in gathered for key in own}, key=lambda key: key[2:] + key[:2]):
        for axis in axes.sizes:
            if axis in (*ROWS, "pipeline"):
                continue
            for line in axes.neighbours(axis):
                line = [rank for rank in line if key in gathered[rank]]
                if len(line) < 2:
                    continue
                layer, is_part, first = gathered[line[0]][key]
                distinct = _distinct([gathered[rank][key][2] for rank in line])
                who = ", ".join(map(str, line))
                if is_part and distinct < len(line) and _bits(first) >= LEAST:
                    what = f"the {axis} ranks {who} draw equal masks for different parts"
                    return Divergence("mask", layer, key.microbatch, tuple(line), axis, what)
                if not is_part and distinct > 1:
                    what = f"the {axis} ranks {who} draw different masks, and must agree"
                    return Divergence("mask", layer, key.microbatch, tuple(line), axis, what)
    return None


def _distinct(masks):
    return len({mask.numpy().tobytes() for mask in masks})


def _bits(mask):
    """Return how improbable a second mask like this one is, of the same dropout, in bits."""
    kept = (mask != 0).double().mean().item()
    return -mask.numel() * math.log2(kept**2 + (1 - kept) ** 2)


def _masks(records, reference, rows):
    """Yield {key: (layer, whether the mask is of a part of the activations, mask)}."""
    for top, drawn in records.masks.items():
        each, rest = divmod(len(drawn), len(rows))
        if rest:  # micro-batches draw different numbers of masks: it is unknown which draws which
            continue
        for number, (layer, mask) in enumerate(drawn):
            microbatch, part = divmod(number, each)
            whole = reference.masks.get(Key("mask", top, 0, part))
            if whole is not None:
                yield Key("mask", top, microbatch, part), (layer, row_size(mask) < whole, mask)
