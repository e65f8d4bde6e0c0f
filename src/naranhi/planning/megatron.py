"""Write a plan as arguments of Megatron-LM."""

from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.refusals import check_heads
from naranhi.planning.stages import cut


def megatron(
    model: Model,
    plan: Plan,
    sequence_length: int,
    global_batch: int,
    *,
    deepep: bool = False,
    bf16_gradients: bool = False,
) -> str:
    """Return the arguments of Megatron-LM's `pretrain_gpt.py`.

    If tp or cp is above 1 and ZeRO below 2, Megatron-LM also needs CUDA_DEVICE_MAX_CONNECTIONS=1 in
    the environment, on GPUs before Blackwell.

    The arguments are those that decide how long a step takes and how much memory it needs. Other
    arguments of the model keep Megatron-LM's defaults: the base of rotary positions, epsilons,
    norms of queries and keys, biases of only the q, k, v projection.

    Args:
        model: The model.
        plan: The plan.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        deepep: Whether DeepEP sends tokens to their experts, as the engine "megatron-deepep"
            forecasts; otherwise one all-to-all of all copies does.
        bf16_gradients: Whether gradients of 16-bit parameters are added up and reduced in bf16, as
            the engine "nemo" forecasts; otherwise they are in fp32.

    Raises:
        ValueError: If Megatron-LM has no argument for the schedule, or cannot cut the heads or the
            sequence, or shard the experts, as the plan does.

    Source: Megatron-LM, commit 000c4ac, `megatron/training/arguments.py`, with its assertions.
    """
    if plan.pp > 1 and plan.schedule not in ("one_f_one_b", "interleaved"):
        raise ValueError(
            f"Megatron-LM has no argument for the schedule {plan.schedule!r}; choose one_f_one_b "
            "or interleaved"
        )
    check_heads("Megatron-LM", model, plan)
    if plan.cp > 1 and sequence_length % (2 * plan.cp):
        raise ValueError(
            f"Megatron-LM cannot run this plan: sequence_length = {sequence_length} is not a "
            f"multiple of 2 x cp = {2 * plan.cp}, the pieces of a sequence"
        )
    if model.experts and plan.tp > 1 and not plan.sequence_parallel:
        raise ValueError(
            "Megatron-LM cannot run this plan: with experts and tp it always shards along the "
            "sequence; choose sequence_parallel"
        )
    words = [
        *_architecture(model, sequence_length),
        f"--seq-length {sequence_length}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {global_batch}",
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--context-parallel-size {plan.cp}",
    ]
    if model.experts:
        words.append(f"--expert-model-parallel-size {plan.ep}")
        if plan.etp is not None:
            words.append(f"--expert-tensor-parallel-size {plan.etp}")
        # By default each rank would gather the tokens of all ranks. DeepEP refuses a single one.
        exchanged = deepep and plan.ep * plan.expert_tp > 1
        dispatcher = "flex --moe-flex-dispatcher-backend deepep" if exchanged else "alltoall"
        words.append(f"--moe-token-dispatcher-type {dispatcher}")
        if plan.precision != "fp32" and not model.biases:  # no such kernel for fp32 or biases
            words.append("--moe-grouped-gemm")  # by default it runs one expert after the other
    words += _pipeline(model, plan)
    if plan.sequence_parallel and plan.tp > 1:
        words.append("--sequence-parallel")
        words.append("--tp-comm-overlap")  # off by default; forecasts assume that half overlaps
    words += _data_parallel(plan)
    if plan.recompute == "selective":
        words.append("--recompute-granularity selective")
    elif plan.recompute == "full":
        words.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    if plan.precision != "fp32":
        words.append("--bf16")
        words += ["--grad-reduce-in-bf16"] if bf16_gradients else []
    if plan.precision == "fp8":
        words.append("--fp8-format hybrid")
    return " \\\n  ".join(words)


def _architecture(model, sequence_length):
    """Return the arguments that describe the model, whose defaults are GPT-2's."""
    if 0 < model.positions < sequence_length:
        raise ValueError(
            f"Megatron-LM cannot run this plan: the model has {model.positions} learned positions, "
            f"and a sequence {sequence_length} tokens; choose a shorter sequence"
        )
    words = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--max-position-embeddings {model.positions or sequence_length}",
    ]
    if not model.positions:
        words.append("--position-embedding-type rope")
    if not model.biases:  # a norm that has no bias either
        words += ["--disable-bias-linear", "--normalization RMSNorm"]
    if not model.dropout:
        words.append("--attention-dropout 0 --hidden-dropout 0")
    if model.gated:
        words.append("--swiglu")
    if not model.tied:
        words.append("--untie-embeddings-and-output-weights")
    if model.head_dim * model.heads != model.hidden and not model.latent:
        words.append(f"--kv-channels {model.head_dim}")
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
    if model.shared_experts:
        shared = model.shared_experts * model.expert_ffn
        words.append(f"--moe-shared-expert-intermediate-size {shared}")
    if model.dense_layers:
        sparse = model.layers - model.dense_layers
        words.append(f"--moe-layer-freq '([0]*{model.dense_layers}+[1]*{sparse})'")
    return words


def _pipeline(model, plan):
    """Return the arguments that cut the layers into the plan's stages, as `stages.cut` does."""
    stages = plan.pp * plan.chunks
    # By default stages are equal; the embedding and the loss may count as a layer each.
    counted = next((more for more in (0, 1, 2) if (model.layers + more) % stages == 0), None)
    if counted is None:  # each stage is spelled out: E and L are these two, t is a layer
        layout = "|".join("t" * len(layers) for layers in cut(model, stages).layers)
        return [f"--pipeline-model-parallel-layout 'E{layout}L'"]
    words = []
    if counted == 2:
        words.append("--account-for-embedding-in-pipeline-split")
    if counted:
        words.append("--account-for-loss-in-pipeline-split")
    if plan.chunks > 1:
        each = (model.layers + counted) // stages
        words.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    return words


def _data_parallel(plan):
    """Return the arguments that shard the model state over data parallel ranks."""
    words = []
    if plan.zero == 1:
        words.append("--use-distributed-optimizer")
    elif plan.zero > 1:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        words += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        # What its guide requires (Megatron-FSDP User Guide, "Required Configurations").
        words += ["--use-distributed-optimizer", "--no-gradient-accumulation-fusion"]
        words.append("--ckpt-format fsdp_dtensor")  # the only format allowed here
    if plan.replicas > 1:  # both are off by default; forecasts assume them
        words.append("--overlap-grad-reduce")
        words += ["--overlap-param-gather"] if plan.zero else []
    instances = plan.replicas // plan.zero_group
    if plan.zero and instances > 1:
        if plan.expert_replicas % instances:
            raise ValueError(
                f"Megatron-LM cannot run this plan: the {plan.expert_replicas} ranks that have "
                f"the same experts cannot be divided into {instances} groups (dp x cp / zero_group "
                f"= {plan.replicas} / {plan.zero_group})"
            )
        words.append(f"--num-distributed-optimizer-instances {instances}")
    return words
