"""Every branch for GPUs has a test marked `gpu`, or a recorded run, or is listed as unverified."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS, ONE_GPU = "tests/gpu/test_kernels.py", "tests/gpu/test_one_gpu.py"
STREAMS = "tests/distributed/test_streams.py"
VERIFIED = {
    "autograd/recomputation.py _Circumstances.__init__": ONE_GPU,
    "autograd/recomputation.py _Circumstances.restored": ONE_GPU,
    "checkpoint/checkpoints.py Checkpoints.save_async": KERNELS,
    "checkpoint/checkpoints.py Checkpoints.save_async.background": KERNELS,
    "checkpoint/random_state.py get": KERNELS,
    "checkpoint/random_state.py put": KERNELS,
    "context_parallel/fused.py kernel": "tests/context_parallel/test_fused.py",
    "costs/activations.py gpt2_block_items": "tests/autograd/test_activation_memory.py",
    "divergence/random_states.py random_states": KERNELS,
    "divergence/random_states.py set_random_states": KERNELS,
    "distributed/backends.py device_of": KERNELS,
    "distributed/gpus.py visible": ONE_GPU,
    "distributed/launch.py join": ONE_GPU,
    "distributed/streams.py Later.__init__": STREAMS,
    "distributed/streams.py Later.wait": STREAMS,
    "distributed/streams.py start": STREAMS,
    "measure/hardware.py caches": ONE_GPU,
    "measure/hardware.py gpus": ONE_GPU,
    "measure/hardware.py topology": ONE_GPU,
    "measure/recorder.py _finish_stream": KERNELS,
    "measure/timing.py best_seconds": ONE_GPU,
    "measure/timing.py _settle": KERNELS,
    "models/paced.py Paced.done": ONE_GPU,
    "pipeline/groups.py new_groups": KERNELS,
    "pipeline/profiling.py _now": ONE_GPU,
    "pipeline/shape_inference.py _infer_data": KERNELS,
    "tensor_parallel/random.py fork_rng": KERNELS,
    "world/engine.py introduce": ONE_GPU,
    "world/engine.py join": ONE_GPU,
    "world/engine.py sever": ONE_GPU,
    "world/engine.py _synchronize": ONE_GPU,
    "world/launch.py Launched.__init__": ONE_GPU,
    "world/launch.py Launched._choose": ONE_GPU,
    "world/requirements.py gpus": ONE_GPU,
    "world/world.py World.__init__": ONE_GPU,
    "world/world.py World._join": ONE_GPU,
}
# What several GPUs would show, a launcher on a node that has them, or a chapter that is newer than
# the last record.
UNVERIFIED = {
    "03_communication_cost nccl-factors": "NCCL among several GPUs",
    "11_data_parallel nn-data-parallel": "two GPUs, for nn.DataParallel to use",
    "17_from_one_to_many run-def": "an execution of this chapter on a GPU",
    "18_deepspeed arch-ask": "an execution of this chapter on a GPU",
    "18_deepspeed crash": "an execution of this chapter on several GPUs",
}


def branches(file):
    """The functions of a file, or its methods, that ask for CUDA or NCCL by name."""
    found = set()

    def visit(node, name):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            asks = isinstance(child, ast.Attribute) and child.attr in ("cuda", "is_cuda")
            asks |= isinstance(child, ast.Constant) and child.value in ("cuda", "nccl")
            if asks:
                found.add(name)
            visit(child, f"{name}.{child.name}".lstrip(".") if named else name)

    visit(ast.parse(file.read_text()), "")
    return found


def all_branches():
    package = ROOT / "src/naranhi"
    found = {
        f"{file.relative_to(package)} {name}"
        for file in package.rglob("*.py")
        for name in branches(file)
    }
    for file in (ROOT / "notebooks/en").glob("*.ipynb"):
        for cell in json.loads(file.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and re.search(r"\b(cuda|nccl|is_cuda)\b", source):
                found.add(f"{file.stem} {cell['id']}")
    return found


def recorded():
    """The chapters that a machine with a GPU has executed."""
    stamps = (ROOT / "book/recorded").glob("*/stamp.json")
    return {file.stem for stamp in stamps for file in stamp.parent.glob("[0-9]*.json")}


def test_every_branch_is_verified_recorded_or_listed():
    executed = recorded()
    unknown = {
        branch
        for branch in all_branches() - VERIFIED.keys() - UNVERIFIED.keys()
        if branch.partition(" ")[0] not in executed
    }
    assert not unknown, "no test marked gpu, no record and not listed as unverified"


def test_nothing_is_listed_that_is_not_there():
    assert not (VERIFIED.keys() | UNVERIFIED.keys()) - all_branches()
    assert not VERIFIED.keys() & UNVERIFIED.keys()


@pytest.mark.parametrize("file", sorted(set(VERIFIED.values())))
def test_what_verifies_is_marked(file):
    assert "mark.gpu" in (ROOT / file).read_text()
