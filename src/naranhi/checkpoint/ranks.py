"""How the ranks of a checkpoint wait for each other, and the error when one of them is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from naranhi.checkpoint.storage import CheckpointError
from naranhi.distributed import from_all_ranks, raise_on_all

Result = TypeVar("Result")

# How long a rank waits for the others while they read or write. Disks are slow, and some ranks have
# more to write than others: a training's own timeout, of minutes, is too short. This one need not
# be short: when a rank dies, or a World ends a cell, connections close, and waits on them fail.
PATIENCE = timedelta(hours=12)


class LostRankError(CheckpointError, RuntimeError):
    """The ranks can no longer exchange messages: one has ended, or the group's timeout is over.

    It is a RuntimeError because programs recognize that type, which torch raises. Each rank raises
    it independently: the ranks can no longer exchange messages.
    """


def new_group() -> dist.ProcessGroup:
    """Return a new group in which ranks wait for each other's disks. Every rank must call this.

    A World does not check calls in it: its checks wait only as long as a cell's collectives do.
    """
    return dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="unchecked")


@contextmanager
def none_lost() -> Iterator[None]:
    """Raise LostRankError in place of what torch raises when messages fail."""
    try:
        yield
    except RuntimeError as error:
        # A World's own errors are RuntimeErrors, too, and say which rank called what.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        cause = str(error).strip().partition("\n")[0]
        raise LostRankError(
            f"a rank was lost, or did not answer in time ({cause}): the output of that rank says "
            "why; the checkpoints committed before are intact"
        ) from error


def gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, by rank.

    Raises:
        LostRankError: a rank was lost.
    """
    with none_lost():
        return from_all_ranks(value, group)


def on_all(function: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Return the result of `function()`, if it succeeds on every rank of a group.

    Raises:
        CheckpointError: it raised an error on some rank; the message names the rank.
        LostRankError: a rank was lost.
    """
    with none_lost():
        return raise_on_all(function, group, kind=CheckpointError)
