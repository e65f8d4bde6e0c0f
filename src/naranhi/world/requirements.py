"""Check what a World needs of its machine before anything starts, with a clear error."""

from __future__ import annotations

import os
import resource
import socket
import tempfile

from naranhi.world.errors import RankError

ROOM = 2 << 20  # bytes for temporary files, besides what the ranks print


def open_files(ranks: int) -> None:
    """Allow enough open files for the notebook, the controller and each rank.

    Measured: the controller holds 70 plus 8 per rank; a rank holds 60 plus 5 per other rank.

    Raises:
        RankError: the hard limit is too low.
    """
    needed = 160 + 16 * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RankError(
            f"{ranks} ranks need {needed} open files a process, and the limit is {hard}; "
            f"raise it before starting Python: ulimit -n {max(needed, 1024)}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def loopback() -> None:
    """Check that an interface exists over which ranks on one machine can communicate.

    Raises:
        RankError: the loopback interface does not answer.
    """
    try:
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname(), timeout=5).close()
        server.close()
    except OSError as error:
        raise RankError(
            f"this machine's loopback interface does not answer ({error.strerror}); ranks talk "
            "over it even without a network. Bring it up: ip link set lo up"
        ) from None


def current_folder() -> None:
    """Check that the current folder exists, because the ranks start in it.

    Raises:
        RankError: the current folder has been removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RankError(
            "the current folder of this notebook has been removed, and ranks start in it; "
            "go to another: import os; os.chdir(os.path.expanduser('~'))"
        ) from None


def folder() -> str:
    """Make a folder, readable by this user only, for connection files, output and notes.

    Returns:
        Its path.

    Raises:
        RankError: no folder can be made, or its disk has less than `ROOM` bytes left.
    """
    advice = "set TMPDIR to a folder that can be written, before starting Python"
    try:
        made = tempfile.mkdtemp(prefix="naranhi-")
    except OSError as error:
        raise RankError(
            "the ranks need a folder for temporary files, and none can be made "
            f"({error.strerror}); {advice}"
        ) from None
    disk = os.statvfs(made)
    if disk.f_bavail * disk.f_frsize < ROOM:
        os.rmdir(made)
        raise RankError(
            f"the ranks need {ROOM >> 20} MiB for temporary files, and {os.path.dirname(made)} has "
            f"{disk.f_bavail * disk.f_frsize >> 10} KiB left; make room there, or {advice}"
        )
    return made


def gpus(ranks: int) -> None:
    """Check that there is a GPU for each rank.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    import torch

    if torch.cuda.device_count() < ranks:
        raise ValueError(gpus_short(ranks, torch.cuda.device_count()))


def gpus_short(ranks: int, count: int) -> str:
    """Return the message for too few GPUs: `count` for `ranks`."""
    return (
        f"backend 'nccl' needs one GPU for each of the {ranks} ranks, and there "
        f"{'is' if count == 1 else 'are'} {count}; leave out backend= to use gloo"
    )
