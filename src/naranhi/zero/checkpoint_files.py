"""The files of a checkpoint: written whole or not at all, read only as they were written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

OWN = re.compile(r"rank-\d+-[0-9a-f]{16}\.pt(\.part)?")  # the files that `write_shards` writes


class StateError(ValueError):
    """A saved state that is missing, incomplete, or not of this model."""


def require_own(manifest: Path) -> None:
    """Raise StateError rather than overwrite a manifest that `save` has not written."""
    if manifest.exists():
        try:
            own = json.loads(manifest.read_text()).keys() >= {"format", "model", "files"}
        except (ValueError, AttributeError):
            own = False
        if not own:
            raise StateError(
                f"{manifest} was not written by save: pass another folder, or move the file away"
            )


def read(path: Path, digest: str) -> dict[str, Any]:
    """Return the content of a file, or raise StateError unless its digest is the given one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StateError(
            f"{path} is not as it was written ({len(data)} bytes, with another "
            "digest): truncated or corrupted"
        )
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise StateError(f"{path} has more than tensors and numbers in it: {error}") from error


def write_shards(folder: Path, rank: int, content: dict[str, Any]) -> dict[str, str]:
    """Write a rank's file, named after its digest; return its name and digest.

    Raises:
        StateError: If the content has more than tensors and plain values, which `read` refuses.
    """
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise StateError(
            f"the optimizer or its groups have a {', '.join(unsafe)}, which is not "
            "read from files: use plain numbers and tensors"
        )
    data = file.getbuffer()
    digest = hashlib.sha256(data).hexdigest()
    name = f"rank-{rank}-{digest[:16]}.pt"
    write(folder / name, data)
    return {"name": name, "sha256": digest}


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically: under another name until it is complete."""
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
