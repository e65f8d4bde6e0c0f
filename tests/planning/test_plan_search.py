"""Searching: only plans that fit, the fastest first, and why."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from naranhi.planning import (
    Cluster,
    Latent,
    Model,
    Plan,
    PlanError,
    commands,
    explain,
    predict,
    search,
)
from naranhi.planning.cli import main
from naranhi.planning.plan_search import MARGIN, plans

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
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.fixture(scope="module")
def found():
    return search(LLAMA, Cluster(64), 4096, 256)


def test_the_first_plan_is_the_fastest_of_all_that_fit(found):
    """Against every plan, each forecast exactly, by a loop of one's own."""
    best, count = None, 0
    for plan in plans(LLAMA, Cluster(64), 4096):
        try:
            forecast = predict(LLAMA, Cluster(64), plan, 4096, 256)
        except PlanError:
            continue
        count += 1
        if forecast.fits_with(MARGIN) and (best is None or forecast.step_seconds < best):
            best = forecast.step_seconds
    assert count == found.tried
    assert found[0][1].step_seconds == best


def test_what_is_found_fits_in_order_and_is_what_predict_says(found):
    assert len(found) == 20
    seconds = [forecast.step_seconds for _, forecast in found.plans]
    assert seconds == sorted(seconds)
    for plan, forecast in found.plans:
        assert forecast.fits_with(MARGIN)
        assert plan.ranks == 64
        assert forecast == predict(LLAMA, Cluster(64), plan, 4096, 256)


def test_a_margin_leaves_more_room():
    model = replace(LLAMA, layers=64)
    tight = search(model, Cluster(16), 4096, 64, margin=0.0)
    loose = search(model, Cluster(16), 4096, 64, margin=0.3)
    assert loose[0][1].memory_bytes <= 0.7 * loose[0][1].capacity
    assert tight[0][1].step_seconds <= loose[0][1].step_seconds


def test_experts_and_long_sequences_get_their_axes():
    experts = replace(LLAMA, experts=8, top_k=2)
    assert {plan.ep for plan in plans(experts, Cluster(16), 4096)} == {1, 2, 4, 8}
    assert {plan.cp for plan in plans(LLAMA, Cluster(16), 32768)} == {1, 2, 4, 8}
    assert {plan.cp for plan in plans(LLAMA, Cluster(16), 4096)} == {1}


def test_where_nothing_fits_it_says_what_lacks_least():
    found = search(replace(LLAMA, layers=320), Cluster(8), 4096, 8)
    assert not len(found) and not found.nearest[1].fits
    text = explain(found)
    assert text.startswith(f"None of {found.tried} plans fits. The one that needs least memory is ")
    assert "does not fit, by " in text


def test_a_batch_that_no_plan_divides_is_refused():
    with pytest.raises(PlanError, match="no plan divides this model, cluster and batch; the last"):
        search(replace(LLAMA, layers=1, heads=1, kv_heads=1), Cluster(64), 4096, 7)


def test_an_explanation_names_each_second_and_the_next_best(found):
    text = explain(found)
    plan, forecast = found[0]
    for name in forecast.parts:
        assert f"  {name}: " in text
    assert f"the fastest of the {found.fitting} plans that fit; {found.tried} were tried" in text
    assert len(found) < found.fitting < found.tried
    assert "The next best, " in text
    assert "The next best" not in explain(found, len(found) - 1)
    assert f"number {len(found)} of " in explain(found, len(found) - 1)
    assert f"{forecast.memory_bytes / 2**30:.1f} GiB of" in text
    if plan.pp > 1:
        assert f"pp {plan.pp}: each GPU has" in text


def test_an_explanation_says_what_was_never_calibrated():
    text = explain(search(LLAMA, Cluster(16, gpu="B200"), 4096, 64))
    assert "No published run of megatron on B200 calibrates this" in text
    assert "No published run" not in explain(search(LLAMA, Cluster(16), 4096, 64))


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


def test_the_command_line_prints_the_plans(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--gpus", "16", "--sequence", "4096", "--batch", "64"]
    assert main([*arguments, "--best", "3"]) == 0
    text = capsys.readouterr().out
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 4 and table[0].split()[:3] == ["step", "low", "high"]
    assert "Megatron-LM:\n--num-layers 32" in text and "torchtitan:\n[training]" in text


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--sequence", "4096", "--batch", "64", "--gpus"]
    assert main([*arguments, "12"]) == 2
    assert "12 GPUs are not whole nodes of 8" in capsys.readouterr().out
    assert main([*arguments, "1"]) == 1
    assert "plans fits. The one that needs least memory" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--gpus", "8"])
    assert ended.value.code == 2
    assert "the following arguments are required: --model" in capsys.readouterr().err


def test_it_runs_without_torch_and_numpy(tmp_path):
    """As a module of its own, with both made impossible to import."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    script = (
        "import sys, runpy; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "runpy.run_module('naranhi.planning', run_name='__main__', alter_sys=True)"
    )
    arguments = f"--model {tmp_path} --gpus 8 --gpu H200 --sequence 4096 --batch 64".split()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "MFU" in done.stdout


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


def test_a_search_refuses_arguments_of_another_class():
    with pytest.raises(TypeError, match="cluster is a Cluster, such as"):
        search(Model(2, 128, 2), 8, 128, 8)
    with pytest.raises(TypeError, match="model is a Model, such as"):
        search("llama", Cluster(8), 128, 8)
