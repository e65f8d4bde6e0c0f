"""Clusters and plans: what cannot be is refused in words, and says which numbers contradict."""

import contextlib
from dataclasses import replace

import pytest

from naranhi.planning import (
    Cluster,
    Latent,
    Layer,
    Line,
    Machine,
    Model,
    Plan,
    PlanError,
    predict,
    search,
)
from naranhi.planning.cluster import calibrations
from naranhi.planning.stages import cut

MODEL = Model(layers=12, hidden=768, heads=12, vocabulary=50304)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"gpu": "V100"}, "gpu 'V100' is not in the table; choose one of A100, A100-40GB"),
        ({"engine": "jax"}, "engine 'jax' is unknown; choose one of megatron"),
        ({"gpus": 0}, "gpus is at least 1, not 0"),
        ({"gpus": 10**12}, "gpus = 1000000000000 cannot be right: it is at most 1,048,576"),
        ({"gpus_per_node": 4096}, "gpus_per_node = 4096 cannot be right: it is at most 1,024"),
        ({"gpus": 12}, "12 GPUs are not whole nodes of 8"),
        ({"memory_gib": 80 * 2**30}, "memory_gib = 85899345920 cannot be right: it is in GiB"),
        ({"network": 50e9}, "cannot be right: it is in Gbit/s for each GPU"),
        ({"efficiency": 70}, "efficiency = 70 cannot be right: it is in a part of the peak"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Cluster(**{"gpus": 16, **arguments})


def test_the_largest_clusters_can_be_meant():
    assert Cluster(2**20).gpus == 2**20 and Cluster(1024, 1024).gpus_per_node == 1024


def test_a_number_of_gpus_is_whole():
    with pytest.raises(TypeError, match=r"gpus is a whole number, not 16\.0"):
        Cluster(16.0)


def test_an_efficiency_that_no_run_has_calibrated_is_that_of_the_nearest():
    own = Cluster(8, gpu="H100", engine="megatron").matmul_efficiency
    assert Cluster(8, gpu="H200", engine="megatron").matmul_efficiency == own  # the same chip
    assert Cluster(8, gpu="H200", engine="fsdp-2023").matmul_efficiency != own
    # Of the same family, though not of the same engine: a smaller part of a higher peak.
    blackwell = Cluster(8, gpu="GB200", engine="megatron").matmul_efficiency
    assert Cluster(8, gpu="B200", engine="fsdp").matmul_efficiency == blackwell < own
    a100 = [
        value for (gpu, _), value in calibrations().items() if gpu in ("A100", "A100-40GB", "A800")
    ]
    other = Cluster(8, gpu="A100", engine="megatron").matmul_efficiency
    assert min(a100) < other < max(a100)
    assert Cluster(8, gpu="A100", efficiency=0.5).matmul_efficiency == 0.5


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"tp": 0}, "tp is at least 1, not 0"),
        ({"zero": 4}, "zero is one of 0, 1, 2, 3, not 4"),
        ({"recompute": "some"}, "recompute is one of none, selective, full, not 'some'"),
        ({"precision": "int8"}, "precision is one of bf16, fp8, fp32, not 'int8'"),
        ({"schedule": "chimera"}, "schedule 'chimera' does not exist"),
        ({"schedule": "pipedream", "pp": 2}, "schedule is one of one_f_one_b, gpipe"),
        ({"chunks": 2, "pp": 2}, "chunks = 2 with schedule 'one_f_one_b': only 'interleaved'"),
        ({"schedule": "interleaved"}, "'interleaved' with pp = 1"),
        ({"schedule": "zero_bubble_v"}, "'zero_bubble_v' with pp = 1: one stage has nothing"),
        ({"schedule": "dualpipe_v", "pp": 2, "chunks": 3}, "chunks = 3 .* a V has 2 on each rank"),
        ({"ep": 3}, "ep = 3 does not divide dp x cp = 8"),
        ({"zero_group": 3}, "zero_group = 3 does not divide dp x cp = 8"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(arguments, words):
    with pytest.raises(PlanError, match=words):
        Plan(**{"dp": 8, **arguments})


def test_a_degree_is_a_whole_number_and_a_flag_a_bool():
    with pytest.raises(TypeError, match=r"dp is a whole number, not 8\.0"):
        Plan(8.0)
    with pytest.raises(TypeError, match="sequence_parallel is True or False, not 1"):
        Plan(8, sequence_parallel=1)


@pytest.mark.parametrize(
    "plan, gpus, sequence, batch, words",
    [
        (Plan(4, 2), 16, 1024, 64, "dp x tp x pp x cp = 4 x 2 x 1 x 1 = 8, but .* 16 GPUs"),
        (Plan(1, 8), 8, 1024, 64, "heads = 12 is not a multiple of tp = 8"),
        (Plan(8), 8, 1024, 63, "global_batch = 63 sequences is not a multiple of .* 8 x 1"),
        (Plan(8), 8, 1024, 2**22, "global_batch = 4194304 looks like tokens"),
        (Plan(8), 8, 2**30, 64, "sequence_length = 1073741824 cannot be right: it is in tokens"),
        (Plan(1, 2, cp=4), 8, 1020, 64, "sequence_length = 1020 is not a multiple of cp x tp = 8"),
        (Plan(8, ep=8), 8, 1024, 64, "ep = 8, but the model has no experts"),
        (Plan(1, pp=16), 16, 1024, 64, "pp x chunks = 16 x 1 stages, but only 12 layers"),
        (
            Plan(4, pp=2, chunks=2, schedule="interleaved"),
            8,
            1024,
            12,
            "3 micro-batches are not a multiple of pp = 2",
        ),
    ],
)
def test_a_plan_that_does_not_divide_is_refused(plan, gpus, sequence, batch, words):
    with pytest.raises(PlanError, match=words):
        predict(MODEL, Cluster(gpus), plan, sequence, batch)


def test_a_length_or_batch_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError, match=r"global_batch is a number of sequences, not 64\.0"):
        predict(MODEL, Cluster(8), Plan(8), 1024, 64.0)
    with pytest.raises(TypeError, match="sequence_length is a number of tokens, not '1k'"):
        predict(MODEL, Cluster(8), Plan(8), "1k", 64)


def test_an_engine_that_leaves_stages_empty_is_refused():
    """The output layer of a small model is more than a stage's share: nanotron's rule."""
    model = Model(layers=16, hidden=2048, heads=32, ffn=8192, vocabulary=131072, gated=True)
    cluster = Cluster(16, engine="nanotron")
    with pytest.raises(PlanError, match="pp = 16: nanotron would leave the last stages without"):
        predict(model, cluster, Plan(1, pp=16), 4096, 256)
    assert predict(model, cluster, Plan(2, pp=8), 4096, 256).step_seconds > 0


def test_torchs_names_of_schedules_are_known():
    assert Plan(1, pp=2, schedule="1F1B").schedule == "one_f_one_b"


def test_a_v_has_both_ends_of_the_model_on_its_first_rank():
    plan = Plan(1, pp=4, schedule="zero_bubble_v")
    assert [plan.virtual_stages(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [plan.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    looped = Plan(1, pp=2, chunks=2, schedule="interleaved")
    assert [looped.virtual_stages(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert [looped.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    first = predict(MODEL, Cluster(4), plan, 1024, 16).memory[0]
    # Twelve layers on eight virtual stages: the two at the ends have one, and the embedding once.
    assert first.parameters == 2 * (2 * MODEL.layer_parameters() + MODEL.embedding_parameters)


def test_dualpipe_needs_two_micro_batches_for_each_rank():
    plan = Plan(1, pp=4, schedule="dualpipe_v")
    with pytest.raises(PlanError, match="7 micro-batches are less than 2 pp = 8"):
        predict(MODEL, Cluster(4), plan, 1024, 7)


def test_jobs_use_equally_many_gpus_of_each_rack():
    """Of racks of 72, 64 are used for a power of two: whole trays of four."""
    used = {gpus: Cluster(gpus, gpu="GB200").gpus_per_node for gpus in (8, 72, 144, 128, 256, 96)}
    assert used == {8: 72, 72: 72, 144: 72, 128: 64, 256: 64, 96: 48}
    with pytest.raises(ValueError, match="146 GPUs are not whole nodes of 72"):
        Cluster(146, gpu="GB200")
    with pytest.raises(ValueError, match="12 GPUs are not whole nodes of 8"):
        Cluster(12, gpu="H100")
    with pytest.raises(ValueError, match="128 GPUs are not whole nodes of 72"):
        Cluster(128, 72, gpu="GB200")


def test_an_engine_may_refuse_a_pipeline_that_it_cannot_fill():
    """nanotron, `parallel/pipeline_parallel/engine.py`: at least `pp` - 1 micro-batches."""
    plan = Plan(1, pp=4)
    with pytest.raises(
        PlanError, match="2 micro-batches are fewer than pp - 1 = 3, which nanotron"
    ):
        predict(MODEL, Cluster(4, engine="nanotron"), plan, 1024, 2)
    assert predict(MODEL, Cluster(4, engine="nanotron"), plan, 1024, 3).step_seconds > 0
    assert predict(MODEL, Cluster(4), plan, 1024, 2).step_seconds > 0
    # torch's `Schedule1F1B` raises an error, and its `ScheduleGPipe` does not.
    with pytest.raises(PlanError, match="3 micro-batches are fewer than pp = 4, which fsdp needs"):
        predict(MODEL, Cluster(4, engine="fsdp"), plan, 1024, 3)
    assert predict(MODEL, Cluster(4, engine="fsdp"), plan, 1024, 4).step_seconds > 0
    flushed = replace(plan, schedule="gpipe")
    assert predict(MODEL, Cluster(4, engine="fsdp"), flushed, 1024, 3).step_seconds > 0


def test_nanotron_ends_a_stage_where_its_share_is_reached():
    """The sweep's 1B has 16 layers and an output layer of as many operations as four. On its first
    of 2 and 4 stages its source counts 940 and 604 million parameters: with the embedding, those
    of 10 and 5 layers."""
    model = Model(16, 2048, 32, 8192, 131072, gated=True)
    for stages, layers, millions in ((2, 10, 940), (4, 5, 604)):
        assert len(cut(model, stages, "cumulative").layers[0]) == layers
        held = model.embedding_parameters + layers * model.layer_parameters()
        assert held / 1e6 == pytest.approx(millions, abs=1)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Plan(8, zero_group="2"), TypeError, "zero_group is a whole number, not '2'"),
        (lambda: Plan(None), TypeError, "dp is a whole number, not None"),
        (lambda: Plan(8, schedule=None), TypeError, "schedule is a name, such as 'gpipe', not No"),
        (lambda: Cluster("8"), TypeError, "gpus is a whole number, not '8'"),
        (lambda: Cluster(8, network="400"), TypeError, "network is a number, not '400'"),
        (lambda: Cluster(8, gpu=["H100"]), ValueError, "is not in the table"),
        (lambda: Machine(4), ValueError, "what was measured; give layer, near, far"),
        (lambda: Model(2, None, 2), TypeError, "hidden is a whole number, not None"),
        (lambda: Model(2, 128, 2, tied="no"), TypeError, "tied is True or False, not 'no'"),
        (lambda: Model(2, 128, 2, latent=(0, 32)), TypeError, r"latent is a Latent\("),
        (
            lambda: Model(2, 128, 2, latent=Latent(0, 0, 1, 1, 1)),
            ValueError,
            "key_rank is at least",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_integers_of_other_types_are_integers():
    """Such as numpy's, which Python's own arithmetic would turn into more of their kind."""
    two, eight, size = map(Index, (2, 8, 128))
    model = Model(two, size, two, kv_heads=two)
    assert model == Model(2, 128, 2) and type(model.hidden) is int
    plan, cluster = Plan(eight, zero=two, zero_group=two), Cluster(eight)
    assert plan == Plan(8, zero=2, zero_group=2) and type(cluster.gpus_per_node) is int
    forecast = predict(model, cluster, plan, size, eight)
    assert forecast == predict(model, Cluster(8), plan, 128, 8)
    assert search(model, cluster, size, eight, best=two).plans


class Index:
    """An integer by `__index__` alone."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_a_sequence_is_no_longer_than_what_has_learned_positions():
    model = replace(MODEL, positions=1024)
    assert predict(model, Cluster(8), Plan(8), 1024, 64).step_seconds > 0
    with pytest.raises(PlanError, match="sequence_length = 2048, but the model has learned only"):
        predict(model, Cluster(8), Plan(8), 2048, 64)


def test_a_gpu_without_fp8_refuses_it():
    words = "precision = 'fp8': A100 does not multiply in it; choose one of bf16, fp32"
    with pytest.raises(PlanError, match=words):
        predict(MODEL, Cluster(8, gpu="A100"), Plan(8, precision="fp8"), 1024, 64)
    with pytest.raises(PlanError, match=f"no plan is possible .* {words}"):
        search(MODEL, Cluster(8, gpu="A100"), 1024, 64, precision="fp8")


def test_the_width_that_some_layer_has_is_divided():
    odd = {"ffn": 10943, "experts": 64, "top_k": 6, "gated": True}
    experts = Model(4, 2048, 16, expert_ffn=1408, **odd)
    assert predict(experts, Cluster(8), Plan(1, 8), 1024, 8).step_seconds > 0
    with pytest.raises(PlanError, match="ffn = 10943 is not a multiple of tp = 8"):
        predict(replace(experts, dense_layers=1), Cluster(8), Plan(1, 8), 1024, 8)
    with pytest.raises(PlanError, match="expert_ffn = 1407 is not a multiple of tp = 8"):
        predict(replace(experts, expert_ffn=1407), Cluster(8), Plan(1, 8), 1024, 8)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"zero": 3}, "zero = 3: this machine was measured with 0"),
        ({"recompute": "full"}, "recompute = 'full': this machine was measured with 'none'"),
        ({"precision": "bf16"}, "precision = 'bf16': this machine was measured with 'fp32'"),
        ({"ep": 2}, "ep = 2: this machine was measured with 1"),
        ({"tp": 2, "dp": 2}, "sequence_parallel = True: this machine was measured with False"),
    ],
)
def test_a_machine_refuses_what_was_not_measured(more, words):
    line = Line(1e-6, 1e-9)
    machine = Machine(4, layer=Layer(line, line, 0.5), near=line, far=line, peak=1e9)
    plan = {"dp": 4, "precision": "fp32"} | more
    assert predict(MODEL, machine, Plan(4, precision="fp32"), 1024, 4).step_seconds > 0
    with pytest.raises(PlanError, match=words):
        predict(MODEL, machine, Plan(**plan), 1024, 4)


@pytest.mark.parametrize("engine, has", [("nanotron", False), ("megatron", True), ("fsdp", True)])
def test_an_engine_without_a_schedule_is_not_forecast_with_it(engine, has):
    cluster, plan = Cluster(8, engine=engine), Plan(4, pp=2, schedule="interleaved", chunks=2)
    words = "schedule = 'interleaved': nanotron does not have it; choose one of gpipe, one_f_one_b"
    with contextlib.nullcontext() if has else pytest.raises(PlanError, match=words):
        predict(MODEL, cluster, plan, 1024, 16)
    assert predict(MODEL, cluster, replace(plan, schedule="gpipe", chunks=1), 1024, 16)
    if not has:
        found = search(MODEL, cluster, 1024, 16)
        assert {plan.schedule for plan, _ in found.plans} <= {"one_f_one_b"}
