"""What is printed for other programs: the same plan, or a sentence that says why not."""

import contextlib
import math
import shlex
import tomllib
from dataclasses import replace

import pytest
from llama import LLAMA

from naranhi.planning import Cluster, Latent, Model, Plan, commands, search
from naranhi.planning.cli import written
from naranhi.planning.stages import cut


def test_commands_say_the_same_plan():
    plan = Plan(4, 2, 2, microbatch=2, zero=1, recompute="full")
    assert "--tensor-model-parallel-size 2" in commands.megatron(LLAMA, plan, 4096, 256)
    assert "--use-distributed-optimizer" in commands.megatron(LLAMA, plan, 4096, 256)
    assert "--num-query-groups 8" in commands.megatron(LLAMA, plan, 4096, 256)
    text = commands.torchtitan(LLAMA, plan, 4096, 256)
    assert "pipeline_parallel_degree = 2" in text
    assert 'pipeline_parallel_schedule = "1F1B"' in text
    assert "local_batch_size = 64" in text  # 256 sequences over dp = 4
    assert "--dp 4 --tp 2 --pp 2" in commands.naranhi_train(LLAMA, plan, 256)
    with pytest.raises(ValueError, match="Megatron-LM has no argument for the schedule"):
        commands.megatron(LLAMA, replace(plan, schedule="gpipe"), 4096, 256)


def test_naranhi_train_knows_the_command_that_is_written():
    from naranhi.train import cli

    line = commands.naranhi_train(LLAMA, Plan(2, 2, 2, microbatch=2, precision="fp32"), 32)
    assert line.startswith("torchrun --nproc-per-node 8 -m naranhi.train ")
    options = cli.parse(line.split("naranhi.train ")[1].split())
    assert (options.dp, options.tp, options.pp, options.microbatches) == (2, 2, 2, 8)
    assert (options.batch, options.sequence_parallel) == (32, True)
    experts = replace(LLAMA, experts=8, top_k=2)
    line = commands.naranhi_train(
        experts, Plan(4, ep=2, cp=2, microbatch=2, zero=1, precision="fp32"), 32
    )
    options = cli.parse(line.split("naranhi.train ")[1].split())
    assert (options.dp, options.ep, options.cp) == (2, 2, 2)
    assert (options.experts, options.top_k, options.zero) == (8, 2, 1)
    with pytest.raises(ValueError, match="ep = 4 has to divide dp = 2, the ranks that share"):
        commands.naranhi_train(experts, Plan(2, ep=4, cp=2), 32)


def test_naranhi_train_is_told_of_the_models_sizes():
    from naranhi.train import cli

    line = commands.naranhi_train(LLAMA, Plan(2, tp=2), 32, config="my models/config.json")
    options = cli.parse(shlex.split(line.split("naranhi.train ")[1]))
    assert (options.config, options.model, options.tp) == ("my models/config.json", None, 2)
    experts = replace(LLAMA, experts=8, top_k=2)
    line = commands.naranhi_train(experts, Plan(4, ep=4), 32, config="config.json")
    options = cli.parse(shlex.split(line.split("naranhi.train ")[1]))  # which has the experts
    assert (options.dp, options.ep, options.experts, options.top_k) == (1, 4, None, None)
    commands.naranhi_train(LLAMA, Plan(1, tp=16), 32)  # a GPT-2 of its own
    with pytest.raises(ValueError, match="kv_heads = 8 is not a multiple of tp = 16"):
        commands.naranhi_train(LLAMA, Plan(1, tp=16), 32, config="config.json")
    commands.naranhi_train(LLAMA, Plan(1, cp=8), 32)
    experts = replace(LLAMA, experts=4, top_k=2)
    for cp, tp, fits in (4, 1, True), (2, 4, True), (8, 1, False), (4, 4, False), (1, 16, False):
        refused = pytest.raises(ValueError, match=f"divide 8; here they are {2 * cp} and {cp * tp}")
        with contextlib.nullcontext() if fits else refused:
            commands.naranhi_train(experts, Plan(1, cp=cp, tp=tp, etp=1), 32)


@pytest.mark.parametrize(
    ("plan", "tied", "told"),
    [
        (Plan(4, zero=1), True, (1, None, False, True)),
        (Plan(2, zero=2, precision="fp32"), True, (2, None, False, False)),
        (Plan(2, pp=2, zero=3), True, (3, None, True, True)),
        (Plan(2, pp=2, chunks=4, schedule="interleaved"), True, (0, 4, False, True)),
        (Plan(1, pp=2, schedule="zero_bubble_v"), False, (0, None, True, True)),
        (Plan(1, zero=1), True, (0, None, False, True)),  # nothing to shard over
        (Plan(1, cp=2, zero=1), True, (1, None, False, True)),
    ],
)
def test_naranhi_train_is_told_of_shards_chunks_and_precision(plan, tied, told):
    from naranhi.train import cli

    line = commands.naranhi_train(replace(LLAMA, tied=tied), plan, 32)
    options = cli.parse(line.split("naranhi.train ")[1].split())
    assert (options.zero, options.chunks, options.untied, options.bf16) == told
    assert options.schedule == plan.schedule


def test_megatron_is_told_the_shape_of_latent_attention_and_of_experts():
    model = Model(
        layers=4, hidden=1024, heads=8, head_dim=128, ffn=4096, gated=True, tied=False, experts=8,
        top_k=2, expert_ffn=512, shared_experts=2, dense_layers=1,
        latent=Latent(768, 256, 64, 128, 128),
    )  # fmt: skip
    text = commands.megatron(model, Plan(8, ep=4), 4096, 8)
    for words in (
        "--multi-latent-attention", "--q-lora-rank 768", "--kv-lora-rank 256", "--qk-head-dim 128",
        "--qk-pos-emb-head-dim 64", "--v-head-dim 128", "--num-experts 8", "--swiglu",
        "--moe-ffn-hidden-size 512", "--moe-shared-expert-intermediate-size 1024",
        "--moe-layer-freq '([0]*1+[1]*3)'", "--untie-embeddings-and-output-weights",
        "--expert-model-parallel-size 4",
    ):  # fmt: skip
        assert words in text, words
    assert "--swiglu" not in commands.megatron(Model(2, 64, 2), Plan(1), 64, 1)


def test_torchtitan_is_told_the_name_of_a_v():
    plan = Plan(2, 2, 2, schedule="zero_bubble_v", zero=1)
    assert '"ZBVZeroBubble"' in commands.torchtitan(LLAMA, plan, 4096, 256)
    with pytest.raises(ValueError, match="Megatron-LM has no argument for the schedule"):
        commands.megatron(LLAMA, plan, 4096, 256)


def test_megatron_counts_embedding_and_loss_where_only_then_the_stages_are_equal():
    """Its commit 000c4ac asserts that stages divide the layers: of Llama 3.1's 126, 16 do not."""
    llama = replace(LLAMA, layers=126, hidden=16384, heads=128, ffn=53248)
    plan = Plan(4, 8, 16, 2, chunks=4, schedule="interleaved", zero=1)
    embedding, loss = (f"--account-for-{what}-in-pipeline-split" for what in ("embedding", "loss"))
    text = commands.megatron(llama, plan, 8192, 256)
    assert embedding in text and loss in text
    assert "--num-layers-per-virtual-pipeline-stage 2" in text  # 128 over 16 x 4
    text = commands.megatron(replace(llama, layers=128), plan, 8192, 256)
    assert "--account-for" not in text and "pipeline-stage 2" in text
    text = commands.megatron(replace(llama, layers=127), plan, 8192, 256)
    assert loss in text and embedding not in text and "pipeline-stage 2" in text
    assert "--account-for" not in commands.megatron(llama, Plan(8), 8192, 256)


@pytest.mark.parametrize("layers, pp, chunks", [(80, 3, 4), (32, 5, 1), (61, 16, 1), (61, 8, 4)])
def test_megatron_is_told_each_layer_of_stages_that_are_unequal(layers, pp, chunks):
    """One string: stages in the order of the layers, which its vpp x pp parts are dealt out in
    (`megatron/core/transformer/pipeline_parallel_layer_layout.py`)."""
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    plan, model = Plan(4, 4, pp, chunks=chunks, schedule=schedule), replace(LLAMA, layers=layers)
    text = commands.megatron(model, plan, 4096, 192)
    layout = text.split("--pipeline-model-parallel-layout ")[1].split()[0]
    assert layout[:2] == "'E" and layout[-2:] == "L'"
    stages = layout[2:-2].split("|")
    assert [len(stage) for stage in stages] == [len(own) for own in cut(model, pp * chunks).layers]
    assert {*"".join(stages)} == {"t"} and len(stages) == pp * chunks
    assert "--num-layers-per-virtual" not in text and "--account-for" not in text


@pytest.mark.parametrize("engine, told", [("nemo", True), ("megatron", False)])
def test_megatron_adds_gradients_up_as_the_forecast_does(engine, told):
    for precision, holds in ("bf16", told), ("fp32", False):
        found = search(LLAMA, Cluster(8, engine=engine), 4096, 64, best=1, precision=precision)
        assert ("--grad-reduce-in-bf16" in written(found)["Megatron-LM"]) == holds


def test_torchtitan_has_no_tied_embeddings_in_a_pipeline_and_no_compiled_v():
    tied = replace(LLAMA, tied=True)
    assert commands.torchtitan(tied, Plan(8, zero=3), 4096, 64)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* tie the embedding .* pp = 1"):
        commands.torchtitan(tied, Plan(4, pp=2, zero=1), 4096, 64)
    v = Plan(4, pp=2, zero=1, schedule="zero_bubble_v")
    assert commands.torchtitan(LLAMA, v, 4096, 64)
    assert commands.torchtitan(LLAMA, Plan(4, pp=2, zero=1, precision="fp8"), 4096, 64)
    for changed, more in (replace(v, precision="fp8"), {}), (v, {"compiled": True}):
        with pytest.raises(ValueError, match=r"torchtitan cannot run .* ZBVZeroBubble refuses c"):
            commands.torchtitan(LLAMA, changed, 4096, 64, **more)


@pytest.mark.parametrize("engine, compiled", [("fsdp", False), ("fsdp-compile", True)])
def test_torchtitan_compiles_as_the_forecast_does(engine, compiled):
    found = search(LLAMA, Cluster(8, engine=engine), 4096, 64, best=1)
    assert ("[compile]" in written(found)["torchtitan"]) == compiled


def test_torchtitan_has_no_1f1b_with_fewer_micro_batches_than_stages():
    plan = Plan(2, pp=8, zero=1)
    assert "1F1B" in commands.torchtitan(LLAMA, plan, 4096, 16)
    with pytest.raises(ValueError, match=r"torch's 1F1B needs .*, and the plan has 4 for pp = 8"):
        commands.torchtitan(LLAMA, plan, 4096, 8)


@pytest.mark.parametrize("layers", [14, 15, 16, 22, 23, 24, 126])
def test_megatron_cuts_as_the_forecast_does(layers):
    """An equal share of what is counted, less the embedding first and the loss last."""
    model, plan = replace(LLAMA, layers=layers), Plan(1, 1, 4, chunks=2, schedule="interleaved")
    text = commands.megatron(model, plan, 4096, 8)
    each = int(text.split("--num-layers-per-virtual-pipeline-stage ")[1].split()[0])
    counts = [each] * 8
    counts[0] -= "--account-for-embedding" in text
    counts[-1] -= "--account-for-loss" in text
    assert counts == [len(numbers) for numbers in cut(model, 8).layers]


@pytest.mark.parametrize("program", ["torchtitan", "Megatron-LM"])
def test_a_head_of_keys_and_values_is_not_divided(program):
    write = {"torchtitan": commands.torchtitan, "Megatron-LM": commands.megatron}[program]
    grouped = replace(LLAMA, heads=16, kv_heads=2)  # as Qwen2.5 3B has it
    with pytest.raises(ValueError, match=f"{program} cannot run .* kv_heads = 2 is not .* tp = 4"):
        write(grouped, Plan(2, 4, zero=1), 4096, 32)
    assert write(grouped, Plan(4, 2, zero=1), 4096, 32)


@pytest.mark.parametrize(
    "layers, pp, chunks, told",
    [(126, 16, 4, (2, 1, 1)), (126, 16, 8, (1, 1, 1)), (80, 4, 4, (5, 0, 0)), (79, 4, 4, (5, 0, 1)),
     (80, 3, 4, (7, 1, 0))],
)  # fmt: skip
def test_torchtitan_is_told_of_more_chunks_than_it_makes_by_itself(layers, pp, chunks, told):
    """Its 0.2 makes ceil(layers / layers_per_stage) stages, with both ends counted as told."""
    plan = Plan(4, 8, pp, chunks=chunks, schedule="interleaved", zero=1)
    text = commands.torchtitan(replace(LLAMA, layers=layers), plan, 8192, 384)
    config = tomllib.loads(text)["parallelism"]
    names = ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
    assert tuple(config[f"pipeline_parallel_{name}"] for name in names) == told
    assert math.ceil((layers + told[1] + told[2]) / told[0]) == pp * chunks


@pytest.mark.parametrize("layers", [8, 9, 13, 14, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("pp, chunks", [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_torchtitan_cuts_as_the_forecast_does(layers, pp, chunks):
    """An equal share of what is counted, the first ones one more; less what both ends count as."""
    model = replace(LLAMA, layers=layers)
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    plan = Plan(2, pp=pp, chunks=chunks, schedule=schedule, zero=3)
    config = tomllib.loads(commands.torchtitan(model, plan, 4096, 32))["parallelism"]
    assert "pipeline_parallel_layers_per_stage" not in config
    first, last = (
        config[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")
    )
    each, more = divmod(layers + first + last, pp * chunks)
    counts = [each + (stage < more) for stage in range(pp * chunks)]
    counts[0] -= first
    counts[-1] -= last
    assert each >= max(first, last)  # or it refuses
    assert counts == [len(numbers) for numbers in cut(model, pp * chunks).layers]


@pytest.mark.parametrize("zero, told", [(0, False), (1, True), (2, True), (3, False)])
def test_torchtitan_says_where_fsdp_does_more_than_the_plan(zero, told):
    text = commands.torchtitan(LLAMA, Plan(8, zero=zero), 4096, 64)
    assert (f"# torchtitan has no ZeRO-{zero}: FSDP also shards" in text) == told
    assert tomllib.loads(text)
    in_a_pipeline = commands.torchtitan(LLAMA, Plan(4, pp=2, zero=1), 4096, 64)
    assert "#" not in in_a_pipeline  # where it reduces once a step as well


def test_a_ring_cuts_a_sequence_into_two_pieces_for_each_rank():
    plan = Plan(1, 2, cp=4, zero=3)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* 4104 .* 2 x cp x tp = 16, t"):
        commands.torchtitan(LLAMA, plan, 4104, 8)
    with pytest.raises(ValueError, match=r"Megatron-LM cannot run .* 4100 .* 2 x cp = 8, the"):
        commands.megatron(LLAMA, plan, 4100, 8)
    assert commands.torchtitan(LLAMA, plan, 4112, 8) and commands.megatron(LLAMA, plan, 4104, 8)


def test_megatron_sends_tokens_to_experts_as_the_forecast_does():
    """Its default has each rank gather the tokens of all; and with tp it shards along sequences."""
    experts = replace(LLAMA, experts=8, top_k=2)
    text = commands.megatron(experts, Plan(4, 2, ep=4), 4096, 64)
    assert "--moe-token-dispatcher-type alltoall" in text and "--moe-grouped-gemm" in text
    text = commands.megatron(experts, Plan(4, 2, ep=4), 4096, 64, deepep=True)
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep" in text
    text = commands.megatron(experts, Plan(8), 4096, 64, deepep=True)  # which DeepEP refuses
    assert "--moe-token-dispatcher-type alltoall" in text
    for engine, dispatcher in {"megatron": "alltoall", "megatron-deepep": "flex"}.items():
        found = search(experts, Cluster(64, engine=engine), 4096, 64)
        assert f"--moe-token-dispatcher-type {dispatcher}" in written(found)["Megatron-LM"]
    assert "dispatcher" not in commands.megatron(LLAMA, Plan(4, 2), 4096, 64)
    with pytest.raises(ValueError, match=r"Megatron-LM cannot run .* choose sequence_parallel"):
        commands.megatron(experts, Plan(4, 2, ep=4, sequence_parallel=False), 4096, 64)


@pytest.mark.parametrize("zero, words", [(2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_fsdp_is_told_what_it_requires(zero, words):
    words = f"--use-megatron-fsdp --data-parallel-sharding-strategy {words}"
    words += " --use-distributed-optimizer --no-gradient-accumulation-fusion"
    text = commands.megatron(LLAMA, Plan(8, zero=zero), 4096, 64).replace(" \\\n ", "")
    assert words in text


def test_torchtitan_makes_two_chunks_by_itself_and_not_every_number():
    model = replace(LLAMA, layers=76)
    plan = Plan(4, 8, 16, chunks=2, schedule="interleaved", zero=1)
    assert "layers_per_stage" not in commands.torchtitan(model, plan, 8192, 256)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* it makes 39 stages"):
        commands.torchtitan(model, replace(plan, chunks=4), 8192, 256)
    with pytest.raises(ValueError, match=r"at least 2 chunks on a rank, and the plan 1"):
        commands.torchtitan(model, replace(plan, chunks=1), 8192, 256)


def test_torchtitan_is_told_the_precision():
    text = commands.torchtitan(LLAMA, Plan(8, zero=3, precision="fp32"), 4096, 64)
    training = tomllib.loads(text)["training"]
    assert training["mixed_precision_param"] == "float32"
    config = tomllib.loads(commands.torchtitan(LLAMA, Plan(8, zero=3, precision="fp8"), 4096, 64))
    assert config["model"]["converters"] == ["quantize.linear.float8"]
    assert config["quantize"]["linear"]["float8"]["filter_fqns"] == ["output"]
    assert config["compile"]["enable"] is True
    text = commands.torchtitan(LLAMA, Plan(8, zero=3), 4096, 64)
    assert "float" not in text and "compile" not in text  # bf16 is its default
    experts = replace(LLAMA, experts=8, top_k=2)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* experts' weights"):
        commands.torchtitan(experts, Plan(8, zero=3, precision="fp8"), 4096, 64)


@pytest.mark.parametrize("plan", [Plan(1, 2), Plan(1, 1, 2), Plan(2, 2, precision="fp32")])
def test_torchtitan_computes_in_bf16_beside_tp_and_pp_only_with_fsdp(plan):
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* only with FSDP"):
        commands.torchtitan(LLAMA, plan, 4096, 64)
    for fits in (
        Plan(1, 2, precision="fp32"),
        Plan(2),
        Plan(2, 2, zero=1),
        Plan(1, 2, cp=2, zero=1),
    ):
        assert commands.torchtitan(LLAMA, fits, 4096, 64)


def test_torchtitan_divides_experts_only_as_it_asserts():
    """Its parallel_dims.py: ep % cp == 0 and (dp_shard * cp) % ep == 0, if etp is tp."""
    experts = replace(LLAMA, experts=16, top_k=2)
    text = commands.torchtitan(experts, Plan(4, 2, cp=2, ep=8, zero=1), 16384, 64)
    assert "expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 2" in text
    assert "expert_tensor" not in commands.torchtitan(experts, Plan(4, 2, zero=1), 16384, 64)
    for plan in (Plan(4, cp=16, ep=8, zero=1), Plan(8, ep=8)):
        with pytest.raises(ValueError, match=r"torchtitan cannot run .* ep = 8 is not a multiple"):
            commands.torchtitan(experts, plan, 65536, 64)


def test_sharding_over_some_of_the_replicas_is_said():
    plan = Plan(16, cp=2, zero=3, zero_group=8)
    text = commands.torchtitan(LLAMA, plan, 16384, 64)
    assert "replicate_degree = 4" in text and "shard_degree = 4" in text  # 4 x cp are a group
    text = commands.megatron(LLAMA, plan, 16384, 64)
    assert "--num-distributed-optimizer-instances 4" in text
    whole = replace(plan, zero_group=32)
    assert "replicate_degree = 1\ndata_parallel_shard_degree = 16" in commands.torchtitan(
        LLAMA, whole, 16384, 64
    )
    assert "instances" not in commands.megatron(LLAMA, whole, 16384, 64)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* zero_group = 1 is not one"):
        commands.torchtitan(LLAMA, replace(plan, zero_group=1), 16384, 64)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* the plan has no ZeRO"):
        commands.torchtitan(LLAMA, Plan(16, cp=2), 16384, 64)
    experts = replace(LLAMA, experts=16, top_k=2)
    with pytest.raises(ValueError, match=r"Megatron-LM cannot run .* the 2 ranks .* 4 groups"):
        commands.megatron(experts, replace(plan, ep=16), 16384, 64)


def test_naranhi_train_is_told_of_recomputation_and_nodes():
    from torch.distributed.run import get_args_parser

    from naranhi.train import cli

    plan = Plan(4, 2, 4, precision="fp32", recompute="full")
    line = commands.naranhi_train(LLAMA, plan, 32, gpus_per_node=8)
    launcher = get_args_parser().parse_args(line.split()[1:])
    assert (launcher.nnodes, launcher.nproc_per_node) == ("4", "8")
    assert (launcher.rdzv_backend, launcher.rdzv_endpoint) == ("c10d", "FIRST_NODE:29500")
    assert launcher.training_script == "naranhi.train" and launcher.module
    options = cli.parse(launcher.training_script_args)
    assert options.recompute and (options.dp, options.tp, options.pp) == (4, 2, 4)
    line = commands.naranhi_train(LLAMA, replace(plan, recompute="none"), 32, gpus_per_node=64)
    assert line.startswith("torchrun --nproc-per-node 32 -m ") and "--recompute" not in line


def test_naranhi_train_refuses_what_it_cannot_compute():
    experts = replace(LLAMA, experts=8, top_k=2)
    for model, plan, words in (
        (LLAMA, Plan(2, precision="fp8"), "it computes in bf16 or fp32, not in fp8"),
        (LLAMA, Plan(4, zero=1, zero_group=2), "over all 4 ranks of dp x cp, not over 2 of them"),
        (LLAMA, Plan(4, zero=3), "gathers a whole stage for a step, and the plan's gathers layer"),
        (experts, Plan(4, ep=2, zero=1, zero_group=2), "over all 4 ranks of dp x cp, not over 2"),
    ):
        with pytest.raises(ValueError, match=f"naranhi.train cannot run this plan: .*{words}"):
            commands.naranhi_train(model, plan, 32)
    with pytest.raises(ValueError, match="it recomputes whole blocks or nothing; choose full"):
        commands.naranhi_train(LLAMA, Plan(2, recompute="selective"), 32)


def test_the_command_line_starts_the_nodes_of_the_cluster():
    found = search(Model(4, 256, 4), Cluster(16), 1024, 16, precision="fp32", best=20)
    plain = next(n for n, (plan, _) in enumerate(found.plans) if not plan.zero and plan.chunks == 1)
    text = written(replace(found, plans=found.plans[plain:]))["naranhi.train"]
    assert text.startswith("torchrun --nnodes 2 --nproc-per-node 8 ")


def test_megatron_overlaps_what_the_forecast_overlaps():
    reduce, gather = "--overlap-grad-reduce", "--overlap-param-gather"
    for plan, told in (
        (Plan(8, zero=1), {reduce, gather}),
        (Plan(1, cp=8, zero=1), {reduce, gather}),
        (Plan(8), {reduce}),
        (Plan(1, 8), set()),
    ):
        words = set(commands.megatron(LLAMA, plan, 4096, 64).split())
        assert words & {reduce, gather} == told
    text = commands.megatron(LLAMA, Plan(8, zero=3), 4096, 64)
    assert gather in text and "--ckpt-format fsdp_dtensor" in text


def test_megatron_is_told_what_differs_from_gpt_2():
    rotary = (
        "--swiglu", "--normalization RMSNorm", "--position-embedding-type rope",
        "--disable-bias-linear", "--untie-embeddings-and-output-weights",
        "--group-query-attention", "--num-query-groups 8",
        "--attention-dropout 0 --hidden-dropout 0",
    )  # fmt: skip
    text = commands.megatron(LLAMA, Plan(8), 4096, 64)
    assert "--max-position-embeddings 4096 " in text
    gpt2 = Model(12, 768, 12, positions=1024, biases=True, dropout=True)
    plain = commands.megatron(gpt2, Plan(8), 512, 64)
    assert "--max-position-embeddings 1024 " in plain
    for words in rotary:
        assert words in text and words.split()[0] not in plain
    with pytest.raises(ValueError, match=r"Megatron-LM cannot run .* 1024 learned positions"):
        commands.megatron(gpt2, Plan(8), 2048, 64)


def test_torchtitan_is_told_which_selection_and_has_no_tp_without_sequence_parallelism():
    selective = commands.torchtitan(LLAMA, Plan(8, zero=3, recompute="selective"), 4096, 64)
    assert 'mode = "selective"\nselective_ac_option = "op"' in selective
    assert "option" not in commands.torchtitan(LLAMA, Plan(8, zero=3, recompute="full"), 4096, 64)
    with pytest.raises(ValueError, match=r"torchtitan cannot run .* norms along the sequence"):
        commands.torchtitan(LLAMA, Plan(4, 2, zero=1, sequence_parallel=False), 4096, 64)
