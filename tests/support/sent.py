"""What ranks send, counted where it is handed to torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist


class Message(NamedTuple):
    group: dist.ProcessGroup
    dtype: torch.dtype
    nbytes: int


@contextmanager
def messages() -> Iterator[list[Message]]:
    """List the messages that this rank hands to `dist.isend` meanwhile."""
    isend, listed = dist.isend, []

    def note(tensor, dst=None, group=None, tag=0, group_dst=None):
        listed.append(Message(group, tensor.dtype, tensor.nbytes))
        return isend(tensor, dst, group, tag, group_dst)

    with mock.patch.object(dist, "isend", note):
        yield listed
