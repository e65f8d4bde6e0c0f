"""The state that is not sharded: a file without code, which rank 0 writes beside the shards."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

from naranhi.checkpoint.storage import CheckpointError
from naranhi.distributed import fingerprint

NAME = "rest.pt"
SIMPLE = {bool, int, float, str, bytes, type(None)}  # a list of these needs no recursion


def serialized(content: object) -> bytes:
    """Return bytes that `torch.load` reads without running code.

    Raises:
        CheckpointError: `content` has more in it than tensors and plain values.
    """
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise CheckpointError(
            f"the state, or the optimizer, has a {', '.join(unsafe)}, which cannot be read safely "
            "from a file: save plain values and tensors"
        )
    return file.getvalue()


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each value, by which ranks compare values that may be large.

    Equal values have equal digests. Their pickles may differ: by the order of a set, by whether
    equal strings are one object, by a tensor's device and by the storage that it is a view of.

    Raises:
        CheckpointError: as in `serialized`.
    """
    for value in values.values():
        serialized(value)
    return {
        key: hashlib.sha256(repr(_ordered(value)).encode()).hexdigest()
        for key, value in values.items()
    }


def same(one: object, other: object) -> bool:
    """Return whether two values are equal: a NaN equals itself, and all of a tensor counts."""
    try:
        if one == other:
            return True
    except RuntimeError:  # a tensor of more than one element is neither true nor false
        pass
    return repr(_ordered(one)) == repr(_ordered(other))


def _ordered(value):
    """Return something whose `repr` is the same for equal values."""
    if isinstance(value, torch.Tensor):
        return "tensor", fingerprint(value)
    if isinstance(value, Mapping):
        return "mapping", sorted(repr(_ordered(item)) for item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", sorted(repr(_ordered(item)) for item in value)
    if isinstance(value, (list, tuple)):
        simple = {*map(type, value)} <= SIMPLE
        return type(value).__name__, value if simple else [*map(_ordered, value)]
    return value
