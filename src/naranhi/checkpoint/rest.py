"""What is not sharded: the file that rank 0 writes beside the shards, without code in it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

from naranhi.checkpoint.storage import CheckpointError

NAME = "rest.pt"


def serialized(content: object) -> bytes:
    """Return bytes that `torch.load` reads without running code.

    Raises:
        CheckpointError: there is more in it than tensors and plain values.
    """
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise CheckpointError(
            f"the state, or the optimizer, has a {', '.join(unsafe)}, which is not read from "
            "files: save plain values and tensors"
        )
    return file.getvalue()


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each value, by which ranks compare values that may be large.

    Raises:
        CheckpointError: as in `serialized`.
    """
    return {key: hashlib.sha256(serialized(value)).hexdigest() for key, value in values.items()}
