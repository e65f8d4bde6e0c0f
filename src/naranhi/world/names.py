"""Keep what every cell finds on a rank: five names, and the process group that the rank joined."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class AtHand:
    """Hold the names that cells share, with the five that a cell must not lose.

    Args:
        namespace: the dictionary in which cells run.
        values: the five names and their values.
    """

    def __init__(self, namespace: dict[str, Any], **values: Any):
        self._namespace, self._values = namespace, values
        self._group = dist.group.WORLD
        namespace.update(values)

    def put_back(self) -> list[str]:
        """Restore the names that a cell has reassigned or deleted.

        Returns:
            The names that were restored.
        """
        missing = object()
        lost = [n for n, v in self._values.items() if self._namespace.get(n, missing) is not v]
        self._namespace.update((name, self._values[name]) for name in lost)
        return lost

    def left_group(self) -> bool:
        """Return whether a cell has destroyed or replaced the default process group."""
        return dist.group.WORLD is not self._group


def remove_groups(namespace: dict[str, Any]) -> list[str]:
    """Delete the variables that hold old process groups; return their names."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    lost = [n for n, v in namespace.items() if isinstance(v, dist.ProcessGroup) or v is outside]
    for name in lost:
        del namespace[name]
    return lost
