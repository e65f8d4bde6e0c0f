"""What is printed for other programs: the same plan, or a sentence that says why not."""

from dataclasses import replace

import pytest

from naranhi.planning import Latent, Model, Plan, commands

LLAMA = Model(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    tied=False,
    vocabulary=128256,
)


def test_commands_say_the_same_plan():
    plan = Plan(4, 2, 2, microbatch=2, zero=1, recompute="full")
    assert "--tensor-model-parallel-size 2" in commands.megatron(LLAMA, plan, 4096, 256)
    assert "--use-distributed-optimizer" in commands.megatron(LLAMA, plan, 4096, 256)
    assert "--num-query-groups 8" in commands.megatron(LLAMA, plan, 4096, 256)
    text = commands.torchtitan(plan, 4096, 256)
    assert "pipeline_parallel_degree = 2" in text
    assert 'pipeline_parallel_schedule = "1F1B"' in text
    assert "local_batch_size = 64" in text  # 256 sequences over dp = 4
    with pytest.raises(ValueError, match=r"cannot run this plan: it has no ZeRO-1"):
        commands.naranhi_train(LLAMA, plan, 256)
    with pytest.raises(ValueError, match=r"cannot run this plan: a rank has 2 chunks of it"):
        commands.naranhi_train(LLAMA, replace(plan, zero=0, chunks=2, schedule="interleaved"), 256)
    with pytest.raises(ValueError, match="Megatron-LM has no argument for the schedule"):
        commands.megatron(LLAMA, replace(plan, schedule="gpipe"), 4096, 256)


def test_naranhi_train_knows_the_command_that_is_written():
    from naranhi.train import cli

    line = commands.naranhi_train(LLAMA, Plan(2, 2, 2, microbatch=2), 32)
    assert line.startswith("torchrun --nproc-per-node 8 -m naranhi.train ")
    options = cli.parse(line.split("naranhi.train ")[1].split())
    assert (options.dp, options.tp, options.pp, options.microbatches) == (2, 2, 2, 8)
    assert (options.batch, options.sequence_parallel) == (32, True)
    experts = replace(LLAMA, experts=8, top_k=2)
    line = commands.naranhi_train(experts, Plan(4, ep=2, cp=2, microbatch=2), 32)
    options = cli.parse(line.split("naranhi.train ")[1].split())
    assert (options.dp, options.ep, options.cp) == (2, 2, 2)
    assert (options.experts, options.top_k) == (8, 2)
    with pytest.raises(ValueError, match="4 ranks, which do not divide the 2 that share the batch"):
        commands.naranhi_train(experts, Plan(2, ep=4, cp=2), 32)


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
    assert '"ZBVZeroBubble"' in commands.torchtitan(plan, 4096, 256)
    with pytest.raises(ValueError, match="Megatron-LM has no argument for the schedule"):
        commands.megatron(LLAMA, plan, 4096, 256)
