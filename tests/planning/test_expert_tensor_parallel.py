"""Experts that fewer ranks cut than other layers: `Plan(etp=...)`."""

from dataclasses import replace

import pytest

from naranhi.planning import (
    Cluster,
    Model,
    Plan,
    PlanError,
    commands,
    describe,
    explain,
    predict,
    search,
    sharding,
)
from naranhi.planning import communication as comm
from naranhi.planning.activations import layer_activations
from naranhi.planning.compute import Arithmetic, _permuting_bytes, layer_work
from naranhi.planning.memory import stage_memory, updated_parameters

MIXTRAL = Model(
    32, 4096, 32, 14336, 32000, kv_heads=8, gated=True, tied=False, experts=8, top_k=2
)  # fmt: skip
DENSE = replace(MIXTRAL, experts=0, top_k=0)
CUT = Plan(4, 4, ep=4, zero=1)  # each expert over four ranks
WHOLE = replace(CUT, etp=1)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"tp": 4, "etp": 3}, "etp = 3 does not divide tp = 4"),
        ({"tp": 4, "etp": 8}, "etp = 8 does not divide tp = 4"),
        ({"tp": 4, "etp": 0}, "etp = 0 does not divide tp = 4"),
        ({"tp": 4, "ep": 5, "etp": 1}, "ep = 5 does not divide dp x cp x tp / etp = 8"),
        (
            {"tp": 4, "ep": 4},
            "ep = 4 does not divide dp x cp = 2: .*with etp = 1 by those",
        ),
        (
            {"tp": 4, "etp": 1, "sequence_parallel": False},
            "etp = 1 below tp = 4 needs seq",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises(PlanError, match=words):
        Plan(2, **arguments)


def test_a_model_has_to_have_experts_that_divide():
    with pytest.raises(PlanError, match="etp = 1, but the model has no experts"):
        predict(DENSE, Cluster(16), replace(WHOLE, ep=1), 4096, 64)
    narrow = replace(MIXTRAL, expert_ffn=14)
    with pytest.raises(PlanError, match="expert_ffn = 14 is not a multiple of tp = 4"):
        predict(narrow, Cluster(16), CUT, 4096, 64)
    predict(narrow, Cluster(16), WHOLE, 4096, 64)
    with pytest.raises(PlanError, match="expert_ffn = 14 is not a multiple of etp = 4"):
        predict(narrow, Cluster(16), Plan(2, 8, ep=4, etp=4), 4096, 64)


def test_as_many_as_tp_is_the_same_plan():
    assert Plan(4, 4, ep=4, etp=4, zero=1) == CUT and CUT.etp is None
    assert replace(CUT, tp=2).expert_tp == 2, "it follows tp"


@pytest.mark.parametrize("plan", [CUT, WHOLE, replace(CUT, etp=2), replace(WHOLE, ep=8)])
def test_all_ranks_together_have_each_expert_as_often_as_it_has_replicas(plan):
    dense, experts = MIXTRAL.rank_parameters(0, plan.tp, plan.ep, plan.etp)
    assert dense == MIXTRAL.rank_parameters(0, plan.tp)[0], "other layers are cut by tp"
    every = MIXTRAL.experts * MIXTRAL.expert_parameters
    assert plan.ranks * experts == pytest.approx(plan.expert_replicas * every)
    # An optimizer that is sharded over all replicas updates each parameter once.
    updated = updated_parameters(plan, 0.0, experts)
    assert plan.ranks * updated == pytest.approx(every)


def test_a_rank_of_whole_experts_does_the_same_work():
    """Fewer tokens for wider matrices. More of its time goes into reading these."""
    cut, whole = (layer_work(MIXTRAL, Cluster(16), plan, 4096, True) for plan in (CUT, WHOLE))
    assert cut.forward < whole.forward < 1.1 * cut.forward
    assert cut.backward < whole.backward < 1.3 * cut.backward, "and into adding to gradients"


def test_copies_of_tokens_are_gathered_by_those_who_cut_an_expert():
    tokens = 4096 * MIXTRAL.hidden * 2
    cut, half, whole = (
        comm.tensor_layer(MIXTRAL, Cluster(16), plan, 4096, True).forward
        for plan in (CUT, replace(CUT, etp=2), WHOLE)
    )
    attention = comm.tensor_layer(MIXTRAL, Cluster(16), CUT, 4096).forward / 2
    assert whole == pytest.approx(attention), "the attention's alone"
    link = comm.group_link(Cluster(16), 2, 1)
    copies = MIXTRAL.top_k * tokens * 2 / 4  # of the half of a tensor group
    both = sum(comm.seconds(c, copies, 2, link) for c in ("all_gather", "reduce_scatter"))
    assert half == pytest.approx(attention + both)
    assert whole < half < cut
    # A shared expert is cut by all, and exchanges its tokens as any layer does.
    shared = replace(MIXTRAL, shared_experts=1)
    assert comm.tensor_layer(shared, Cluster(16), WHOLE, 4096, True).forward == pytest.approx(
        2 * attention
    )


def test_neighbours_share_whole_experts_in_one_node():
    """Cut over four ranks, four experts' ranks are in different nodes; whole, in one."""
    cut, whole = (
        comm.expert_layer(MIXTRAL, Cluster(16), plan, 4096).forward for plan in (CUT, WHOLE)
    )
    assert whole < cut / 4


def test_what_is_kept_of_copies_grows_with_those_who_gather_them():
    kept = [
        layer_activations(MIXTRAL, Cluster(16), replace(CUT, etp=etp), 4096, True)
        for etp in (1, 2, 4)
    ]
    copy = 2 * 4096 / CUT.tp * MIXTRAL.top_k * MIXTRAL.hidden
    assert kept[1] - kept[0] == pytest.approx(copy)
    assert kept[2] - kept[1] == pytest.approx(2 * copy)


def test_what_is_gathered_for_a_moment_and_sorted_is_that_of_an_experts_ranks():
    """A rank that cuts experts has the copies of its whole group; one of whole experts, its own."""
    gpu, kept, sorted_bytes = Arithmetic(Cluster(16), "bf16"), [], []
    for plan in (CUT, WHOLE):
        kept.append(stage_memory(MIXTRAL, Cluster(16), plan, 4096, 16)[0].working)
        sorted_bytes.append(_permuting_bytes(MIXTRAL, gpu, plan, 4096, 2))
    # Attention gathers a layer's 4,096 tokens in either case: input, output and a gradient.
    assert kept[0] - kept[1] == pytest.approx(2 * 4096 * 3 * MIXTRAL.hidden * (MIXTRAL.top_k - 1))
    passes = 4 * MIXTRAL.top_k * (1 - 1 / 4)
    assert sorted_bytes[0] - sorted_bytes[1] == pytest.approx(2 * 4096 * passes * MIXTRAL.hidden)


def test_experts_of_one_tensor_group_have_replicas_in_it():
    """dp = 1: other layers have no replica; of eight ranks two have each expert."""
    plan = Plan(1, 8, ep=4, etp=1)
    assert plan.replicas == 1 and plan.expert_replicas == 2
    assert sharding.gradient_seconds(Cluster(8), plan, 1e9)[0] == 0
    assert sharding.gradient_seconds(Cluster(8), plan, 1e9, 1e9)[0] > 0
    alone = replace(plan, ep=8)
    assert sharding.gradient_seconds(Cluster(8), alone, 1e9, 1e9)[0] == 0


def test_memory_is_that_of_the_parameters_held():
    held = [stage_memory(MIXTRAL, Cluster(16), plan, 4096, 16)[0] for plan in (CUT, WHOLE)]
    own = [
        MIXTRAL.layers * MIXTRAL.rank_parameters(0, 4, plan.ep, plan.etp)[1]
        for plan in (CUT, WHOLE)
    ]
    assert held[1].parameters - held[0].parameters == pytest.approx(2 * (own[1] - own[0]))
    # Four times as many, sharded over four times as many ranks.
    assert held[1].optimizer == pytest.approx(held[0].optimizer)


def test_a_search_tries_both_and_says_which():
    many = replace(
        MIXTRAL, layers=48, vocabulary=129280, experts=128, top_k=8, expert_ffn=1536
    )  # of chapter 23
    found = search(many, Cluster(64), 4096, 1024)
    plan = found[0][0]
    assert plan.etp == 1 < plan.tp
    assert ", etp 1, " in describe(plan)
    assert "etp 1: each expert is whole, and other GPUs of a tensor" in explain(found)
    assert all(plan.etp is None for plan, _ in search(DENSE, Cluster(64), 4096, 256).plans)


def test_megatron_is_told_and_overlaps_what_is_forecast_so():
    text = commands.megatron(MIXTRAL, WHOLE, 4096, 64)
    assert "--expert-tensor-parallel-size 1" in text and "--tp-comm-overlap" in text
    assert "--expert-tensor-parallel-size" not in commands.megatron(MIXTRAL, CUT, 4096, 64)
    plain = commands.megatron(DENSE, Plan(8, 2), 4096, 64)
    assert "--sequence-parallel" in plain and "--tp-comm-overlap" in plain
    for plan in (Plan(16), Plan(8, 2, sequence_parallel=False)):  # which it refuses
        told = commands.megatron(DENSE, plan, 4096, 64)
        assert "--tp-comm-overlap" not in told


def test_torchtitan_spreads_whole_experts_only_as_it_asserts():
    wide = replace(MIXTRAL, experts=16)
    text = commands.torchtitan(wide, Plan(4, 2, ep=8, etp=1, zero=3), 4096, 64)
    assert "expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 1\n" in text
    with pytest.raises(ValueError, match="ep = 2 is not a multiple of cp x tp = 4 that divides"):
        commands.torchtitan(wide, Plan(4, 4, ep=2, etp=1, zero=3), 4096, 64)
    for plan in (Plan(4, 4, ep=4, etp=2, zero=3), Plan(4, 2, etp=1, zero=3)):
        with pytest.raises(ValueError, match="it cuts each expert by tp, or choose etp = 1"):
            commands.torchtitan(wide, plan, 4096, 64)


def test_naranhis_own_experts_are_whole():
    whole = Plan(4, 2, ep=2, etp=1, precision="fp32")
    assert "--ep 2" in commands.naranhi_train(MIXTRAL, whole, 32)
    with pytest.raises(ValueError, match=r"the plan cuts each over 2 ranks of tp; choose etp = 1"):
        commands.naranhi_train(MIXTRAL, replace(whole, etp=None), 32)
