"""The states of ZeRO: of a step's gradients, and of a unit's parameters."""

from enum import Enum, auto


class Phase(Enum):
    """Where a step stands, as all ranks know it.

        ACCUMULATING --forward--> ANNOUNCED --last backward begins--> REDUCING --ends--> REDUCED
             ^                                                                              |
             +------------------------------- step() or zero_grad() ------------------------+

    Forwards and backwards in `no_sync()` change nothing. A last backward that found no gradient on
    any rank ends in ACCUMULATING.
    """

    ACCUMULATING = auto()  # no rank has begun the step's last forward
    ANNOUNCED = auto()  # it has begun; at stage 3 the ranks have checked that all have begun it
    REDUCING = auto()  # the step's last backward is running
    REDUCED = auto()  # the gradients are sums over the ranks, a shard on each


class ParamState(Enum):
    """Where the parameters of a unit are, at stage 3."""

    SHARDED = auto()
    UNSHARDING = auto()  # the all-gather is in flight, its memory allocated
    UNSHARDED = auto()
