"""Searching: only plans that fit, the fastest first, and why."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from llama import LLAMA

from naranhi.planning import (
    Cluster,
    Layer,
    Line,
    Machine,
    Model,
    Plan,
    PlanError,
    explain,
    predict,
    search,
)
from naranhi.planning.cli import in_its_engine, main
from naranhi.planning.plan_search import MARGIN, Found, plans

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


def test_no_plan_splits_a_head_of_keys_and_values():
    few = replace(LLAMA, kv_heads=2)
    assert {plan.tp for plan in plans(few, Cluster(64), 4096)} == {1, 2}


def test_stages_of_the_embedding_or_of_the_loss_alone_are_tried():
    """`predict` takes them, as Megatron-LM does: 16 stages of 14 layers, but not of 13."""
    for layers, most in (13, 8), (14, 16):
        tried = plans(replace(LLAMA, layers=layers), Cluster(8), 4096)
        assert max(plan.pp * plan.chunks for plan in tried) == most


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
    none = f"None of {found.tried} plans fits and leaves 5% free."
    assert text.startswith(f"{none} The one that needs least memory is ")
    assert ", which does not fit, by " in text


def test_where_all_plans_fit_too_closely_it_says_what_margin_they_had_to_leave():
    cluster = Cluster(1, gpu="H200")
    found = search(replace(LLAMA, layers=28), cluster, 2048, 8)
    assert not len(found) and found.nearest[1].fits
    text = explain(found)
    assert "plans fits and leaves 5% free." in text and ", which fits: each rank holds" in text
    assert len(search(found.model, cluster, 2048, 8, margin=0.0))


def test_a_batch_that_no_plan_divides_is_refused():
    with pytest.raises(PlanError, match=r"no plan is possible .* batch; the last one tried"):
        search(replace(LLAMA, layers=1, heads=1, kv_heads=1), Cluster(64), 4096, 7)


def test_an_explanation_names_each_second_and_the_next_best(found):
    text = explain(found)
    _, forecast = found[0]
    for name in forecast.parts:
        assert f"  {name}: " in text
    assert f"the fastest of the {found.fitting} plans that fit; {found.tried} were tried" in text
    assert len(found) < found.fitting < found.tried
    assert "The next best, " in text
    assert "The next best" not in explain(found, len(found) - 1)
    assert f"number {len(found)} of " in explain(found, len(found) - 1)
    assert f"{forecast.memory_bytes / 2**30:.1f} GiB of" in text


def test_an_explanation_says_what_a_stage_has():
    plan = Plan(2, 2, 4)
    forecast = predict(LLAMA, Cluster(16), plan, 4096, 64)
    text = explain(Found(LLAMA, Cluster(16), 4096, 64, ((plan, forecast),), 1, 1))
    assert "pp 4: each GPU has" in text


def test_an_explanation_claims_of_no_degree_what_it_does_not_know():
    plan = Plan(8, 8, recompute="full")
    forecast = predict(LLAMA, Cluster(64), plan, 4096, 64)
    text = explain(Found(LLAMA, Cluster(64), 4096, 64, ((plan, forecast),), 1, 1))
    assert "full recomputation: a backward computes again" in text and "or be slower" not in text
    assert "tp 8: each layer's weights and activations are on 8 neighbouring GPUs" in text


def test_an_explanation_says_what_was_never_calibrated():
    text = explain(search(LLAMA, Cluster(16, gpu="B200"), 4096, 64))
    assert "No published run of megatron on B200 calibrates this" in text
    assert "No published run" not in explain(search(LLAMA, Cluster(16), 4096, 64))


def test_the_command_line_prints_the_plans(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--gpus", "16", "--sequence", "4096", "--batch", "64"]
    assert main([*arguments, "--best", "3"]) == 0
    text = capsys.readouterr().out
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 4 and table[0].split()[:3] == ["step", "low", "high"]
    assert "Megatron-LM:\n--num-layers 32" in text and "\n[training]\n" in text
    assert "torchtitan:\n# torchtitan has no ZeRO-1" in text
    assert "Add what else your model has: --rotary-base, " in text.split("Megatron-LM:\n")[1]
    command = text.split("naranhi.train:\n")[1].partition("\n")[0]
    assert " --zero 1 " in command and " --bf16 " in command


def test_the_command_line_knows_which_models_naranhi_train_has(tmp_path, capsys):
    mixture = {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | mixture | sizes))
    arguments = ["--model", str(tmp_path), "--gpus", "16", "--sequence", "4096", "--batch", "64"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    command = text.split("naranhi.train:\n")[1].partition("\n")[0]
    assert command.startswith("naranhi.train cannot run this model; it has gpt2, ")


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--sequence", "4096", "--batch", "64", "--gpus"]
    assert main([*arguments, "12"]) == 2
    assert "12 GPUs are not whole nodes of 8" in capsys.readouterr().out
    assert main([*arguments, "1"]) == 1
    assert "plans fits and leaves 5% free. The one" in capsys.readouterr().out
    for size, words in (
        (
            {"num_hidden_layers": 10**12},
            "layers = 1000000000000 cannot be right: it is at most 16,384",
        ),
        ({"vocab_size": 10**400}, "cannot be right: it is at most"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | size))
        assert main([*arguments, "8"]) == 2
        assert words in capsys.readouterr().out
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert main([*arguments, "8"]) == 2
    assert "is not JSON" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in "--batch", "--sequence", "--best":
        assert main([*arguments, "16", name, "0"]) == 2
        assert f"{name} is at least 1, not 0" in capsys.readouterr().out
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


def test_a_search_refuses_arguments_of_another_class():
    with pytest.raises(TypeError, match="cluster is a Cluster, such as"):
        search(Model(2, 128, 2), 8, 128, 8)
    with pytest.raises(TypeError, match="model is a Model, such as"):
        search("llama", Cluster(8), 128, 8)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"best": 0}, ValueError, "best = 0: return at least 1 plan"),
        ({"best": -1}, ValueError, "best = -1"),
        ({"best": 2.0}, TypeError, r"best is a whole number, not 2\.0"),
        ({"margin": float("nan")}, ValueError, "margin = nan has to be at least 0"),
        ({"margin": 5}, ValueError, "margin = 5 has to be at least 0"),
        ({"margin": "5%"}, TypeError, "margin is a number, not '5%'"),
        ({"sequence_length": "4k"}, TypeError, "sequence_length is a number of tokens, not '4k'"),
        ({"global_batch": None}, TypeError, "global_batch is a number of sequences, not None"),
    ],
)
def test_a_search_says_which_number_is_wrong(arguments, error, words):
    usual = {"sequence_length": 4096, "global_batch": 64}
    with pytest.raises(error, match=words):
        search(LLAMA, Cluster(8), **usual | arguments)


def test_a_measured_machine_is_searched_for_tensor_parallel_plans_too():
    """With two sequences, eight ranks have to share the layers as well."""
    line = Line(0.0, 0.03)
    machine = Machine(
        8, 8, layer=Layer(line, Line(0.0, 0.06), 1 / 3), near=Line(1e-4, 5e-9),
        far=Line(2e-3, 5e-8), action=1e-3, peak=1e9,
    )  # fmt: skip
    model = Model(4, 64, 8, vocabulary=1)
    for batch in 1, 2, 8:
        found = search(model, machine, 64, batch, precision="fp32")
        least = min(
            predict(model, machine, plan, 64, batch).step_seconds
            for dp, tp, pp in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4))
            if dp * tp * pp == 8 and batch % dp == 0
            for plan in [Plan(dp, tp, pp, precision="fp32", sequence_parallel=False)]
        )
        assert found[0][1].step_seconds <= least
    assert found.tried and any(plan.tp > 1 for plan, _ in found.plans)


def test_the_command_line_says_what_a_plan_takes_where_another_engine_runs_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--gpus", "16", "--sequence", "4096", "--batch", "64"]
    told = {}
    for engine in "megatron", "fsdp", "nanotron":
        assert main([*arguments, "--engine", engine]) == 0
        _, _, text = capsys.readouterr().out.partition("\ntorchtitan:\n")
        told[engine] = [part.count("(With --engine ") for part in text.split("Megatron-LM:\n")]
    assert told == {"megatron": [1, 0], "fsdp": [0, 1], "nanotron": [1, 1]}


def test_what_another_engine_takes_is_its_own_forecast():
    found = search(LLAMA, Cluster(16), 4096, 64)
    plan, _ = found[0]
    own = predict(LLAMA, Cluster(16, engine="fsdp"), plan, 4096, 64)
    said = in_its_engine(found, "torchtitan")
    assert said == f"(With --engine fsdp: {own.step_seconds:.3g} s, and it {own.verdict}.)\n"
    assert in_its_engine(found, "Megatron-LM") == ""


def test_the_command_line_ends_quietly_when_nobody_reads_on(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = f"{sys.executable} -m naranhi.planning --model {tmp_path} --gpus 16"
    command += " --sequence 4096 --batch 64"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command.split(), **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE
