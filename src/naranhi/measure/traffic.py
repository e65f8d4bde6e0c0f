"""The bytes that cross the wire, read from the counters of the Linux kernel."""

import os
import socket
import struct
from pathlib import Path


def wire_bytes() -> int:
    """Return the bytes that this process has sent over its TCP connections that are open now.

    The difference between two calls is what gloo sent in between, including its own headers and
    notifications, but without retransmissions. NCCL between GPUs of one node does not use TCP, so
    its bytes are not counted. The kernel counts (`tcpi_bytes_sent` and `tcpi_bytes_retrans` in
    Linux's `struct tcp_info`, since 4.19).

    Raises:
        OSError: the operating system is not Linux.
    """
    if not hasattr(socket, "TCP_INFO"):
        raise OSError("only Linux tells how many bytes a connection has carried")
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            own = os.dup(int(entry.name))
        except OSError:  # another thread has closed it meanwhile
            continue
        with socket.socket(fileno=own) as connection:
            tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, again = struct.unpack_from("=QQ", info, 200)
                total += sent - again
    return total
