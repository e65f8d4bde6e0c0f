"""By which address and interface others reach this machine; `tests/cluster` has two nodes."""

import os
import subprocess
import uuid

import host_network
import pytest

from naranhi.distributed import addresses


def test_toward_this_machine_is_its_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert addresses.toward("127.0.0.1") == "127.0.0.1"
    addresses.use_interface_toward("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_toward_another_machine(needs, monkeypatch):
    """The end of a cable here, whose other end is in a namespace, as on another machine."""
    needs("ip", "iproute2", as_root=True)
    name, device = f"naranhi{(mark := uuid.uuid4().hex[:6])}", f"v{mark}"

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    with host_network.changing():
        ip("netns", "add", name)
        try:
            ip("link", "add", device, "type", "veth", "peer", "name", device, "netns", name)
            ip("link", "set", device, "addrgenmode", "none")  # no address that comes later
            ip("addr", "add", "10.79.0.1/24", "dev", device)
            ip("link", "set", device, "up")
            assert addresses.toward("10.79.0.2") == "10.79.0.1"
            monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
            addresses.use_interface_toward("10.79.0.2")
            assert os.environ["GLOO_SOCKET_IFNAME"] == device
        finally:
            ip("netns", "del", name)


def test_an_interface_that_the_user_named_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    addresses.use_interface_toward("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_host_that_has_no_address():
    with pytest.raises(RuntimeError, match="this machine cannot reach nowhere"):
        addresses.toward("nowhere.invalid")
