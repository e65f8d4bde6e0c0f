"""Forecasts: parts that sum to the step, and each part what it should follow."""

from dataclasses import replace

import pytest
from llama import LLAMA

from naranhi.planning import Cluster, Plan, predict, sharding
from naranhi.planning import communication as comm
from naranhi.planning.prediction import stage_times

MIXTRAL = replace(LLAMA, experts=8, top_k=2, vocabulary=32000)
PLANS = [
    (LLAMA, Plan(16)),
    (LLAMA, Plan(16, zero=1)),
    (LLAMA, Plan(16, zero=3, recompute="full")),
    (LLAMA, Plan(2, 8)),
    (LLAMA, Plan(2, 2, 4)),
    (LLAMA, Plan(2, 2, 4, schedule="interleaved", chunks=2)),
    (LLAMA, Plan(2, 2, 4, schedule="zero_bubble_h1")),
    (LLAMA, Plan(4, 2, cp=2)),
    (LLAMA, Plan(16, precision="fp8")),
    (MIXTRAL, Plan(16, ep=8, zero=1)),
]


@pytest.mark.parametrize("engine", ["megatron", "fsdp", "megatron-2021", "nanotron"])
@pytest.mark.parametrize("model, plan", PLANS)
def test_the_parts_are_the_step(model, plan, engine):
    if engine == "nanotron" and plan.schedule in ("interleaved", "zero_bubble_h1"):
        plan = replace(plan, schedule="gpipe", chunks=1)  # it has neither
    forecast = predict(model, Cluster(16, engine=engine), plan, 4096, 64)
    assert sum(forecast.parts.values()) == pytest.approx(forecast.step_seconds, rel=1e-12)
    assert all(seconds > 0 for seconds in forecast.parts.values())
    assert forecast.low < forecast.step_seconds < forecast.high
    assert 0 < forecast.mfu < 1


def test_rates_follow_from_the_step():
    forecast = predict(LLAMA, Cluster(16), Plan(16), 4096, 64)
    tokens = 64 * 4096 / 16 / forecast.step_seconds
    assert forecast.tokens_per_second_per_gpu == pytest.approx(tokens)
    flops = tokens * LLAMA.flops_per_token(4096)
    assert forecast.tflops_per_gpu == pytest.approx(flops / 1e12)
    assert forecast.mfu == pytest.approx(flops / 989.4e12)


def test_no_part_is_faster_than_the_hardware():
    """Arithmetic at the peak, and nothing else, is faster than any forecast."""
    for model, plan in PLANS:
        rate = 1978.9e12 if plan.precision == "fp8" else 989.4e12
        # Causal attention needs half of the scores that model FLOPs credit.
        credited = 6 * model.layers * 4096 * model.score_width
        least = 64 * 4096 * (model.flops_per_token(4096) - credited / 2) / rate / 16
        assert predict(model, Cluster(16), plan, 4096, 64).step_seconds > least


def test_full_recomputation_repeats_the_forward():
    kept = predict(LLAMA, Cluster(8), Plan(8), 4096, 64).parts
    again = predict(LLAMA, Cluster(8), Plan(8, recompute="full"), 4096, 64).parts
    assert "recomputing" not in kept
    # A third of forward and backward, less what only the backward does, and the output layer.
    share = again["recomputing"] / (kept["computing"] + kept["attention"])
    assert 0.25 < share < 1 / 3


def test_without_a_pipeline_or_a_second_rank_nothing_waits():
    parts = predict(LLAMA, Cluster(1), Plan(1), 4096, 8).parts
    assert set(parts) == {"computing", "attention", "optimizer"}


def test_the_busiest_stage_waits_while_the_others_do_their_part_once():
    """The last one, with the output layer: the first micro-batch comes to it through all others,
    and the last one leaves through them."""
    plan, cluster = Plan(1, pp=8), Cluster(8)
    stages = stage_times(LLAMA, cluster, plan, 4096)
    others = sum(stage.forward + stage.backward for stage in stages[:-1])
    parts = predict(LLAMA, cluster, plan, 4096, 64).parts
    assert parts["bubble"] == pytest.approx(others, rel=1e-9)
    busiest = 64 * (stages[-1].forward + stages[-1].backward)
    assert parts["computing"] + parts["attention"] == pytest.approx(busiest, rel=1e-9)


def test_a_group_within_a_node_talks_over_nvlink_and_a_larger_one_over_its_ports():
    cluster = Cluster(64)
    inside = comm.group_link(cluster, 8, 1)
    assert inside.nodes == 1 and inside.bandwidth == pytest.approx(450e9 * comm.NVLINK)
    strided = comm.group_link(cluster, 8, 8)  # one rank in each node: one port
    assert strided.nodes == 8 and strided.bandwidth == pytest.approx(50e9 * comm.NETWORK)
    pairs = comm.group_link(cluster, 16, 4)  # two in each node: two ports
    assert pairs.nodes == 8 and pairs.bandwidth == pytest.approx(100e9 * comm.NETWORK)
    whole = comm.group_link(cluster, 64, 1)  # eight ports, of which NVLink is not the limit
    assert whole.bandwidth == pytest.approx(400e9 * comm.NETWORK)


def test_groups_that_do_not_fill_a_node_lie_on_two_in_part():
    for tp, ports in ((3, 1), (6, 2)):  # of the second group of three, one is in the second node
        link = comm.group_link(Cluster(24), tp, 1)
        assert link.nodes == 2 and link.bandwidth == pytest.approx(ports * 50e9 * comm.NETWORK)
    assert comm.group_link(Cluster(6), 3, 1).nodes == 1
    assert comm.group_link(Cluster(24, gpus_per_node=6), 3, 1).nodes == 1
    assert comm.group_link(Cluster(24), 3, 8).nodes == 3


def test_a_pipeline_over_nodes_sees_the_network_though_a_node_has_several_stages():
    def waits(plan, gpus, network):
        return predict(LLAMA, Cluster(gpus, network=network), plan, 4096, 32).parts["pipeline"]

    for plan in (Plan(1, 4, 4), Plan(1, 2, 8), Plan(2, 1, 8, schedule="interleaved", chunks=4)):
        assert waits(plan, 16, 1) > 10 * waits(plan, 16, 400)
    assert waits(Plan(1, 4, 2), 8, 1) == waits(Plan(1, 4, 2), 8, 400)  # in one node


def test_sharding_moves_half_as_much_again_as_reducing():
    """ZeRO-3 gathers twice and reduces once; with bf16 gradients that is 3 values a parameter."""
    cluster, parameters = Cluster(8, engine="fms-fsdp"), 1e8
    exposed = sharding.sharded_layer(cluster, Plan(8, zero=3), parameters, 0.0, 0.0)
    reduce, gather = sharding.gradient_seconds(cluster, Plan(8, zero=1), parameters)
    assert sum(exposed) == pytest.approx(1.5 * (reduce + gather), rel=0.01)


def test_sharding_sends_the_embedding_and_the_output_layer_too():
    """Gathered once in a micro-batch and kept, in bf16, and reduced once, in fp32."""
    cluster = Cluster(8, engine="fsdp-compile")
    few, many = (replace(LLAMA, vocabulary=size) for size in (1024, 513 * 1024))
    more = many.end_parameters - few.end_parameters

    def sharding_seconds(model, plan, batch=8):
        return predict(model, cluster, plan, 1024, batch).parts.get("sharding", 0.0)

    seconds = sharding_seconds(many, Plan(8, zero=3)) - sharding_seconds(few, Plan(8, zero=3))
    sent = 7 / 8 * (2 + 4) * more
    assert seconds == pytest.approx(sent / (450e9 * comm.NVLINK), rel=0.01)
    twice = sharding_seconds(many, Plan(8, zero=3), 16)
    assert twice == pytest.approx(2 * sharding_seconds(many, Plan(8, zero=3)))
    assert sharding_seconds(many, Plan(8, zero=1)) == 0
    assert sharding_seconds(many, Plan(4, pp=2, zero=3)) == 0


def test_experts_are_sharded_and_reduced_over_those_that_have_the_same():
    """Where ep = 8 of 8 ranks, no other rank has the same experts; of 16 ranks one other has."""
    experts, layers = 8 * MIXTRAL.expert_parameters, 32
    dense = MIXTRAL.parameters - layers * experts
    cluster = Cluster(16)
    for zero, ep, shards in ((0, 8, 1), (1, 1, 16), (1, 8, 2), (3, 8, 2)):
        plan = Plan(16, ep=ep, zero=zero)
        forecast = predict(MIXTRAL, cluster, plan, 4096, 64)
        updated = forecast.memory[0].optimizer / 12  # Adam's bytes for each of them
        gradient = cluster.runs.gradient_bytes
        seconds = updated * (5 * gradient + 26) / (3350e9 * 0.85)
        assert forecast.parts["optimizer"] == pytest.approx(seconds, rel=1e-3)
        held = dense / (16 if zero else 1) + layers * experts / ep / shards
        assert updated == pytest.approx(held, rel=1e-3)
    alone, all_of_them = Plan(8, ep=8, zero=3), Plan(8, zero=3)
    one_node = Cluster(8)
    gathered = sharding.sharded_layer(one_node, alone, 1e7, 0.0, 0.0, experts=1e9)
    assert gathered == sharding.sharded_layer(one_node, all_of_them, 1e7, 0.0, 0.0)
    for zero in (0, 1):
        plan = Plan(8, ep=8, zero=zero)
        reduced = sharding.gradient_seconds(one_node, plan, 1e7, 1e9)
        assert reduced == sharding.gradient_seconds(one_node, plan, 1e7)
    # Two ranks that have the same experts are in different nodes, each with one port.
    apart = sharding.gradient_seconds(cluster, Plan(16, ep=8), 0.0, 1e9)[0]
    assert apart == pytest.approx(4e9 / (50e9 * comm.NETWORK), rel=0.1)


def test_messages_that_run_behind_arithmetic_cost_a_part_of_their_time():
    assert comm.behind(1.0, 0.0) == 1.0
    assert comm.behind(1.0, 10.0) == pytest.approx(comm.INTERFERENCE)
    assert comm.behind(3.0, 1.0) == pytest.approx(2.0 + comm.INTERFERENCE)


def test_ring_attention_sends_all_blocks_but_its_own():
    """With no arithmetic to hide it: (cp - 1) blocks of keys and values."""
    plan = Plan(1, cp=4)
    exposed = comm.context_layer(LLAMA, Cluster(4), plan, 2**20, 0.0)
    block = 2 * (2**20 / 4) * 2 * 8 * 128
    assert exposed.forward == pytest.approx(3 * block / (450e9 * comm.NVLINK), rel=0.01)
    assert comm.context_layer(LLAMA, Cluster(4), plan, 2**20, 1.0).forward == 0


def test_experts_in_one_node_send_and_receive_each_token_top_k_times():
    plan = Plan(8, ep=8)
    exposed = comm.expert_layer(MIXTRAL, Cluster(8), plan, 2**16)
    sent = 2 * 2**16 * 2 * 4096 * 7 / 8
    assert exposed.forward == pytest.approx(2 * sent / (450e9 * comm.NVLINK), rel=0.01)
    # Over two nodes half of it goes through one port.
    apart = comm.expert_layer(MIXTRAL, Cluster(16), Plan(16, ep=8, tp=1), 2**16)
    assert apart == exposed
    wide = comm.expert_layer(replace(MIXTRAL, experts=16), Cluster(16), Plan(16, ep=16), 2**16)
    assert wide.forward > 3 * exposed.forward


def test_a_slower_network_or_a_smaller_overlap_only_costs():
    fast = predict(LLAMA, Cluster(64), Plan(64, zero=1), 4096, 64)
    slow = predict(LLAMA, Cluster(64, network=50), Plan(64, zero=1), 4096, 64)
    assert slow.parts["data"] > 2 * fast.parts["data"]
    assert slow.parts["computing"] == fast.parts["computing"]
    assert slow.high / slow.step_seconds > fast.high / fast.step_seconds


def test_one_group_of_zero_is_the_default():
    whole = predict(LLAMA, Cluster(16), Plan(16, zero=3), 4096, 64)
    assert whole == predict(LLAMA, Cluster(16), Plan(16, zero=3, zero_group=16), 4096, 64)
    hybrid = predict(LLAMA, Cluster(16), Plan(16, zero=3, zero_group=8), 4096, 64)
    assert hybrid.memory[0].optimizer == pytest.approx(2 * whole.memory[0].optimizer)


def test_arguments_of_another_class_are_refused():
    plan = Plan(8)
    for name, arguments in (
        ("model", ({}, Cluster(8), plan)),
        ("cluster", (LLAMA, 8, plan)),
        ("plan", (LLAMA, Cluster(8), "dp8")),
    ):
        with pytest.raises(TypeError, match=f"{name} is a .*, such as"):
            predict(*arguments, 1024, 8)


def test_stage_2_reduces_the_gradients_of_each_micro_batch():
    """It has no whole gradients to add them to."""

    def data(zero, microbatches, **more):
        plan = Plan(8 // more.get("pp", 1), zero=zero, **more)
        return predict(LLAMA, Cluster(8), plan, 4096, plan.dp * microbatches).parts["data"]

    gather = data(2, 1) - (data(2, 3) - data(2, 1)) / 2
    assert data(2, 1) == data(1, 1) == data(1, 16)
    assert data(2, 16) == pytest.approx(gather + 16 * (data(2, 1) - gather))
    assert data(2, 16) > 8 * data(1, 16)
    assert data(2, 16, pp=2) == data(1, 16, pp=2)  # whose gradients are whole
