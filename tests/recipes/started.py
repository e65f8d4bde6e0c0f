"""How the tests start recipes, and read what they print."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "recipes"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LINE = re.compile(r"step (\d+): loss ([\d.]+)")
# AdamW's steps are the same for gradients that are all too large by a factor.
STEPS = ["--steps", "3", "--optimizer", "sgd", "--lr", "0.1"]
IMPORTED = [
    "datasets",
    "deepspeed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.tokenization_utils_tokenizers",
]


def losses(done):
    """What a recipe has printed, as {step: loss}."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): float(loss) for step, loss in LINE.findall(done.stdout)}


def run(command, folder, **environment):
    return subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )


def torchrun(ranks, script, *options, folder, **environment):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(RECIPES / script), *options]
    return run(command, folder, **environment)


def small_gpt2(folder, **changes):
    """Save the recipes' small GPT-2 with another configuration; return the option that names it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = RECIPES / "small" / "gpt2"
    config = AutoConfig.from_pretrained(small, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in small.glob("tokenizer*"):
        shutil.copy(path, folder)
    return ["--model", str(folder)]
