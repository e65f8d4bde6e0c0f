"""Write a plan as other programs want it: naranhi.train, torchtitan, Megatron-LM."""

from naranhi.planning.model import Model
from naranhi.planning.plan import Plan

# The schedules as torch.distributed.pipelining names them.
_TORCH = {
    "one_f_one_b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


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


def torchtitan(model: Model, plan: Plan, sequence_length: int, global_batch: int) -> str:
    """Return the sections of a torchtitan configuration, in TOML.

    Raises:
        ValueError: If torchtitan has no name for the schedule, or cannot cut the model so.

    Source: torchtitan 0.2, `torchtitan/config/job_config.py` and `torchtitan/distributed`.
    """
    _check_heads("torchtitan", model, plan)
    local = plan.microbatch if plan.pp == 1 else global_batch // plan.dp
    sharded = plan.dp if plan.zero else 1
    lines = [
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
            raise ValueError(f"torchtitan has no name for the schedule {plan.schedule!r}")
        if plan.schedule == "interleaved" and plan.chunks == 1:
            raise ValueError(
                "torchtitan cannot run this plan: its Interleaved1F1B has at least 2 chunks on a "
                "rank, and the plan 1; choose one_f_one_b"
            )
        lines += [
            f'pipeline_parallel_schedule = "{_TORCH[plan.schedule]}"',
            f"pipeline_parallel_microbatch_size = {plan.microbatch}",
        ]
    if plan.chunks > 2:  # 2 stages on a rank are its default for such schedules
        each = _layers_per_stage(model, plan)
        lines.append(f"pipeline_parallel_layers_per_stage = {each}")
    lines += ["", "[activation_checkpoint]", f'mode = "{plan.recompute}"']
    if plan.precision == "fp8":
        lines += ["", "[model]", 'converters = ["quantize.linear.float8"]']
        lines += ["", "[quantize.linear.float8]", 'filter_fqns = ["output"]']
        lines += ["", "[compile]", "enable = true"]  # which fuses the casts to fp8
    return "\n".join(lines)


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
    if plan.ep > 1 and (plan.ep % plan.cp or sharded * plan.cp % plan.ep):
        raise ValueError(
            f"torchtitan cannot run this plan: ep = {plan.ep} is not a multiple of cp = {plan.cp} "
            f"that divides data_parallel_shard_degree x cp = {sharded} x {plan.cp}; choose such an "
            "ep, and ZeRO"
        )
    # Its default, 1, would spread whole experts over tp as well; the plan cuts each of them by tp.
    whole = [f"expert_tensor_parallel_degree = {plan.tp}"] if plan.ep > 1 else []
    return [f"expert_parallel_degree = {plan.ep}", *whole]


def _layers_per_stage(model, plan):
    """Return of how many layers, embedding and output counted, torchtitan makes these stages."""
    stages, counted = plan.pp * plan.chunks, model.layers + 2
    each = -(-counted // stages)
    made = -(-counted // each)
    if made != stages:
        raise ValueError(
            f"torchtitan cannot run this plan: it counts {model.layers} layers, the embedding and "
            f"the output as {counted}, and makes {made} stages of up to {each} of them, not "
            f"pp x chunks = {plan.pp} x {plan.chunks}; choose 2 chunks, or stages that divide "
            f"{counted}"
        )
    return each


def megatron(model: Model, plan: Plan, sequence_length: int, global_batch: int) -> str:
    """Return the arguments of Megatron-LM's `pretrain_gpt.py`.

    Raises:
        ValueError: If Megatron-LM has no argument for the schedule, or cannot cut the model so.

    Source: Megatron-LM, commit 000c4ac, `megatron/training/arguments.py`, with its assertions.
    """
    if plan.pp > 1 and plan.schedule not in ("one_f_one_b", "interleaved"):
        raise ValueError(f"Megatron-LM has no argument for the schedule {plan.schedule!r}")
    _check_heads("Megatron-LM", model, plan)
    words = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--seq-length {sequence_length}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {global_batch}",
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--context-parallel-size {plan.cp}",
    ]
    if model.head_dim * model.heads != model.hidden and not model.latent:
        words.append(f"--kv-channels {model.head_dim}")
    if model.gated:
        words.append("--swiglu")
    if not model.tied:
        words.append("--untie-embeddings-and-output-weights")
    if model.latent:
        query, key, rotary, width, value = model.latent
        words.append("--multi-latent-attention")
        words += [f"--q-lora-rank {query}"] if query else []
        words += [f"--kv-lora-rank {key}", f"--qk-pos-emb-head-dim {rotary}"]
        words += [f"--qk-head-dim {width}", f"--v-head-dim {value}"]
    if model.kv_heads != model.heads:
        words += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.experts:
        words += [f"--num-experts {model.experts}", f"--moe-router-topk {model.top_k}"]
        words.append(f"--moe-ffn-hidden-size {model.expert_ffn}")
        words.append(f"--expert-model-parallel-size {plan.ep}")
    if model.shared_experts:
        shared = model.shared_experts * model.expert_ffn
        words.append(f"--moe-shared-expert-intermediate-size {shared}")
    if model.dense_layers:
        sparse = model.layers - model.dense_layers
        words.append(f"--moe-layer-freq '([0]*{model.dense_layers}+[1]*{sparse})'")
    words += _pipeline(model, plan)
    if plan.sequence_parallel and plan.tp > 1:
        words.append("--sequence-parallel")
    if plan.zero == 1:
        words.append("--use-distributed-optimizer")
    elif plan.zero > 1:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        words += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
    if plan.recompute == "selective":
        words.append("--recompute-granularity selective")
    elif plan.recompute == "full":
        words.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    words.append("--bf16" if plan.precision != "fp32" else "")
    if plan.precision == "fp8":
        words.append("--fp8-format hybrid")
    return " \\\n  ".join(word for word in words if word)


def _pipeline(model, plan):
    """Return the arguments that cut the layers into the plan's stages, as `stages.cut` does."""
    stages = plan.pp * plan.chunks
    # Megatron-LM's stages are equal; the embedding and the loss may count as a layer each.
    counted = next((more for more in (0, 1, 2) if (model.layers + more) % stages == 0), None)
    if counted is None:
        raise ValueError(
            f"Megatron-LM cannot run this plan: pp x chunks = {plan.pp} x {plan.chunks} stages do "
            f"not divide {model.layers} layers, nor {model.layers + 1} or {model.layers + 2} with "
            "the loss and the embedding as layers; choose pp and chunks that divide one of them"
        )
    words = []
    if counted == 2:
        words.append("--account-for-embedding-in-pipeline-split")
    if counted:
        words.append("--account-for-loss-in-pipeline-split")
    if plan.chunks > 1:
        each = (model.layers + counted) // stages
        words.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    return words


def _check_heads(program, model, plan):
    """Raise if tensor parallelism would divide a head of keys and values: both refuse that."""
    if model.kv_heads % plan.tp:
        raise ValueError(
            f"{program} cannot run this plan: kv_heads = {model.kv_heads} is not a multiple of "
            f"tp = {plan.tp}, and each rank needs whole heads of keys and values; choose a tp that "
            f"divides {model.kv_heads}"
        )
