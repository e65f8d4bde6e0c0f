"""What a rank holds: the sums of `costs`, in the sizes of the model."""

from dataclasses import replace

import pytest

from naranhi import costs
from naranhi.planning import Cluster, Latent, Model, Plan, predict
from naranhi.planning.activations import layer_activations
from naranhi.planning.memory import in_flight, stage_memory
from naranhi.planning.stages import cut

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


@pytest.mark.parametrize("engine, precision", [("fsdp-compile", "fp32"), ("internevo", "bf16")])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_state_is_that_of_zero(zero, engine, precision):
    """FSDP keeps all of it in fp32; InternEvo's gradients are bf16: exactly `costs.zero_bytes`."""
    cluster = Cluster(8, engine=engine)
    memory = stage_memory(LLAMA, cluster, Plan(8, zero=zero), 1024, 4)[0]
    state = memory.parameters + memory.gradients + memory.optimizer
    # The two norms at the end are not counted here.
    expected = costs.zero_bytes(LLAMA.parameters - LLAMA.hidden, 8, zero, precision)
    assert state == pytest.approx(expected, rel=1e-9)


def test_fp32_gradients_are_two_bytes_more():
    small = stage_memory(LLAMA, Cluster(1, engine="internevo"), Plan(1), 1024, 1)[0]
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
    assert forecast.verdict.startswith(f"does not fit, by {lacking:.1f} GiB: each rank needs ")
    assert "the largest part is optimizer state" in forecast.verdict
    assert predict(model, Cluster(64), Plan(8, 8, zero=3), 1024, 8).fits


def test_fsdp_in_a_pipeline_holds_whole_gradients_in_fp32():
    """Shards of 16 bytes a parameter, and what it gathered: 2 bytes, and 4 of whole gradients."""
    cluster = Cluster(8, engine="fsdp")
    one, two = (
        stage_memory(LLAMA, cluster, Plan(8 // pp, pp=pp, zero=3), 1024, 4)[0] for pp in (1, 2)
    )
    layers = 4 * LLAMA.layer_parameters() + LLAMA.embedding_parameters
    state = two.parameters + two.gradients + two.optimizer
    assert state == pytest.approx(layers * (16 / 4 + 2 + 4))
    assert one.parameters == pytest.approx(4 * (LLAMA.parameters - LLAMA.hidden) / 8)


def test_a_reducer_copies_gradients_only_where_there_are_ranks_to_send_them_to():
    one, two = (
        stage_memory(LLAMA, Cluster(dp, engine="nanotron"), Plan(dp), 1024, 4)[0] for dp in (1, 2)
    )
    assert two.gradients / one.gradients == 6 / 4


def test_what_an_allocator_keeps_does_not_decide_what_fits():
    memory = stage_memory(LLAMA, Cluster(1, engine="fsdp"), Plan(1, microbatch=8), 1024, 1)[0]
    logits = 8 * 1024 * LLAMA.vocabulary
    assert memory.working == 12 * logits and memory.cached > 2 * logits
    assert memory.reserved == memory.total + memory.cached
    forecast = predict(LLAMA, Cluster(1, engine="fsdp"), Plan(1, microbatch=8), 1024, 8)
    assert forecast.memory_bytes == memory.total and forecast.reserved_bytes == memory.reserved
    tight = forecast._replace(capacity=memory.total)
    assert tight.fits and not tight.fits_with(0.0)


def test_a_host_that_runs_ahead_has_asked_for_gathered_inputs_of_thirty_layers():
    """2 x 1024 / 34 of them, or those of a step; none in a pipeline, or without ranks to gather."""
    cluster = Cluster(8, engine="nanotron")
    ahead, eight, *others = (
        stage_memory(LLAMA, cluster, plan, 1024, count)[0].cached
        for plan, count in (
            (Plan(4, 2), 4), (Plan(4, 2), 1), (Plan(8), 4), (Plan(2, 2, 2), 4),
        )
    )  # fmt: skip
    assert ahead == pytest.approx(2 * 1024 / 34 * 2 * 1024 * LLAMA.hidden)
    assert eight == 2 * 8 * 2 * 1024 * LLAMA.hidden
    assert others == [0, 0]


def test_free_pieces_decide_what_fits_and_free_blocks_do_not():
    """A quarter of what comes and goes is lost to pieces; of the model state, nothing."""
    forecast = predict(LLAMA, Cluster(8, engine="nanotron"), Plan(4, 2, microbatch=4), 1024, 64)
    [memory] = forecast.memory
    assert memory.fragments == (memory.activations + memory.working) / 4
    assert memory.needed == memory.total + memory.fragments
    assert memory.wanted == memory.needed + memory.cached > memory.needed
    assert forecast._replace(capacity=memory.needed).fits
    assert not forecast._replace(capacity=memory.needed - 1).fits
    assert not forecast._replace(capacity=memory.needed).fits_with(0.0)
    assert forecast._replace(capacity=memory.wanted).fits_with(0.0)


def test_an_allocator_keeps_no_more_than_there_is_room_for():
    """Of 30 GiB, FSDP can fill 27; 24.6 are in use, and 2.6 would be kept if there were room."""
    large, small = (Cluster(1, engine="fsdp", memory_gib=memory) for memory in (79.1, 30))
    plan = Plan(1, microbatch=8)
    much, little = (stage_memory(LLAMA, gpu, plan, 4096, 1)[0] for gpu in (large, small))
    assert much.total == little.total and much.reserved > small.capacity
    assert little.reserved == pytest.approx(small.capacity)


@pytest.mark.parametrize("engine, last", [("fsdp", 1024), ("fsdp-compile", 0)])
def test_selective_recomputation_keeps_every_second_matmul(engine, last):
    """Input, q, v, attention, its sums, the gate; the MLP's output, unless a compiler drops it."""
    plan = Plan(1, recompute="selective")
    kept = layer_activations(LLAMA, Cluster(1, engine=engine), plan, 1024)
    rows = 1024 + 16 * 64 + 4 * 64 + 16 * 64 + 3584 + last
    assert kept == 1024 * (2 * rows + 4 * 16)


def test_a_vocabulary_that_ranks_share_takes_more_bytes_for_each_logit():
    """Of DTensors: the softmax's logarithm, a gradient of zeros, the exponential, and their sum."""
    for tp, bytes_of_each in ((1, 12), (8, 16)):
        plan = Plan(1, tp, microbatch=64)
        memory = stage_memory(LLAMA, Cluster(tp, engine="fsdp"), plan, 1024, 1)[0]
        assert memory.working == bytes_of_each * 64 * 1024 * LLAMA.vocabulary / tp


def test_free_blocks_at_the_loss_are_those_of_a_forward():
    """Three activations of the MLP, and the 16-bit logits; what a backward repeats comes later."""
    plan = Plan(1, microbatch=8, recompute="full")
    memory = stage_memory(LLAMA, Cluster(1, engine="fsdp"), plan, 1024, 1)[0]
    assert memory.cached == 2 * 8 * 1024 * (3 * LLAMA.ffn + LLAMA.vocabulary)


@pytest.mark.parametrize("zero, bytes_of_each", [(1, 34), (3, 28)])
def test_an_unfused_optimizer_holds_more_than_a_backward(zero, bytes_of_each):
    """16 bytes of state, 4 of fp32 gradients, 8 of Adam's formula; 6 of copies for flat tensors."""
    cluster = Cluster(1, engine="internevo")
    memory = stage_memory(LLAMA, cluster, Plan(1, zero=zero, recompute="full"), 256, 1)[0]
    parameters = LLAMA.parameters - LLAMA.hidden  # without the norm at the end
    assert memory.activations == 0 and memory.working == pytest.approx(12 * parameters)
    assert memory.total == pytest.approx(28 * parameters)
    freed = stage_memory(LLAMA, Cluster(1), Plan(1, recompute="full"), 256, 1)[0]
    backward = freed.activations + freed.working if zero == 3 else 0
    assert memory.reserved == pytest.approx(bytes_of_each * parameters + backward)


def test_a_large_backward_decides_beside_a_small_update():
    plan = Plan(1, microbatch=16)
    memory = stage_memory(LLAMA, Cluster(1, engine="internevo"), plan, 1024, 1)[0]
    assert memory.activations + memory.working > 12 * LLAMA.parameters
    assert memory.activations > 0


def test_layers_that_do_not_divide_go_to_the_last_stages_or_to_those_between():
    ten = replace(LLAMA, layers=10)
    assert [len(layers) for layers in cut(ten, 4, "last").layers] == [2, 2, 3, 3]
    assert [len(layers) for layers in cut(ten, 4, "uniform").layers] == [2, 3, 3, 2]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_copies_for_experts_are_kept_as_they_were_gathered(sequence_parallel):
    """Of a layer without them, everything is a quarter or, unsharded, as much; 8 copies are not."""
    model = replace(LLAMA, experts=64, top_k=8, expert_ffn=256)
    few = replace(model, top_k=4, expert_ffn=512)  # as wide in all, with half of the copies
    plan = Plan(1, 4, sequence_parallel=sequence_parallel)
    eight, four = (layer_activations(m, Cluster(4), plan, 1024, sparse=True) for m in (model, few))
    assert eight - four == 2 * 1024 * 4 * 1024


def test_a_layer_of_experts_is_as_wide_as_those_that_a_token_visits():
    narrow = replace(LLAMA, experts=64, top_k=1, expert_ffn=256, vocabulary=64)
    wide = replace(narrow, top_k=8)
    one, eight = (
        stage_memory(model, Cluster(1), Plan(1, recompute="full"), 8192, 1)[0].working
        for model in (narrow, wide)
    )
    again = [
        layer_activations(model, Cluster(1), Plan(1), 8192, sparse=True) for model in (narrow, wide)
    ]
    assert eight - one == again[1] - again[0] + 2 * 8192 * 3 * 7 * 256


DEEPSEEK = Model(
    layers=2, hidden=7168, heads=128, ffn=18432, vocabulary=129280, head_dim=128, gated=True,
    tied=False, latent=Latent(1536, 512, 64, 128, 128),
)  # fmt: skip


def test_latent_attention_keeps_its_own_sizes():
    """Queries and keys of 192, values of 128 elements a head; both latent vectors, before and after
    their norms."""
    attention = 128 * (192 + 192 + 128) + 2 * (1536 + 512)
    kept = 2 * (5 * 7168 - 7168 + 128 * 128 + attention + 3 * 18432) + 4 * 128
    assert layer_activations(DEEPSEEK, Cluster(1), Plan(1), 1024) == 1024 * kept


def test_every_tensor_parallel_rank_has_the_matrices_of_latent_vectors():
    whole = 7168 * 1536 + 7168 * (512 + 64)
    dense, experts = DEEPSEEK.rank_parameters(0, 8)
    assert dense == whole + (DEEPSEEK.layer_parameters() - whole) / 8 and experts == 0
    sparse = replace(DEEPSEEK, experts=256, top_k=8, expert_ffn=2048, shared_experts=1)
    dense, experts = sparse.rank_parameters(1, 8, 32)
    assert experts == 8 * sparse.expert_parameters / 8
    whole += 7168 * 256  # the router
    others = sparse.attention_parameters + sparse.expert_parameters + 7168 * 256 - whole
    assert dense == whole + others / 8
    held = stage_memory(DEEPSEEK, Cluster(8), Plan(1, 8), 1024, 1)[0].parameters
    ends = 2 * DEEPSEEK.embedding_parameters / 8
    assert held == 2 * (2 * DEEPSEEK.rank_parameters(0, 8)[0] + ends)


def test_in_a_pipeline_stage_2_holds_whole_gradients_as_stage_1_does():
    """FSDP adds up those of all micro-batches there, as `Plan.kept_whole` says."""
    cluster = Cluster(8, engine="fsdp")
    one, two = (
        stage_memory(LLAMA, cluster, Plan(4, pp=2, zero=zero), 1024, 4)[0] for zero in (1, 2)
    )
    assert two.gradients == one.gradients == two.parameters


def test_fsdp_gathers_on_a_stream_of_its_own():
    """Blocks of what is in no layer, and of a layer, which the other stream cannot use."""
    model = replace(LLAMA, vocabulary=64)  # so that the loss is small
    cluster = Cluster(8, engine="fsdp")
    for pp, ends in ((1, model.end_parameters - model.hidden), (2, model.embedding_parameters)):
        plan = Plan(8 // pp, pp=pp, zero=3)
        first = stage_memory(model, cluster, plan, 1024, 4)[0]
        loss = 0.0 if pp > 1 else 2 * 1024 * 64 + 12 * 1024 * 64
        gathered = 2 * (max(ends, model.layer_parameters()) + model.layer_parameters())
        assert first.cached == pytest.approx(gathered + loss, rel=1e-9)


def test_in_a_pipeline_zero_3_gathers_once_and_then_holds_what_zero_1_does():
    cluster, plan = Cluster(16), Plan(8, pp=2, zero=1)
    first = stage_memory(LLAMA, cluster, plan, 1024, 4)
    assert stage_memory(LLAMA, cluster, replace(plan, zero=3), 1024, 4) == first
    fsdp = Cluster(16, engine="fsdp")  # which has buffers for a layer besides
    one, three = (stage_memory(LLAMA, fsdp, replace(plan, zero=z), 1024, 4)[0] for z in (1, 3))
    assert three.working > one.working


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
@pytest.mark.parametrize("stages, count", [(8, 1), (8, 4), (4, 2), (4, 16)])
def test_no_more_micro_batches_are_in_flight_than_there_are(schedule, stages, count):
    held = [in_flight(schedule, stages, stage, count, 2) for stage in range(stages)]
    assert max(held) <= count and min(held) > 0


def test_a_width_that_neither_heads_nor_tp_divide_is_forecast():
    model = replace(LLAMA, hidden=2560, heads=24, kv_heads=24, head_dim=128, ffn=6912)
    cluster, plan = Cluster(24), Plan(8, 3)
    kept = layer_activations(model, cluster, plan, 4098)
    near = layer_activations(replace(model, hidden=2568), cluster, plan, 4098)
    assert 0 < kept / near < 1 and kept / near == pytest.approx(1, rel=0.005)
    assert predict(model, cluster, plan, 4098, 24).step_seconds > 0
