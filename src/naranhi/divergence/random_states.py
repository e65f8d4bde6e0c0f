"""The states of the random number generators of this process: read, set, and compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

States = tuple[Any, Any, list[torch.Tensor]]


def random_states() -> States:
    """Return the states of the generators of Python, NumPy and torch (CPU, and GPUs in use)."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), [torch.get_rng_state(), *on_gpus]


def set_random_states(states: States) -> None:
    """Set the generators to states that `random_states` has returned."""
    python, numpy, (on_cpu, *on_gpus) = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)


def same_states(before: States, after: States) -> bool:
    """Return whether no generator was used in between."""
    (python, numpy, torchs), (other, *others) = before, after
    return (
        python == other
        and all(map(np.array_equal, _fields(numpy), _fields(others[0])))
        and all(map(torch.equal, torchs, others[1]))
    )


def _fields(state):
    return state.values() if isinstance(state, dict) else state  # another generator than MT19937
