"""What every cell finds at hand on a rank: five names, and the process group that it has joined."""

import torch.distributed as dist


class AtHand:
    """The names that cells share, with the five that a cell may not lose.

    Args:
        namespace: the dictionary in which cells run.
        values: the five names and their values.
    """

    def __init__(self, namespace, **values):
        self._namespace, self._values = namespace, values
        self._group = dist.group.WORLD
        namespace.update(values)

    def put_back(self):
        """Put back what a cell has assigned to or deleted.

        Returns:
            The names that were put back.
        """
        missing = object()
        lost = [n for n, v in self._values.items() if self._namespace.get(n, missing) is not v]
        self._namespace.update((name, self._values[name]) for name in lost)
        return lost

    def left_group(self):
        """Whether a cell has destroyed the default process group, or replaced it by another."""
        return dist.group.WORLD is not self._group


def remove_groups(namespace):
    """Delete the variables that hold process groups of the past; returns their names."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    lost = [n for n, v in namespace.items() if isinstance(v, dist.ProcessGroup) or v is outside]
    for name in lost:
        del namespace[name]
    return lost
