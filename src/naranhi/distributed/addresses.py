"""Find the address and interface by which the nodes of a Slurm job reach each other.

Host names do not help: Debian's installer maps a machine's own name to `127.0.1.1` in `/etc/hosts`,
which no other machine can reach. The route to another node shows the address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess

_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface (netdevice(7))


def own_address() -> str:
    """Return the address by which the other nodes of this job reach this one.

    Raises:
        RuntimeError: Slurm does not list the other nodes, or there is no route to them.
    """
    nodes = _scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    # (salloc's shell is on none of them)
    other = next(node for node in nodes if node != os.environ.get("SLURMD_NODENAME"))
    shown = _scontrol("show", "node", other, "--oneliner").split()
    fields = dict(field.split("=", 1) for field in shown if "=" in field)
    return toward(fields.get("NodeAddr", other))


def toward(host: str) -> str:
    """Return the IPv4 address of this machine from which it would send to a host.

    Raises:
        RuntimeError: the host's name has no address, or there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 9))  # sends nothing: the system looks for the route
        except OSError as error:
            raise RuntimeError(f"this machine cannot reach {host}: {error.strerror}") from error
        return sock.getsockname()[0]


def use_interface_toward(host: str) -> None:
    """Let gloo listen where a host can reach it, unless `GLOO_SOCKET_IFNAME` says otherwise.

    NCCL needs no such setting, because it skips the loopback interface by itself.

    Raises:
        RuntimeError: this machine cannot reach the host.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(toward(host))


def _interface(address):
    """Return the name of the interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise RuntimeError(f"no interface of this machine has the address {address}")


def _scontrol(*words):
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"scontrol {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
