"""The messages of a step on one rank, and the channel ends that send and receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from naranhi.pipeline.channels import Receiver, Sender, carrier
from naranhi.pipeline.groups import key_of
from naranhi.schedules import Message, Schedule, channels

if TYPE_CHECKING:
    from naranhi.pipeline.stage_signature import StageSignature


class Messages:
    """This rank's ends of all channels. Between two stages of this rank nothing is sent.

    Args:
        schedule: the schedule whose messages they are.
        pipeline: the ranks of the pipeline.
        groups: the process group of each channel, by `groups.key_of`.
        device: the device on which the stages compute.
    """

    schedule: Schedule
    device: torch.device

    def __init__(
        self,
        schedule: Schedule,
        pipeline: dist.ProcessGroup,
        groups: Mapping[Any, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.schedule, self.device = schedule, device
        self._all, self._local, rank = channels(schedule), {}, dist.get_rank(pipeline)
        self.ends: dict[Any, Sender | Receiver] = {}
        for channel in self._all:
            if rank in channel[:2]:
                sends = rank == channel.from_rank
                peer = channel.to_rank if sends else channel.from_rank
                self.ends[channel] = (Sender if sends else Receiver)(
                    groups[key_of(channel, pipeline)],
                    dist.get_global_rank(pipeline, peer),
                    device,
                )

    def expect(self, takes: Sequence[StageSignature], earlier: int) -> None:
        """Begin a step: post receives for the messages that will come.

        Args:
            takes: the signature before each virtual stage.
            earlier: the number of earlier steps of the same kind.
        """
        self._local.clear()
        for channel, end in self.ends.items():
            end.carrier = carrier(self.device, earlier)
            if isinstance(end, Receiver):
                messages = self._all[channel]
                end.expect([takes[max(one[:2])].message(channel.kind) for one in messages])

    def take(self, message: Message | None) -> list[torch.Tensor] | None:
        """Wait for a message, and return its tensors; None if there is no message."""
        if message is None:
            return None
        channel = self.schedule.channel(message)
        return self.ends[channel].take() if channel else self._local.pop(message)

    def give(self, message: Message | None, tensors: list[torch.Tensor]) -> None:
        """Start to send a message, if there is one."""
        if message is None:
            return
        channel = self.schedule.channel(message)
        if channel:
            self.ends[channel].send(tensors)
        else:
            self._local[message] = tensors

    def flush(self) -> None:
        """End a step: wait until everything is sent."""
        for end in self.ends.values():
            end.flush()

    def close(self) -> None:
        """Drop the groups."""
        for end in self.ends.values():
            end.close()
