"""Write a plan as other programs want it: naranhi.train, torchtitan, Megatron-LM."""

from naranhi.planning.megatron import megatron
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.torchtitan import torchtitan

__all__ = ["megatron", "naranhi_train", "torchtitan"]


def naranhi_train(model: Model, plan: Plan, global_batch: int) -> str:
    """Return the command of `naranhi.train` with these degrees, for its own GPT-2.

    Raises:
        ValueError: If the plan has what `naranhi.train` does not: ZeRO, several chunks on a rank,
            or experts divided over ranks of one sequence.
    """
    if plan.zero:
        raise ValueError(f"naranhi.train cannot run this plan: it has no ZeRO-{plan.zero}")
    if plan.chunks > 1:
        raise ValueError(
            f"naranhi.train cannot run this plan: a rank has {plan.chunks} chunks of it, and of "
            "naranhi.train's one"
        )
    if plan.dp % plan.ep:
        raise ValueError(
            f"naranhi.train cannot run this plan: experts are divided over {plan.ep} ranks, which "
            f"do not divide the {plan.dp} that share the batch"
        )
    words = [
        "torchrun",
        f"--nproc-per-node {plan.ranks}",
        "-m naranhi.train",
        f"--dp {plan.dp // plan.ep} --tp {plan.tp} --pp {plan.pp}",
        f"--schedule {plan.schedule}",
        f"--batch {global_batch} --microbatches {plan.microbatches(global_batch)}",
    ]
    if plan.cp > 1:
        words.append(f"--cp {plan.cp}")
    if model.experts:
        words.append(f"--experts {model.experts} --top-k {model.top_k} --ep {plan.ep}")
    if plan.tp > 1 and plan.sequence_parallel:
        words.append("--sequence-parallel")
    return " ".join(words)
