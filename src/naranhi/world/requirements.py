"""What a World needs of its machine, asked before anything is started: else one clear sentence."""

import os
import resource
import socket
import tempfile

from naranhi.world.errors import RankError

ROOM = 2 << 20  # bytes for temporary files, beside what the ranks print


def open_files(ranks):
    """Enough open files for the notebook, the controller and each rank.

    Measured: the controller holds 70 and 8 more for each rank, a rank 60 and 5 for each other one.
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


def loopback():
    """An interface over which ranks on one machine can talk."""
    try:
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname(), timeout=5).close()
        server.close()
    except OSError as error:
        raise RankError(
            f"this machine's loopback interface does not answer ({error.strerror}); ranks talk "
            "over it even without a network. Bring it up: ip link set lo up"
        ) from None


def current_folder():
    """A current folder, in which the ranks can start."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RankError(
            "the current folder of this notebook has been removed, and ranks start in it; "
            "go to another: import os; os.chdir(os.path.expanduser('~'))"
        ) from None


def folder():
    """A new folder, readable by this user only, for connection files, output and notes."""
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


def gpus(ranks):
    """A GPU for each rank."""
    import torch

    if torch.cuda.device_count() < ranks:
        raise ValueError(gpus_short(ranks, torch.cuda.device_count()))


def gpus_short(ranks, count):
    return (
        f"backend 'nccl' needs one GPU for each of the {ranks} ranks, and there "
        f"{'is' if count == 1 else 'are'} {count}; leave out backend= to use gloo"
    )
