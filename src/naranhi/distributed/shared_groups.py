"""Objects whose copies work in the same process groups: a group itself cannot be copied."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

import torch.distributed as dist


class SharesGroups:
    """An object that holds process groups as attributes, and shares them with its deep copies.

    Pickling it (`torch.save` of a whole model) fails unless the groups are None: a group is a set
    of connections of this process. Save the state_dict instead.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy in the same groups; for `copy.deepcopy`."""
        for value in vars(self).values():
            if isinstance(value, dist.ProcessGroup):
                memo[id(value)] = value
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(deepcopy(self.__getstate__(), memo))
        return copied
