"""What engines do differently, each beside the arithmetic that its column stands for."""

from dataclasses import replace

import pytest

from naranhi.planning import Cluster, Model, Plan, predict, sharding
from naranhi.planning import communication as comm
from naranhi.planning import engine as engine_module
from naranhi.planning.compute import (
    Arithmetic,
    _add,
    _permuting_bytes,
    attention_work,
    optimizer_seconds,
)
from naranhi.planning.engine import engines
from naranhi.planning.model import Matmul
from naranhi.planning.pipeline import pipeline_seconds
from naranhi.planning.prediction import layer_times, stage_times

LLAMA = Model(
    layers=8, hidden=1024, heads=16, kv_heads=4, ffn=3584, gated=True, tied=False, vocabulary=32000
)
SPARSE = replace(LLAMA, experts=64, top_k=8)


@pytest.fixture
def changed(monkeypatch):
    """Return a function that makes a cluster whose engine differs in some columns."""

    def change(cluster, **columns):
        own = cluster.runs._replace(**columns)
        table = engines() | {own.name: own}
        monkeypatch.setattr(engine_module, "engines", lambda: table)
        monkeypatch.setattr("naranhi.planning.cluster.engines", lambda: table)
        return cluster

    return change


def test_the_last_rank_of_an_unbalanced_ring_meets_all_keys(changed):
    """Of 4 x 4 blocks, its own diagonal counts half: 3.5 of an average of 2."""
    cluster, plan = Cluster(4, engine="megatron"), Plan(1, cp=4)
    equal = attention_work(LLAMA, cluster, plan, 4096).forward
    last = attention_work(LLAMA, changed(cluster, balanced_ring=False), plan, 4096).forward
    assert last / equal == pytest.approx(3.5 / 2)


def test_one_port_gives_an_eighth_of_eight(changed):
    cluster = Cluster(64, network=100)
    all_of_them = comm.group_link(cluster, 64, 1).bandwidth
    assert comm.group_link(changed(cluster, ports=1), 64, 1).bandwidth == all_of_them / 8


def test_a_token_goes_once_to_each_node_that_has_one_of_its_experts(changed):
    cluster, plan = Cluster(64), Plan(64, ep=64)
    copies = comm.expert_layer(SPARSE, cluster, plan, 4096).forward
    once = comm.expert_layer(SPARSE, changed(cluster, expert_nodes=8), plan, 4096).forward
    four = comm.expert_layer(SPARSE, changed(cluster, expert_nodes=4), plan, 4096).forward
    hidden = comm.expert_layer(SPARSE, changed(cluster, expert_overlap=0.9), plan, 4096).forward
    port = cluster.network_bandwidth * comm.NETWORK
    each = 2 * 4096 * 1024 / port  # seconds of all tokens, over one port, once
    nvlink = 2 * 8 * 2 * 4096 * 1024 / (cluster.sheet.nvlink * comm.NVLINK)
    # Two ways: 8 x 7/8 copies, against 8 x (1 - (7/8)^8) x 7/8 nodes of eight.
    visited = 8 * (1 - (7 / 8) ** 8)
    # Copies to other nodes go on over NVLink there: all but those for the rank itself.
    more_inside = nvlink * (63 / 64 - 7 / 64)
    outside = 2 * 7 / 8 * each
    assert copies - once == pytest.approx(outside * (8 - visited) - more_inside)
    assert once - four == pytest.approx(outside * (visited - 4))
    assert hidden == pytest.approx(four * 0.1)  # the fixture's changes add up


def test_deepep_sends_no_second_copy_to_a_node():
    """Beyond a node less than the copies of an all-to-all, inside of one the same."""
    far, near = Plan(64, ep=64), Plan(64, ep=8)
    for plan, least, most in (far, 0.75, 0.9), (near, 1, 1):
        copies, once = (
            comm.expert_layer(SPARSE, Cluster(64, engine=engine), plan, 4096).forward
            for engine in ("megatron", "megatron-deepep")
        )
        assert least <= once / copies <= most, plan


def test_engines_of_one_program_share_its_matmuls_and_differ_in_what_their_names_say():
    """What runs calibrate of NeMo holds for all of Megatron-Core; attention has its own date."""
    now, then = Cluster(8), Cluster(8, engine="megatron-2024")
    assert now.calibrated and then.calibrated
    nemo = Cluster(8, engine="nemo").matmul_efficiency
    assert then.matmul_efficiency == now.matmul_efficiency == nemo
    plan = Plan(8)
    ratio = attention_work(LLAMA, then, plan, 131072).forward
    ratio /= attention_work(LLAMA, now, plan, 131072).forward
    assert ratio == pytest.approx(now.sheet.flash[2] / now.sheet.flash[1], rel=0.02)
    assert engines()["nemo-2024"]._replace(name="nemo", flash=3, note="") == engines()[
        "nemo"
    ]._replace(note="")


def test_buckets_grow_with_the_ranks_so_that_a_ring_stays_bound_by_its_bytes(changed):
    """Of 4 billion fp32 gradients over 512 ranks: 8 messages of 2,048 MB, not 100 of 160 MB."""
    cluster, plan = Cluster(2048), Plan(512, 4, zero=1)
    link = comm.group_link(cluster, 512, 4)
    reduce, _ = sharding.gradient_seconds(cluster, plan, 4.096e9)
    starts = comm.NETWORK_START + (link.nodes - 1) * link.latency
    starts += (512 - link.nodes) * comm.NVLINK_LATENCY
    bytes_sent = 4 * 4.096e9 * 511 / 512
    assert reduce == pytest.approx(8 * starts + bytes_sent / link.bandwidth)
    few = Plan(8, 4, zero=1)
    same, _ = sharding.gradient_seconds(changed(Cluster(32), bucket_rank_bytes=0.0), few, 4.096e9)
    assert sharding.gradient_seconds(Cluster(32, engine="deepseek"), few, 4.096e9)[0] == same


def test_tensor_ranks_gather_the_copies_that_arrive_for_their_experts():
    """Attention's half of the messages is that of a dense layer; the experts' is top_k as much."""
    cluster = Cluster(32)
    dense = comm.tensor_layer(SPARSE, cluster, Plan(8, 4), 4096)
    held = comm.tensor_layer(SPARSE, cluster, Plan(8, 4), 4096, sparse=True)
    split = comm.tensor_layer(SPARSE, cluster, Plan(8, 4, ep=8), 4096, sparse=True)
    assert held == dense
    # Half of a dense layer's messages run behind matmuls; those of experts have none to run behind.
    assert split.forward == pytest.approx(dense.forward * (1 / 2 + 2 * 8 / 2))


def test_copies_are_sorted_once_more_where_a_rank_has_several_experts():
    def elementwise(ep, experts):
        model = replace(SPARSE, experts=experts)
        gpu = Arithmetic(Cluster(64), "bf16")
        return _permuting_bytes(model, gpu, Plan(64, ep=ep), 4096, experts // ep)

    token = 2 * 4096 * 1024
    assert elementwise(8, 8) == elementwise(1, 64) == token * 2 * 9
    assert elementwise(8, 64) == token * (2 * 9 + 4 * 8)


def test_fp8_casts_what_no_norm_writes_in_kernels_of_their_own():
    cluster = Cluster(8)
    gpu, plain = Arithmetic(cluster, "fp8"), Arithmetic(cluster, "bf16")
    assert gpu.cast(1e9) == pytest.approx(4e9 / (cluster.sheet.bandwidth * 0.85))
    assert plain.cast(1e9) == 0
    for split, inputs in (("columns", 0), ("rows", 512 * 1000)):
        matmul = Matmul(1000, 2000, split)
        forward, backward = _add(0.0, 0.0, gpu, matmul, 512, 1)
        assert forward == pytest.approx(gpu.matmul(512, 1000, 2000) + gpu.cast(inputs))
        without = gpu.matmul(512, 1000, 2000) + gpu.matmul(512, 1000, 2000, 8 * 2e6)
        assert backward == pytest.approx(without + gpu.cast(512 * 2000))


def test_fp8_is_less_certain_than_the_precision_that_was_calibrated():
    widths = []
    for precision in ("bf16", "fp8"):
        found = predict(LLAMA, Cluster(8), Plan(8, precision=precision), 4096, 64)
        widths.append(found.high / found.low)
    assert widths[1] > widths[0] + 0.03


def test_small_experts_are_less_certain_than_large_ones():
    """Qwen3-235B on 64 B200 with fp8 took 1.7 times as long as forecast, at 3,269 tokens a second
    (Megatron Bridge, performance summary); Mixtral's experts are as wide as a dense MLP."""
    sizes = {"kv_heads": 4, "head_dim": 128, "gated": True, "tied": False}
    experts = {"experts": 128, "top_k": 8, "expert_ffn": 1536}
    qwen = Model(94, 4096, 64, 12288, 151936, **sizes, **experts)
    plan = Plan(8, pp=8, ep=8, chunks=2, schedule="interleaved", precision="fp8", zero=1)
    found = predict(qwen, Cluster(64, gpu="B200", engine="nemo"), plan, 4096, 1024)
    published = 1024 * 4096 / 64 / 3269
    assert published > 1.6 * found.step_seconds and found.low < published < found.high
    mixtral, dense = replace(LLAMA, experts=8, top_k=2), LLAMA
    widths = [predict(model, Cluster(8), Plan(8), 4096, 64) for model in (mixtral, dense)]
    assert widths[0].high / widths[0].low == pytest.approx(widths[1].high / widths[1].low, rel=0.1)


def test_a_stage_that_waits_for_its_messages_waits_with_each_neighbour(changed):
    plan, cluster = Plan(1, 8, 4), Cluster(32, engine="megatron-2021", gpu="A100")
    free = predict(LLAMA, cluster, plan, 2048, 16)
    times = stage_times(LLAMA, cluster, plan, 2048)
    waits = predict(LLAMA, changed(cluster, blocking_messages=True), plan, 2048, 16)
    whole = 2 * 2048 * 1024 / (cluster.network_bandwidth * comm.NETWORK)  # not an eighth of it
    hop = comm.NVLINK_START + comm.NETWORK_LATENCY + whole
    neighbours = (1, 2, 2, 1)
    forward = [t.forward + n * hop for t, n in zip(times, neighbours, strict=True)]
    backward = [t.backward + n * hop for t, n in zip(times, neighbours, strict=True)]
    flowing = pipeline_seconds(
        "one_f_one_b", 16, tuple(t.forward for t in times), tuple(t.backward for t in times)
    )
    through = pipeline_seconds("one_f_one_b", 16, tuple(forward), tuple(backward))
    assert waits.parts["pipeline"] == pytest.approx(through - flowing)
    assert waits.parts["pipeline"] > 2 * free.parts["pipeline"]


@pytest.mark.parametrize(
    "tp, nodes, least", [(1, 2, 4.3e-3), (2, 2, 6e-3), (8, 2, 24e-3), (8, 1, 0)]
)
def test_a_layer_of_a_pipeline_between_nodes_takes_its_time_for_each_rank(tp, nodes, least):
    """Where that is more than what the host takes for every layer; within a node it never is."""
    stages = max(2, 8 * nodes // tp)
    small, plan = Model(4 * stages, 64, 8), Plan(1, tp, stages)
    cluster = Cluster(tp * stages, 16 // nodes, engine="nanotron")
    layer = layer_times(small, cluster, plan, 64, sparse=False)
    assert layer.forward + layer.backward == pytest.approx(least or 4.3e-3)
    host = cluster.runs.host_seconds
    other = layer_times(small, Cluster(tp * stages), plan, 64, sparse=False)
    assert other.forward + other.backward < host


@pytest.mark.parametrize("gpu", ["A100", "H100", "B200"])
def test_in_fp32_attention_is_no_faster_than_the_processor(gpu):
    """FlashAttention has 16 bits only: at its rate the MFU of long sequences was above 1."""
    for engine in ("megatron", "fsdp-2023", "megatron-2021"):
        cluster = Cluster(8, gpu=gpu, engine=engine, memory_gib=2000)
        for tokens in (2**13, 2**17, 2**20):
            plan = Plan(1, cp=8, precision="fp32")
            assert 0 < predict(LLAMA, cluster, plan, tokens, 8).mfu < 1


def test_gradients_of_fp32_parameters_have_four_bytes():
    plan = Plan(8, zero=1)
    in_fp32 = replace(plan, precision="fp32")
    for engine, ratio in (("nemo", 2), ("megatron", 1)):
        cluster = Cluster(8, engine=engine)
        reduced = [sharding.gradient_seconds(cluster, p, 4e9)[0] for p in (plan, in_fp32)]
        assert reduced[1] == pytest.approx(ratio * reduced[0], rel=0.01)
        updated = [optimizer_seconds(cluster, 4e9, p.precision) for p in (plan, in_fp32)]
        bytes_of_each = 5 * cluster.runs.gradient_bytes + 26, 5 * 4 + 24
        assert updated[1] / updated[0] == pytest.approx(bytes_of_each[1] / bytes_of_each[0])


@pytest.mark.parametrize(
    "recompute, launched", [("none", 1), ("selective", 7 / 6), ("full", 4 / 3)]
)
def test_a_host_launches_what_is_computed_again(recompute, launched):
    """Of three parts, of which a forward is one; selective recomputation of FSDP repeats half."""
    cluster = Cluster(8, engine="fsdp")
    plan = Plan(8, recompute=recompute)
    layer = layer_times(LLAMA, cluster, plan, 8, sparse=False)
    least = cluster.runs.host_seconds * launched
    assert layer.forward + layer.backward == pytest.approx(least)
    assert layer.parts["host"] > 0.1 * least


def test_late_micro_batches_are_in_the_upper_end_only(changed):
    cluster = Cluster(16, engine="nanotron")
    late = predict(LLAMA, cluster, Plan(16), 1024, 64)
    usual = predict(LLAMA, changed(cluster, stall_seconds=0.0), Plan(16), 1024, 64)
    assert late.high - usual.high == pytest.approx(4 * 1.7)
    assert late[:2] == usual[:2]
    one_node = predict(LLAMA, Cluster(8, engine="nanotron"), Plan(8), 1024, 64)
    assert one_node.high / one_node.step_seconds < 2


def test_nemo_keeps_gradients_in_bf16_and_shares_the_kernels_of_megatron():
    ours, theirs = Cluster(8, engine="nemo"), Cluster(8)
    assert ours.matmul_efficiency == theirs.matmul_efficiency
    assert ours.calibrated and theirs.calibrated and not Cluster(8, gpu="B200").calibrated
    plan = Plan(8, zero=1)
    less = predict(LLAMA, theirs, plan, 1024, 8).memory[0].gradients
    less -= predict(LLAMA, ours, plan, 1024, 8).memory[0].gradients
    assert less == pytest.approx(2 * LLAMA.parameters, rel=1e-4)  # without the last norm
    assert (
        sharding.gradient_seconds(ours, plan, 4e9)[0]
        < sharding.gradient_seconds(theirs, plan, 4e9)[0]
    )


def test_an_engine_has_its_own_headroom():
    for name, row in engines().items():
        cluster = Cluster(8, engine=name)
        assert cluster.capacity == cluster.memory * (1 - row.headroom)
        assert predict(LLAMA, cluster, Plan(8), 1024, 8).capacity == cluster.capacity


@pytest.mark.parametrize("tp, ep", [(1, 8), (1, 16), (8, 2), (8, 8), (4, 8), (2, 16)])
def test_copies_leave_the_node_whose_experts_are_elsewhere(tp, ep, monkeypatch):
    """Counted rank by rank: of the ranks of a group, `tp` apart, some are in the first one's node.

    Each sends an equal share of its copies to every rank of the group.
    """
    cluster = Cluster(max(8, tp * ep))
    monkeypatch.setattr(comm, "NVLINK_START", 0.0)
    monkeypatch.setattr(comm, "NETWORK_START", 0.0)
    monkeypatch.setattr(comm, "NVLINK_LATENCY", 0.0)
    monkeypatch.setattr(comm, "NETWORK_LATENCY", 0.0)
    nodes = [rank * tp // 8 for rank in range(ep)]
    copies = 2 * 4096 / tp * 1024 * 8
    near, far = nodes.count(nodes[0]) - 1, ep - nodes.count(nodes[0])
    seconds = copies * near / ep / (cluster.sheet.nvlink * comm.NVLINK)
    seconds += copies * far / ep / (cluster.network_bandwidth * comm.NETWORK)
    plan = Plan(cluster.gpus // tp, tp, ep=ep)
    found = comm.expert_layer(SPARSE, cluster, plan, 4096).forward
    assert found == pytest.approx(2 * seconds, rel=1e-9)


@pytest.mark.parametrize("gpu, peak", [("A100", 19.5), ("H100", 66.9)])
def test_fp32_is_that_of_ieee_as_torch_multiplies_by_default(gpu, peak):
    cluster = Cluster(8, gpu=gpu, engine="fsdp", memory_gib=2000)
    found = predict(LLAMA, cluster, Plan(8, zero=3, precision="fp32"), 4096, 64)
    assert 0.3 * peak < found.tflops_per_gpu < peak


def test_each_step_of_a_ring_between_nodes_takes_its_time(changed):
    """Four collectives of a layer's forward, and as many in its backward, of 15 steps each."""
    cluster = Cluster(16, engine="nanotron")
    rings = comm.tensor_layer(LLAMA, cluster, Plan(1, 16), 4096)
    in_a_node = comm.tensor_layer(LLAMA, cluster, Plan(2, 8), 4096)
    without = changed(cluster, ring_step_seconds=0.0)
    plain = comm.tensor_layer(LLAMA, without, Plan(1, 16), 4096)
    assert rings.forward - plain.forward == pytest.approx(4 * 15 * 50e-6)
    assert rings.backward - plain.backward == pytest.approx(4 * 15 * 50e-6)
    assert comm.tensor_layer(LLAMA, without, Plan(2, 8), 4096) == in_a_node
