"""The states of this process's random number generators: read, set, and derived anew."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from naranhi.checkpoint.storage import CheckpointError


def get() -> dict[str, Any]:
    """Return the states of the generators of torch (CPU and this rank's GPU), Python and NumPy.

    Raises:
        CheckpointError: NumPy's global generator has been exchanged.
    """
    numpy = np.random.get_state()
    if isinstance(numpy, dict):  # of another generator
        raise CheckpointError(
            f"NumPy's global generator is a {numpy['bit_generator']}: only its own MT19937 can be "
            "saved; use numpy.random.Generator for another, and save its state"
        )
    kind, keys, *rest = numpy
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    if torch.cuda.is_initialized():  # reading the state would initialize it, also for ranks on CPUs
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put(states: dict[str, Any]) -> None:
    """Set the generators to states that `get` has returned."""
    kind, keys, *rest = states["numpy"]
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def renew(step: int) -> None:
    """Seed each generator from its own state and a step.

    Ranks whose states were equal, such as those of a tensor group, get equal states again. Ranks
    whose states differed get different states. None repeats a state of the first steps.

    Args:
        step: the step that the training goes on from.
    """
    _, keys, place, *_ = np.random.get_state()
    torch.manual_seed(_seed(torch.get_rng_state().numpy().tobytes(), step))  # of GPUs as well
    random.seed(_seed(repr(random.getstate()).encode(), step))
    np.random.seed(_seed(keys.tobytes() + str(place).encode(), step) % 2**32)


def _seed(state, step):
    return int.from_bytes(hashlib.sha256(state + str(step).encode()).digest()[:7], "big")
