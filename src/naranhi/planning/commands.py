"""Write a plan in the form of other programs: naranhi.train, torchtitan, Megatron-LM."""

import shlex

from naranhi.planning.megatron import megatron
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.torchtitan import torchtitan

__all__ = ["megatron", "naranhi_train", "torchtitan"]


def naranhi_train(
    model: Model,
    plan: Plan,
    global_batch: int,
    gpus_per_node: int | None = None,
    config: str | None = None,
) -> str:
    """Return the command of `naranhi.train` with these degrees.

    Args:
        model: The model. Without `config` the command trains naranhi.train's default GPT-2, which
            takes from it only the experts, and whether embedding and head are tied.
        plan: The plan.
        global_batch: Sequences of a step.
        gpus_per_node: Ranks that fit on one node; None for all. For several nodes, run the same
            command on each, with the first node's name in place of FIRST_NODE.
        config: The model's config.json, of a family that `naranhi.train` supports.

    Raises:
        ValueError: If `naranhi.train` lacks what the plan needs: ZeRO over fewer than all replicas
            or gathering layer by layer; experts over ranks of one sequence or cut over tensor
            parallel ranks; a tp or cp that the model rules out; selective recomputation; fp8.
    """
    experts = f"ep = {plan.ep} has to divide dp = {plan.dp}, the ranks that share the batch"
    reasons = (
        (
            plan.zero and plan.zero_group < plan.replicas,
            f"its ZeRO shards over all {plan.replicas} ranks of dp x cp, not over "
            f"{plan.zero_group} of them; leave out zero_group",
        ),
        (
            plan.zero == 3 and not plan.kept_whole,
            "its ZeRO-3 gathers a whole stage for a step, and the plan's gathers layer by layer; "
            "choose zero = 1 or 2",
        ),
        (plan.dp % plan.ep, experts),
        (
            config is not None and model.kv_heads % plan.tp,
            f"kv_heads = {model.kv_heads} is not a multiple of tp = {plan.tp}; choose another tp",
        ),
        (
            model.experts and 8 % max(2 * plan.cp * (plan.cp > 1), plan.cp * plan.tp),
            "with experts, 2 x cp and cp x tp have to divide 8; here they are "
            f"{2 * plan.cp} and {plan.cp * plan.tp}",
        ),
        (
            model.experts and plan.expert_tp > 1,
            f"its experts are whole, and the plan cuts each over {plan.expert_tp} ranks of tp; "
            "choose etp = 1",
        ),
        (plan.recompute == "selective", "it recomputes whole blocks or nothing; choose full"),
        (plan.precision == "fp8", "it computes in bf16 or fp32, not in fp8; choose one of them"),
    )
    if refused := [why for holds, why in reasons if holds]:
        raise ValueError(f"naranhi.train cannot run this plan: {'; '.join(refused)}")
    nodes = 1 if gpus_per_node is None else -(-plan.ranks // gpus_per_node)
    words = [
        "torchrun",
        *([f"--nnodes {nodes}"] if nodes > 1 else []),
        f"--nproc-per-node {plan.ranks // nodes}",
        *(["--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"] if nodes > 1 else []),
        "-m naranhi.train",
        *([f"--config {shlex.quote(config)}"] if config is not None else []),
        f"--dp {plan.dp // plan.ep} --tp {plan.tp} --pp {plan.pp}",
        f"--schedule {plan.schedule}",
        f"--batch {global_batch} --microbatches {plan.microbatches(global_batch)}",
    ]
    if plan.schedule == "interleaved":
        words.append(f"--chunks {plan.chunks}")
    if plan.cp > 1:
        words.append(f"--cp {plan.cp}")
    if plan.zero and plan.replicas > 1:
        words.append(f"--zero {plan.zero}")
    if not model.tied or (plan.zero and plan.pp > 1):  # stages in shards cannot share weights
        words.append("--untied")
    if plan.precision == "bf16":
        words.append("--bf16")
    if model.experts:
        given = f"--experts {model.experts} --top-k {model.top_k} " if config is None else ""
        words.append(f"{given}--ep {plan.ep}")
    if plan.tp > 1 and plan.sequence_parallel:
        words.append("--sequence-parallel")
    if plan.recompute == "full":
        words.append("--recompute")
    return " ".join(words)
