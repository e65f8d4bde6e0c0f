"""The same forecasts where the kernel makes the link slow: two hosts, in network namespaces."""

import json
from pathlib import Path

import pytest
from faulty_runs import RECIPES, TORCHRUN, Run

pytestmark = pytest.mark.ranks
UNSHARE = ["unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
HOSTS = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29500"]
PROGRAM = Path(__file__).parents[1] / "support" / "rehearsed_on_hosts.py"
RATE = 2e6  # bytes per second of the cable between the hosts, which the two ranks of a host share
SLOW = f'tc qdisc add dev eth0 root tbf rate {8 * RATE:.0f}bit burst 16kb latency 2s; exec "$@"'


def test_the_mesh_chosen_for_two_hosts_is_within_a_twentieth_of_the_best(needs, tmp_path):
    needs("tc", "iproute2", as_root=True)
    file = tmp_path / "meshes.json"
    command = [*UNSHARE, "sh", RECIPES / "two_hosts.sh", "sh", "-c", SLOW, "sh"]
    with Run(tmp_path, *command, *TORCHRUN, *HOSTS, PROGRAM, file) as run:
        assert run.end(200) == 0, run.printed()
        assert file.exists(), run.printed()
    found = json.loads(file.read_text())
    forecasts = {name: forecast for name, forecast, _ in found["meshes"]}
    measured = {name: seconds for name, _, seconds in found["meshes"]}
    _, rate = found["far"]
    assert 0.7 < rate * RATE / 2 < 1.5, "each rank has half of the cable when both send"
    chosen = min(forecasts, key=forecasts.get)
    assert measured[chosen] <= 1.05 * min(measured.values()), found
    assert "p2" in chosen, "the slow cable gets the axis that sends least"
    assert measured["d4 p1 c1 t1"] > 1.1 * measured[chosen], "or any choice would do"
