"""Ranks on two nodes of one allocation, by `srun` and in a World; one node is drained meanwhile.

The host's name is that of its loopback interface on both nodes, as Debian's installer sets it.
"""

import sys

from test_launchers import EXPECTED, HERE, batch, run, wait_until_no_ranks

PROGRAM = """#!{python}
import os, subprocess
import naranhi
world = naranhi.World(4, timeout=20)
world.execute("x = torch.ones(1); dist.all_reduce(x); print(x.item())")
print(world.run(lambda: (os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_PROCID"]))))
subprocess.run(["scontrol", "update", "nodename=node2", "state=drain", "reason=test"], check=True)
try:
    world.execute("import os\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()")
except naranhi.RankError as error:
    print(str(error).splitlines()[0])
world.execute("x = torch.ones(1); dist.all_reduce(x); print(x.item())")
world.close()
"""


def test_srun_over_two_nodes(two_nodes, tmp_path):
    command = ["srun", "-N2", "-n4", "--overcommit", sys.executable, HERE / "program.py"]
    printed = run(command, env=two_nodes, cwd=tmp_path)
    assert sorted(printed.splitlines()) == EXPECTED
    assert list(tmp_path.iterdir()) == []


def test_torchrun_over_two_nodes(two_nodes, tmp_path):
    """A launcher on each; gloo would listen at the address of the host's name, which is `lo`'s."""
    launch = f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2"
    meeting = "--node-rank $SLURM_NODEID --master-addr 10.78.0.1 --master-port 29417"
    shell = f"{launch} {meeting} {HERE / 'program.py'}"
    command = ["srun", "-N2", "-n2", "--overcommit", "sh", "-c", shell]
    printed = run(command, env=two_nodes, cwd=tmp_path)
    assert sorted(printed.splitlines()) == EXPECTED


# What `srun` tells the tasks of a notebook's own step, or a site's settings all jobs. The cores are
# not of this job, which has the first of each node.
INHERITED = {
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x2",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_LIST": "0x2",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GPUS_PER_TASK": "4",
}
NEIGHBOURS = """#!{python}
import os
import naranhi
os.environ.update({inherited})
world = naranhi.World(4, timeout=20)
print(world.run(lambda: (os.environ["SLURMD_NODENAME"], int(os.environ["LOCAL_RANK"]))))
print({inherited}.items() <= os.environ.items())
world.close()
"""


def test_what_a_notebooks_own_step_inherits_does_not_reach_its_ranks(two_nodes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NEIGHBOURS.format(python=sys.executable, inherited=INHERITED))
    printed = batch(two_nodes, script, tmp_path, "-N2")
    assert printed.splitlines() == [
        "[('node1', 0), ('node1', 1), ('node2', 0), ('node2', 1)]",
        "True",
    ], printed
    wait_until_no_ranks()


def test_a_world_over_two_nodes_of_which_one_is_drained(two_nodes, tmp_path):
    """A node that is drained keeps what it runs, and takes the restarted ranks of the job."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(python=sys.executable))
    printed = batch(two_nodes, script, tmp_path, "-N2")
    lines = printed.splitlines()
    assert lines[:2] == [
        "[ranks 0-3] 4.0",
        "[('node1', 0), ('node1', 1), ('node2', 2), ('node2', 3)]",
    ], printed
    assert lines[2].startswith("rank 3 died ("), printed
    assert lines[3:] == [
        "ranks 0-3 restarted; the variables of earlier cells are lost",
        "[ranks 0-3] 4.0",
    ], printed
    wait_until_no_ranks()
