"""Write a plan as a configuration of torchtitan."""

from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.refusals import check_heads

# The schedules as torch.distributed.pipelining names them.
_TORCH = {
    "one_f_one_b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


def torchtitan(
    model: Model, plan: Plan, sequence_length: int, global_batch: int, *, compiled: bool = False
) -> str:
    """Return the sections of a torchtitan configuration, in TOML.

    Args:
        model: The model.
        plan: The plan.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        compiled: Whether torch.compile fuses each layer, as it always does with fp8.

    Raises:
        ValueError: If torchtitan has no name for the schedule, cannot cut the model, the batch or
            the sequence as the plan does, or lacks the precision, the sharding, compiled layers or
            tied embeddings with these degrees.

    Source: torchtitan 0.2, `torchtitan/config/job_config.py` and `torchtitan/distributed`.
    """
    check_heads("torchtitan", model, plan)
    if plan.v_shaped and (compiled or plan.precision == "fp8"):
        what = "its fp8 is compiled, and " if plan.precision == "fp8" else ""
        raise ValueError(
            f"torchtitan cannot run this plan: {what}torch's {_TORCH[plan.schedule]} refuses "
            f"compiled layers; choose {'bf16 or ' if what else ''}another schedule"
        )
    if plan.tp > 1 and not plan.sequence_parallel:
        raise ValueError(
            "torchtitan cannot run this plan: with tp it always shards norms along the sequence; "
            "choose sequence_parallel"
        )
    if plan.pp > 1 and model.tied:
        raise ValueError(
            "torchtitan cannot run this plan: in a pipeline it cannot tie the embedding to the "
            "output, which are on two stages; choose pp = 1"
        )
    local = plan.microbatch if plan.pp == 1 else global_batch // plan.dp
    sharded = _sharded(plan)
    ring = 2 * plan.cp * plan.tp if plan.cp > 1 else 1
    if sequence_length % ring:
        raise ValueError(
            f"torchtitan cannot run this plan: sequence_length = {sequence_length} is not a "
            f"multiple of 2 x cp x tp = {ring}, the pieces of a sequence"
        )
    lines = [
        *_other_zero(plan),
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {global_batch}",
        f"seq_len = {sequence_length}",
        *_precision(model, plan, sharded),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {plan.dp // sharded}",
        f"data_parallel_shard_degree = {sharded}",
        f'fsdp_reshard_after_forward = "{"default" if plan.zero == 3 else "never"}"',
        f"tensor_parallel_degree = {plan.tp}",
        f"context_parallel_degree = {plan.cp}",
        *_experts(plan, sharded),
        f"pipeline_parallel_degree = {plan.pp}",
    ]
    if plan.pp > 1:
        if plan.schedule not in _TORCH:
            raise ValueError(
                f"torchtitan has no name for the schedule {plan.schedule!r}; choose one of "
                f"{', '.join(_TORCH)}"
            )
        if plan.schedule == "interleaved" and plan.chunks == 1:
            raise ValueError(
                "torchtitan cannot run this plan: its Interleaved1F1B has at least 2 chunks on a "
                "rank, and the plan 1; choose one_f_one_b"
            )
        count = plan.microbatches(global_batch)
        if plan.schedule == "one_f_one_b" and count < plan.pp:
            raise ValueError(
                f"torchtitan cannot run this plan: torch's 1F1B needs a micro-batch for each "
                f"stage, and the plan has {count} for pp = {plan.pp}; choose gpipe"
            )
        lines += [
            f'pipeline_parallel_schedule = "{_TORCH[plan.schedule]}"',
            f"pipeline_parallel_microbatch_size = {plan.microbatch}",
        ]
        lines += _stages(model, plan)
    lines += ["", "[activation_checkpoint]", f'mode = "{plan.recompute}"']
    if plan.recompute == "selective":  # by default it would recompute every second layer
        lines.append('selective_ac_option = "op"')
    if plan.precision == "fp8":
        lines += ["", "[model]", 'converters = ["quantize.linear.float8"]']
        lines += ["", "[quantize.linear.float8]", 'filter_fqns = ["output"]']
    if compiled or plan.precision == "fp8":  # in which the casts are fused, too
        lines += ["", "[compile]", "enable = true"]
    return "\n".join(lines)


def _other_zero(plan):
    """Return a comment where FSDP does more than the plan says."""
    if plan.zero in (0, 3) or plan.pp > 1:
        return []
    return [
        f"# torchtitan has no ZeRO-{plan.zero}: FSDP also shards parameters and gradients, and so "
        "holds less than",
        "# forecast, and gathers and reduces them in every micro-batch.",
    ]


def _sharded(plan):
    """Return data_parallel_shard_degree: FSDP shards over as many ranks, times cp."""
    if not plan.zero and plan.cp > 1:
        raise ValueError(
            f"torchtitan cannot run this plan: it always shards the model state over the cp = "
            f"{plan.cp} ranks of a sequence, and the plan has no ZeRO"
        )
    if plan.zero and plan.zero_group % plan.cp:
        raise ValueError(
            f"torchtitan cannot run this plan: it shards over a multiple of cp = {plan.cp} ranks, "
            f"and zero_group = {plan.zero_group} is not one"
        )
    return plan.zero_group // plan.cp if plan.zero else 1


def _precision(model, plan, sharded):
    """Return the lines of [training] that say a plan's precision."""
    if plan.precision == "fp8" and model.experts:
        raise ValueError(
            "torchtitan cannot run this plan: it multiplies by experts' weights in bf16, and in "
            "fp8 only in a prototype; choose bf16"
        )
    fsdp, alone = sharded * plan.cp > 1, plan.tp * plan.pp == 1
    if not fsdp and not alone and (plan.dp > 1 or plan.precision != "fp32"):
        raise ValueError(
            f"torchtitan cannot run this plan: beside tp x pp = {plan.tp} x {plan.pp} it has data "
            "parallelism and bf16 only with FSDP; choose ZeRO over 2 ranks or more"
        )
    return ['mixed_precision_param = "float32"'] if plan.precision == "fp32" else []


def _experts(plan, sharded):
    """Return the lines of [parallelism] that divide the experts."""
    if plan.etp is not None and (plan.etp > 1 or plan.ep == 1):
        raise ValueError(
            f"torchtitan cannot run this plan: etp = {plan.etp} with ep = {plan.ep}: either leave "
            "out etp, and it cuts each expert by tp, or choose etp = 1 with ep > 1"
        )
    name, ranks = "cp", plan.cp
    if plan.etp == 1:
        name, ranks = "cp x tp", plan.cp * plan.tp
    if plan.ep > 1 and (plan.ep % ranks or sharded * ranks % plan.ep):
        raise ValueError(
            f"torchtitan cannot run this plan: ep = {plan.ep} is not a multiple of {name} = "
            f"{ranks} that divides data_parallel_shard_degree x {name} = {sharded} x {ranks}; "
            "choose such an ep, or ZeRO over more ranks"
        )
    # Its default, 1, spreads whole experts over tp as well.
    tensor = [f"expert_tensor_parallel_degree = {plan.expert_tp}"] if plan.ep > 1 else []
    return [f"expert_parallel_degree = {plan.ep}", *tensor]


def _stages(model, plan):
    """Return the lines of [parallelism] that cut the layers into the plan's stages, as `cut` does.

    torchtitan counts the embedding and the output as that many layers, and gives the extra layers
    to the first stages (`generate_llm_fqn_per_model_part`).
    """
    stages = plan.pp * plan.chunks
    more = model.layers % stages
    last = int(more > 0 and more >= stages - 2)
    first = int(more > 0 and more != stages - 1)
    lines = [
        f"pipeline_parallel_first_stage_less_layers = {first}",
        f"pipeline_parallel_last_stage_less_layers = {last}",
    ]
    if plan.chunks <= 2:  # torchtitan makes this many by default
        return lines
    counted = model.layers + first + last
    each = -(-counted // stages)
    if -(-counted // each) != stages:
        raise ValueError(
            f"torchtitan cannot run this plan: with {each} of {model.layers} layers on a stage it "
            f"makes {-(-counted // each)} stages, not pp x chunks = {plan.pp} x {plan.chunks}; "
            "choose 2 chunks, or pp and chunks that divide the layers"
        )
    return [f"pipeline_parallel_layers_per_stage = {each}", *lines]
