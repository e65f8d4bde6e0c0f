"""The states of the random number generators of a step: read, set, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class OwnGenerators(TorchDispatchMode):
    """A dispatch mode that notes the generators that a step passes to its operations.

    In a second run, a generator of the first one starts again where it started there.

    Args:
        first: the `states` of the first run; empty in the first.

    Attributes:
        states: {generator: its state before its first use}.
        advanced: whether a generator was set back: one that a run itself seeds is not.
    """

    states: dict[torch.Generator, torch.Tensor]
    advanced: bool

    def __init__(self, first: Mapping[torch.Generator, torch.Tensor]) -> None:
        super().__init__()
        self.states, self.advanced = {}, False
        self._first = first

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and generator not in self.states:
            state = self._first.get(generator, generator.get_state())
            if not torch.equal(state, generator.get_state()):
                generator.set_state(state)
                self.advanced = True
            self.states[generator] = state
        return operation(*args, **kwargs)


def _fields(state):
    return state.values() if isinstance(state, dict) else state  # another generator than MT19937
