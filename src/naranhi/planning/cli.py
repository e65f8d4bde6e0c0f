"""Find plans on the command line.

    python -m naranhi.planning --model config.json --gpu H100 --gpus 128 --sequence 4096 --batch 512

The table has the plans that fit, the fastest first; below it stand why, and the same plan as other
programs want it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from naranhi.planning import commands
from naranhi.planning.arguments import check_least
from naranhi.planning.cluster import GIB, Cluster, gpus
from naranhi.planning.config import TRAINED, family_of
from naranhi.planning.engine import engines
from naranhi.planning.explanation import describe, explain
from naranhi.planning.model import Model
from naranhi.planning.plan_search import Found, search
from naranhi.planning.prediction import predict

LEFT_OUT = (
    "(These decide how long a step takes. Add what else your model has: --rotary-base, "
    "--norm-epsilon, --qk-layernorm, --add-qkv-bias.)"
)

# The engines that say how a program runs a plan, beginning with that of today.
ENGINES = {
    "torchtitan": ("fsdp", "fsdp-compile"),
    "Megatron-LM": (
        "megatron",
        "megatron-deepep",
        "megatron-2024",
        "megatron-2021",
        "nemo",
        "nemo-2024",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says more)\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options; None parses the arguments of this process."""
    parser = _Parser(
        prog="naranhi.planning",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a config.json of Hugging Face")
    add("--gpu", default="H100", choices=list(gpus()), help="the GPU; default: H100")
    add("--gpus", type=int, required=True, metavar="N", help="how many GPUs")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that NVLink joins")
    add("--network", type=float, metavar="GBIT", help="Gbit/s between nodes, for each GPU")
    add("--memory", type=float, metavar="GIB", help="GiB of a GPU that training may use")
    add("--engine", default="megatron", choices=list(engines()), help="default: megatron")
    add("--sequence", type=int, required=True, metavar="TOKENS", help="tokens of a sequence")
    add("--batch", type=int, required=True, metavar="SEQUENCES", help="sequences of a step")
    add("--precision", default="bf16", choices=["bf16", "fp8", "fp32"], help="default: bf16")
    add("--best", type=int, default=10, metavar="N", help="how many plans to show; default: 10")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plans that fit, why the first is best, and the same plan for other programs.

    Returns:
        0 if a plan fits, 1 if none does, 2 if an argument is wrong or no plan is possible.
    """
    options = parse(arguments)
    try:
        for name, least in (("sequence", 1), ("batch", 1), ("best", 1)):
            check_least(f"--{name}", getattr(options, name), least)
        model = Model.from_config(options.model)
        cluster = Cluster(
            options.gpus,
            options.gpus_per_node,
            options.gpu,
            options.network,
            options.engine,
            options.memory,
        )
        result = search(
            model,
            cluster,
            options.sequence,
            options.batch,
            best=max(2, options.best),
            precision=options.precision,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f"naranhi.planning: {error}")
        return 2
    if not result.plans:
        print(explain(result))
        return 1
    print(table(result, options.best))
    print()
    print(explain(result))
    for name, text in written(result, options.model, family_of(options.model)).items():
        print(f"\n{name}:\n{text}")
        if text.startswith(("--", "[", "#")):  # and not why the program cannot
            if name == "Megatron-LM":
                print(LEFT_OUT)
            print(in_its_engine(result, name), end="")
    return 0


def table(found: Found, best: int = 10) -> str:
    """Return the plans as a table of text."""
    lines = [f"{'step':>9} {'low':>8} {'high':>8} {'tokens/s/GPU':>13} {'MFU':>6} {'GiB':>6}  plan"]
    for plan, forecast in found.plans[:best]:
        lines.append(
            f"{forecast.step_seconds:7.3g} s {forecast.low:8.3g} {forecast.high:8.3g} "
            f"{forecast.tokens_per_second_per_gpu:13,.0f} {forecast.mfu:6.1%} "
            f"{forecast.memory_bytes / GIB:6.1f}  {describe(plan)}"
        )
    return "\n".join(lines)


def in_its_engine(found: Found, program: str) -> str:
    """Return a line on what the fastest plan takes in a program, if another engine was forecast.

    Args:
        found: The plans.
        program: "torchtitan" or "Megatron-LM".
    """
    if found.cluster.engine in ENGINES[program]:
        return ""
    engine, (plan, _) = ENGINES[program][0], found[0]
    cluster = replace(found.cluster, engine=engine)
    forecast = predict(found.model, cluster, plan, found.sequence_length, found.global_batch)
    return f"(With --engine {engine}: {forecast.step_seconds:.3g} s, and it {forecast.verdict}.)\n"


def written(found: Found, config: str | None = None, family: str | None = None) -> dict[str, str]:
    """Return the fastest plan in the form of other programs, or why they cannot run it.

    Args:
        found: The plans.
        config: The model's config.json, if it has one.
        family: The `model_type` that the config names.
    """
    plan, _ = found[0]
    sequence, batch = found.sequence_length, found.global_batch
    node, engine = found.cluster.gpus_per_node, found.cluster.runs
    more = {"deepep": engine.expert_nodes > 0, "bf16_gradients": engine.gradient_bytes == 2}
    compiled = engine.name == "fsdp-compile"
    ways = {
        "naranhi.train": lambda: commands.naranhi_train(found.model, plan, batch, node, config),
        "torchtitan": lambda: commands.torchtitan(
            found.model, plan, sequence, batch, compiled=compiled
        ),
        "Megatron-LM": lambda: commands.megatron(found.model, plan, sequence, batch, **more),
    }
    if config is not None and family not in TRAINED:
        has = ", ".join(TRAINED)
        ways["naranhi.train"] = lambda: f"naranhi.train cannot run this model; it has {has}"
    result = {}
    for name, write in ways.items():
        try:
            result[name] = write()
        except ValueError as error:
            result[name] = str(error)
    return result
