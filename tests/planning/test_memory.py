"""What a rank holds: the sums of `costs`, in the sizes of the model."""

from dataclasses import replace

import pytest

from naranhi import costs
from naranhi.planning import Cluster, Model, Plan, predict
from naranhi.planning.activations import layer_activations
from naranhi.planning.memory import stage_memory

GPT = Model(
    layers=8, hidden=1024, heads=16, vocabulary=51200, positions=1024, biases=True, dropout=True
)
LLAMA = Model(
    layers=8, hidden=1024, heads=16, kv_heads=4, ffn=3584, gated=True, tied=False, vocabulary=32000
)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (4, False), (4, True)])
def test_a_gpt_layer_keeps_what_korthikanti_says(recompute, tp, sequence_parallel):
    plan = Plan(1, tp, microbatch=2, recompute=recompute, sequence_parallel=sequence_parallel)
    cluster = Cluster(tp, gpu="A100", engine="megatron-2021")
    expected = costs.transformer_layer_bytes(1024, 2, 1024, 16, tp, sequence_parallel, recompute)
    assert layer_activations(GPT, cluster, plan, 1024) == expected


def test_a_llama_layer_with_flash_keeps_no_scores():
    """2h for each of: the first norm, q k v's input, the output of attention, the second norm, the
    MLP's input; q, k, v of 16 + 2 x 4 heads of 64; three inner activations of 3584; and the
    logarithm of each row's sum."""
    kept = 2 * 1024 * (5 * 1024 + 24 * 64 + 3 * 3584) + 4 * 1024 * 16
    assert layer_activations(LLAMA, Cluster(1), Plan(1), 1024) == kept


def test_context_parallelism_divides_what_is_kept():
    one = layer_activations(LLAMA, Cluster(1), Plan(1), 4096)
    four = layer_activations(LLAMA, Cluster(4), Plan(1, cp=4), 4096)
    assert four == one / 4


def test_an_unfused_attention_meets_the_keys_of_all_context_parallel_ranks():
    engine = {"gpu": "A100", "engine": "megatron-2021"}
    one = layer_activations(GPT, Cluster(1, **engine), Plan(1), 1024)
    two = layer_activations(GPT, Cluster(2, **engine), Plan(1, cp=2), 1024)
    assert two == one / 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_state_is_that_of_zero(zero):
    """An engine with bf16 gradients: exactly `costs.zero_bytes`."""
    cluster = Cluster(8, engine="fsdp-compile")
    memory = stage_memory(LLAMA, cluster, Plan(8, zero=zero), 1024, 4)[0]
    state = memory.parameters + memory.gradients + memory.optimizer
    # The two norms at the end are not counted here.
    expected = costs.zero_bytes(LLAMA.parameters - LLAMA.hidden, 8, zero)
    assert state == pytest.approx(expected, rel=1e-9)


def test_fp32_gradients_are_two_bytes_more():
    small = stage_memory(LLAMA, Cluster(1, engine="fsdp-compile"), Plan(1), 1024, 1)[0]
    large = stage_memory(LLAMA, Cluster(1, engine="megatron"), Plan(1), 1024, 1)[0]
    assert large.gradients == 2 * small.gradients


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline():
    tied = replace(LLAMA, tied=True)
    first, last = stage_memory(tied, Cluster(2), Plan(1, pp=2), 1024, 4)
    assert first.parameters == last.parameters
    assert sum(m.parameters for m in (first, last)) == pytest.approx(
        2 * (tied.parameters - tied.hidden + tied.embedding_parameters)
    )


def test_experts_are_shared_by_their_group():
    model = replace(LLAMA, experts=8, top_k=2)
    whole = stage_memory(model, Cluster(8), Plan(8, zero=1), 1024, 4)[0]
    shared = stage_memory(model, Cluster(8), Plan(8, ep=8, zero=1), 1024, 4)[0]
    experts = 8 * model.expert_parameters * model.layers
    assert whole.parameters - shared.parameters == pytest.approx(2 * experts * 7 / 8)
    # Eight ranks hold one copy of each expert's optimizer state either way.
    assert shared.optimizer == pytest.approx(whole.optimizer)


def test_the_first_stage_of_1f1b_holds_the_most_activations():
    stages = stage_memory(LLAMA, Cluster(4), Plan(1, pp=4), 1024, 16)
    kept = [stage.activations for stage in stages]
    assert kept[0] == pytest.approx(2 * kept[2], rel=1e-9)
    assert kept == sorted(kept, reverse=True)


def test_a_plan_that_does_not_fit_says_by_how_much_and_because_of_what():
    model = replace(LLAMA, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672)
    forecast = predict(model, Cluster(8), Plan(1, 8), 1024, 8)
    assert not forecast.fits
    lacking = (forecast.memory_bytes - forecast.capacity) / 2**30
    assert forecast.verdict.startswith(f"does not fit, by {lacking:.1f} GiB: each rank would hold ")
    assert "most of it optimizer state" in forecast.verdict
    assert predict(model, Cluster(64), Plan(8, 8, zero=3), 1024, 8).fits
