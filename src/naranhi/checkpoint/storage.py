"""The folders of checkpoints on disk: written whole or not at all, read only as they were written.

    runs/gpt2/step-00000200/                        committed: it has all its files
    runs/gpt2/step-00000300.part/                   being written, or left by a run that was killed
    runs/gpt2/step-00000100.deleting/               being deleted, or left by a killed run

A save writes its files into a folder whose name ends with .part, each followed by an fsync: first
the ranks' shards, then `manifest.json` with the sizes and the digests of all other files. Then
one rename, which is atomic, gives the folder its final name; an fsync of the parent makes the name
durable. So a folder under its final name is complete, whenever the run was killed.

A run that saves holds a lock (flock) on the file `.lock`. The system drops the lock when the
process ends, however it ends, and on a network file system (NFS from Linux 2.6.12 on, Lustre
mounted with flock) the server does so when the machine is gone. If the existence of a file were the
lock, a person would have to delete the file after each kill. A forked process, such as a
DataLoader's worker, inherits the lock and could outlive the run, so it closes the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import warnings
import weakref
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from naranhi.checkpoint.deletion import delete, or_warn, remove
from naranhi.checkpoint.files import digest_of, entries, open_no_link, sync, wait_for, write

FORMAT = 1
MANIFEST = "manifest.json"
COMMITTED = re.compile(r"step-(\d{8,})")
UNFINISHED = re.compile(r"step-\d{8,}\.(part|deleting)")
OWNER = "process "  # how the text in a run's lock begins
UNSUPPORTED = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP  # of a file system without locks


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or is missing, damaged, or of another model."""


class OtherModelError(CheckpointError):
    """A checkpoint of another model or optimizer than the one to load into."""


class DamagedError(CheckpointError):
    """A committed checkpoint that is damaged; an earlier one may be intact."""


class Storage:
    """The folder of a run's checkpoints, as one process sees it.

    Args:
        folder: the folder.
    """

    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._lock = Path(folder), None

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, once it is committed."""
        return self.folder / f"step-{step:08d}"

    def part(self, step: int) -> Path:
        """Return where the checkpoint of a step is while it is being written."""
        return self.folder / f"step-{step:08d}.part"

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        found = [(path, COMMITTED.fullmatch(path.name)) for path in entries(self.folder)]
        steps = ((path, int(name[1])) for path, name in found if name)
        return sorted(step for path, step in steps if path == self.path(step) and path.is_dir())

    def claim(self) -> None:
        """Lock the folder for the saves of this process, until `release`.

        Raises:
            CheckpointError: another process saves into it, or `.lock` is another program's.
        """
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = open_no_link(self.folder / ".lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read(1000).strip() or "another process"
            lock.close()
            raise CheckpointError(
                f"{self.folder} is in use: {owner} saves into it; end that run, or give this run "
                "a different folder"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                lock.close()
                raise
            warnings.warn(
                f"{self.folder} is on a file system without locks ({error.strerror}): nothing "
                "stops another run from saving into it",
                stacklevel=2,
            )
        lock.seek(0)
        if not (known := lock.read(len(OWNER))).startswith(OWNER) and known:
            lock.close()
            raise CheckpointError(
                f"{self.folder / '.lock'} belongs to another program, and a save would empty it: "
                "give the run a different folder"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.truncate(0)
        lock.write(f"{OWNER}{os.getpid()} on {socket.gethostname()}, since {since}")
        lock.flush()
        self._lock = lock
        os.register_at_fork(after_in_child=_closing(lock))

    def release(self) -> None:
        """Let others save into the folder."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # on a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # for all who have inherited it
            self._lock.close()
            self._lock = None

    def begin(self, step: int, damaged: Container[int] = ()) -> None:
        """Make the folder to write a checkpoint into; delete what killed saves have left.

        Leftovers of other steps do no harm: this warns if they cannot be deleted.

        Args:
            step: its step.
            damaged: committed steps that may be replaced.

        Raises:
            CheckpointError: `step` is invalid, another process saves into the folder, or it has a
                checkpoint of this step or a later one, which `load` would take for the newest.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")
        self.claim()
        later = [other for other in self.steps() if other >= step and other not in damaged]
        if later:
            raise CheckpointError(
                f"{self.folder} has a checkpoint of step {later[-1]} already, and this is step "
                f"{step}: to go back to an earlier step, save into another folder, or delete the "
                f"checkpoints from step {later[0]} on"
            )
        for path in entries(self.folder):
            if UNFINISHED.fullmatch(path.name) and path != self.part(step):
                or_warn(delete, path)
        if os.path.lexists(self.part(step)):
            delete(self.part(step))
        self.part(step).mkdir()

    def commit(self, step: int, manifest: dict[str, Any]) -> None:
        """Write the manifest, when all other files are on disk, and give the folder its name.

        Args:
            step: the step.
            manifest: what to write beside format and step; `files` are as `digests` returns them.
        """
        part, path = self.part(step), self.path(step)
        content = {"format": FORMAT, "step": step, **manifest}
        write(part / MANIFEST, json.dumps({"sha256": _digest(content), **content}).encode())
        sync(part)
        if os.path.lexists(path):  # a damaged one, see `begin`
            remove(path)
        part.rename(path)
        try:
            sync(self.folder)
        except OSError:  # then nothing is committed
            path.rename(part)
            raise

    def abandon(self, step: int) -> None:
        """Delete what a failed save has written: on a full disk the next one needs the room."""
        shutil.rmtree(self.part(step), ignore_errors=True)

    def keep(self, newest: int, damaged: Container[int] = ()) -> None:
        """Delete all committed checkpoints but the newest; warn of what cannot be deleted.

        Args:
            newest: how many to keep.
            damaged: committed steps that do not count, because no run can go on from them.
        """
        for step in [step for step in self.steps() if step not in damaged][:-newest]:
            or_warn(remove, self.path(step))

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a committed checkpoint.

        Raises:
            DamagedError: it is not as it was written.
            FileNotFoundError: this rank does not see it.
            CheckpointError: it is of another format, or cannot be read.
        """
        path = self.path(step) / MANIFEST
        with _reading(path):
            text = path.read_bytes()
        try:
            content = json.loads(text)
            digest, version = content.pop("sha256"), content["format"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is not as it was written ({error})") from error
        if version != FORMAT:
            age = "another"
            if isinstance(version, int):
                age = "a newer" if version > FORMAT else "an older"
            raise CheckpointError(
                f"{path.parent} was saved in format {version} by {age} version of naranhi; this "
                f"one reads format {FORMAT}: use the version that saved it"
            )
        if _digest(content) != digest:
            raise DamagedError(f"{path} is not as it was written (another digest)")
        return content

    def verify(self, step: int, manifest: dict[str, Any], share: slice) -> None:
        """Compare files with the manifest.

        Args:
            step: the step of the checkpoint.
            manifest: its manifest.
            share: which of the files: each rank reads some of them.

        Raises:
            DamagedError: a file is not as it was written.
            FileNotFoundError: this rank does not see it.
            CheckpointError: it cannot be read.
        """
        for name, expected in sorted(manifest["files"].items())[share]:
            path = self.path(step) / Path(name).name
            with _reading(path):
                is_so = {"bytes": path.stat().st_size}
                if is_so["bytes"] == expected["bytes"]:
                    is_so = digest_of(path)
            if is_so != expected:
                raise DamagedError(
                    f"{path} is not as it was written: {is_so['bytes']:,} bytes of "
                    f"{expected['bytes']:,}" + ", with another digest" * ("sha256" in is_so)
                )


@contextlib.contextmanager
def _reading(path) -> Iterator[None]:
    """Wait for a file. If it cannot be read, raise CheckpointError: the file may be intact."""
    try:
        wait_for(path)
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _closing(file):
    """Return a function that closes a file object, and does not keep the object alive."""
    reference = weakref.ref(file)

    def close():
        if (file := reference()) is not None:
            file.close()

    return close


def _digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
