"""One build at a time in ``_build``, and a sentence where nothing can be written there."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT}
WORDS = os.strerror(errno.ENOSPC)
WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}  # some file systems of a network


class CannotBuild(Exception):
    """What is in the way of a build, and what to do; a traceback would say nothing more."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[int]:
    """Keep other builds out of a folder during the block; the lock ends with the process.

    Yields:
        The lock's descriptor: a process that inherits it holds the lock, too.

    Raises:
        CannotBuild: another build is at work there, or the folder cannot be written, or its disk
            becomes full.
    """
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        refuse_full(error, folder)
        raise CannotBuild(
            f"{folder} cannot be written ({error.strerror}): build in a copy that is yours"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read(1000) or "another process"
            raise CannotBuild(
                f"{folder} is in use: {owner} builds there; wait for its end"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            yield lock.fileno()
        except Exception as error:
            refuse_full(error, folder)
            raise


def refuse_full(error: BaseException | None, folder: Path) -> None:
    """Raise CannotBuild if an error, or one that it followed, says that the disk is full."""
    while error is not None:
        # shutil.Error has the errors of several files, as texts.
        if isinstance(error, OSError) and (error.errno in FULL or WORDS in str(error)):
            raise CannotBuild(
                f"no room is left for {error.filename or folder}: make room on its disk and build "
                "again; the old pages stay"
            ) from None
        error = error.__cause__ or error.__context__
