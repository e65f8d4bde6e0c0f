"""Our collectives against their definition and against torch's own, on real gloo ranks."""

import hashlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sent import messages

from naranhi import collectives, costs, measure
from naranhi.collectives import chunks

WORLD = 5
GROUPS = {}  # in a rank: the groups made so far, by their members

# Renamed in torch 2.13.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
DTYPES += ["bool", "complex64"]
# Those that all of torch's own collectives on gloo take.
TORCH_DTYPES = [dtype for dtype in DTYPES if dtype not in ("int16", "bool", "complex64")]


def group_of(members):
    """The group of these ranks; every rank of the world must ask for it at the same time."""
    if members not in GROUPS:
        GROUPS[members] = None if len(members) == WORLD else dist.new_group(list(members))
    return GROUPS[members]


def values(rank, shape, dtype, seed):
    """What `rank` brings: small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 5, shape, generator=generator).to(getattr(torch, dtype))


def summed(tensors):
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    return total


def scattered_in_memory(tensor):
    """The same values in memory that is not contiguous (where there is more than one)."""
    wide = tensor.new_zeros((*tensor.shape, 2))
    wide[..., 0] = tensor
    return wide[..., 0]


def algorithms(collective, ranks):
    """Those of this collective that so many ranks can run."""
    return [
        name
        for name in costs.ALGORITHMS[collective]
        if name != "tree"
        and (ranks & (ranks - 1) == 0 or (collective, name) not in costs.POWER_OF_TWO_ONLY)
    ]


def case(members, shape, dtype, root, seed, message, in_flight):
    """Every collective once on the group of `members`: what differs from its definition."""
    group = group_of(members)
    if dist.get_rank() not in members:
        return []
    usual = chunks.MESSAGE, chunks.IN_FLIGHT
    chunks.MESSAGE, chunks.IN_FLIGHT = message, in_flight
    try:
        return list(_differences(group, shape, dtype, root, seed))
    finally:
        chunks.MESSAGE, chunks.IN_FLIGHT = usual


def _differences(group, shape, dtype, root, seed):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    brought = [values(peer, shape, dtype, seed) for peer in range(ranks)]
    rows = [values(peer, (ranks, *shape), dtype, seed + 1) for peer in range(ranks)]
    nan = torch.full((ranks, *shape), 77).to(brought[0].dtype)  # what no result is made of
    is_root = rank == root

    def differs(what, actual, expected):
        if not torch.equal(actual, expected):
            yield f"{what} on rank {rank} of {ranks}: {actual} is not {expected}"

    tensor = brought[rank].clone()
    collectives.broadcast(tensor, root, group)
    yield from differs("broadcast", tensor, brought[root])

    tensor = brought[rank].clone()
    collectives.reduce(tensor, root, group)
    yield from differs("reduce", tensor, summed(brought) if is_root else brought[rank])

    for algorithm in (None, *algorithms("all_reduce", ranks)):
        tensor = brought[rank].clone()
        collectives.all_reduce(tensor, group, algorithm)
        yield from differs(f"all_reduce, {algorithm}", tensor, summed(brought))

    output = nan[0].clone()
    collectives.scatter(output, scattered_in_memory(rows[root]) if is_root else None, root, group)
    yield from differs("scatter", output, rows[root][rank])

    output = nan.clone() if is_root else None
    collectives.gather(output, scattered_in_memory(brought[rank]), root, group)
    if is_root:
        yield from differs("gather", output, torch.stack(brought))

    for algorithm in (None, *algorithms("all_gather", ranks)):
        output = nan.clone()
        collectives.all_gather(output, scattered_in_memory(brought[rank]), group, algorithm)
        yield from differs(f"all_gather, {algorithm}", output, torch.stack(brought))

    for algorithm in (None, *algorithms("reduce_scatter", ranks)):
        for own in (rows[rank].clone(), scattered_in_memory(rows[rank])):
            output = nan[0].clone()
            collectives.reduce_scatter(output, own, group, algorithm)
            yield from differs(f"reduce_scatter, {algorithm}", output, summed(rows)[rank])
            yield from differs("what reduce_scatter was given", own, rows[rank])
        own = rows[rank].clone()
        collectives.reduce_scatter(own[rank], own, group, algorithm)
        yield from differs(f"reduce_scatter in place, {algorithm}", own[rank], summed(rows)[rank])

    output = nan.clone()
    collectives.all_to_all(output, scattered_in_memory(rows[rank]), group)
    yield from differs("all_to_all", output, torch.stack([row[rank] for row in rows]))


members = st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=members,
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    root=st.integers(0, WORLD - 1),
    seed=st.integers(0, 99),
    message=st.sampled_from([16, 64, 2**21]),
    in_flight=st.integers(1, 5),
)
def test_every_collective_is_its_definition(
    five, members, shape, dtype, root, seed, message, in_flight
):
    root %= len(members)
    found = five.call(case, members, shape, dtype, root, seed, message, in_flight)
    assert not any(found), found


def beside_torch(members, dtype, numel):
    """The same on torch's own collectives: what differs."""
    group = group_of(members)
    if dist.get_rank() not in members:
        return []
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    root = ranks - 1
    own, rows = values(rank, (numel,), dtype, 1), values(rank, (ranks, numel), dtype, 2)
    pairs = {}

    def both(name, ours, theirs, make):
        a, b = make(), make()
        ours(a)
        theirs(b)
        pairs[name] = a, b

    both(
        "broadcast",
        lambda t: collectives.broadcast(t, root, group),
        lambda t: dist.broadcast(t, group=group, group_src=root),
        own.clone,
    )
    both(
        "all_gather",
        lambda t: collectives.all_gather(t, own, group),
        lambda t: torch_all_gather(t.view(-1), own, group=group),
        lambda: torch.zeros_like(rows),
    )
    both(
        "all_to_all",
        lambda t: collectives.all_to_all(t, rows, group),
        lambda t: dist.all_to_all_single(t, rows, group=group),
        lambda: torch.zeros_like(rows),
    )
    both(
        "scatter",
        lambda t: collectives.scatter(t, rows if rank == root else None, root, group),
        lambda t: dist.scatter(
            t, list(rows) if rank == root else None, group=group, group_src=root
        ),
        lambda: torch.zeros_like(own),
    )
    gathered = torch.zeros_like(rows)
    collectives.gather(gathered if rank == root else None, own, root, group)
    parts = list(torch.zeros_like(rows))
    dist.gather(own, parts if rank == root else None, group=group, group_dst=root)
    pairs["gather"] = gathered, torch.stack(parts)
    for algorithm in algorithms("all_reduce", ranks):
        both(
            algorithm,
            lambda t, algorithm=algorithm: collectives.all_reduce(t, group, algorithm),
            lambda t: dist.all_reduce(t, group=group),
            own.clone,
        )
    both(
        "reduce_scatter",
        lambda t: collectives.reduce_scatter(t, rows, group),
        lambda t: torch_reduce_scatter(t, rows.view(-1), group=group),
        lambda: torch.zeros_like(own),
    )
    if rank == root:
        both(
            "reduce",
            lambda t: collectives.reduce(t, root, group),
            lambda t: dist.reduce(t, group=group, group_dst=root),
            own.clone,
        )
    else:
        collectives.reduce(own.clone(), root, group)
        dist.reduce(own.clone(), group=group, group_dst=root)
    return [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_as_torch_does_it(five, dtype):
    for size in (2, 4, 5):
        for numel in (1, 1000):
            found = five.call(beside_torch, tuple(range(WORLD - size, WORLD)), dtype, numel)
            assert not any(found), (size, numel, found)


def real_sums(numel, algorithm):
    """(this rank's bits, their distance to torch's and to the exact sum) for normal numbers."""
    brought = torch.randn(WORLD, numel, generator=torch.Generator().manual_seed(0))
    ours, theirs = brought[dist.get_rank()].clone(), brought[dist.get_rank()].clone()
    collectives.all_reduce(ours, algorithm=algorithm)
    dist.all_reduce(theirs)
    exact = brought.double().sum(0)
    bits = hashlib.sha256(ours.numpy().tobytes()).hexdigest()
    return bits, (ours - theirs).abs().max().item(), (ours - exact).abs().max().item()


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "doubling", None])
def test_sums_are_the_same_bits_on_every_rank(five, algorithm):
    """Long enough for several pieces; not divisible by anything; the default group."""
    results = five.call(real_sums, 3_000_011, algorithm)
    for bits, from_torch, from_exact in results:
        assert bits == results[0][0]
        assert from_torch < 1e-5 and from_exact < 1e-5


def one_batch_at_a_time():
    """Run everything as one NCCL communicator would: each batch to its end before the next."""
    start = chunks.start

    def run_to_the_end(*messages, **options):
        chunks.finish(start(*messages, **options))
        return []  # a second wait on one of gloo's messages would wait for another message

    found = []
    with mock.patch.object(chunks, "start", run_to_the_end):
        for size in range(2, WORLD + 1):
            for root in {0, size - 1}:
                found += case(tuple(range(size)), (3, 7), "float32", root, 5, 16, 3)
    return found


def test_no_deadlock_where_messages_run_in_the_order_they_were_started(five):
    assert not any(five.call(one_batch_at_a_time))


def in_batches():
    """(differences, batches) of a group whose backend is taken for NCCL, though gloo sends."""
    group = dist.new_group([1, 3, 4])
    if dist.get_rank() not in (1, 3, 4):
        return [], 0
    batch = dist.batch_isend_irecv
    nccl = mock.patch.object(chunks, "backend_for", return_value="nccl")
    with nccl, mock.patch.object(dist, "batch_isend_irecv", wraps=batch) as batches:
        return list(_differences(group, (3, 7), "float32", 2, seed=5)), batches.call_count


def test_batches_as_for_nccl_carry_the_same_messages(five):
    for rank, (found, batches) in enumerate(five.call(in_batches)):
        assert not found
        assert (batches > 0) == (rank in (1, 3, 4))


def sent(members, collective, numel, algorithm, root):
    """(bytes handed to isend, bytes on the wire) of this rank in one collective of float32."""
    group = group_of(members)
    if dist.get_rank() not in members:
        dist.barrier(), dist.barrier()
        return 0, 0
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole, block = torch.ones(numel), torch.ones(numel // ranks)
    rows = whole.view(ranks, -1)
    only_root = rows if rank == root else None
    runs = {
        "broadcast": lambda: collectives.broadcast(whole, root, group),
        "reduce": lambda: collectives.reduce(whole, root, group),
        "scatter": lambda: collectives.scatter(block, only_root, root, group),
        "gather": lambda: collectives.gather(only_root, block, root, group),
        "all_gather": lambda: collectives.all_gather(rows, block, group, algorithm),
        "reduce_scatter": lambda: collectives.reduce_scatter(block, rows, group, algorithm),
        "all_to_all": lambda: collectives.all_to_all(torch.empty_like(rows), rows, group),
        "all_reduce": lambda: collectives.all_reduce(whole, group, algorithm),
        "gloo's all_reduce": lambda: dist.all_reduce(whole, group=group),
        "gloo's reduce_scatter": lambda: torch_reduce_scatter(block, whole, group=group),
    }
    runs[collective]()  # connections are made by the first message
    dist.barrier()
    before = measure.wire_bytes()
    with messages() as handed:
        runs[collective]()
    dist.barrier()
    return sum(one.nbytes for one in handed), measure.wire_bytes() - before


KNOWN = [(name, algorithm) for name, known in costs.ALGORITHMS.items() for algorithm in known]
KNOWN.remove(("all_reduce", "tree"))  # reduce, then broadcast: no function of its own


@pytest.mark.parametrize(("collective", "algorithm"), KNOWN)
def test_bytes_sent_are_what_the_formula_says(five, collective, algorithm):
    for ranks in (1, 2, 3, 4, 5):
        if (collective, algorithm) in costs.POWER_OF_TWO_ONLY and ranks & (ranks - 1):
            continue
        numel = 120_000  # divisible by every number of ranks, and by the halves of their halves
        answers = five.call(sent, tuple(range(ranks)), collective, numel, algorithm, ranks - 1)[
            :ranks
        ]
        expected = costs.bytes_sent(collective, 4 * numel, ranks, algorithm)
        assert max(handed for handed, _ in answers) == pytest.approx(expected, rel=1e-12)
        for handed, wire in answers:
            assert handed <= wire <= handed + 20_000  # headers, notices and two barriers


def test_gloos_own_reduce_scatter_moves_an_all_reduce(five):
    """Why ours is built on a ring of our own: (n-1)/n of the bytes, not twice that."""
    numel = 1_200_000
    for ranks in (2, 4):
        members = tuple(range(ranks))
        for name, formula in [
            ("reduce_scatter", "reduce_scatter"),
            ("gloo's reduce_scatter", "all_reduce"),
            ("gloo's all_reduce", "all_reduce"),
        ]:
            for _, wire in five.call(sent, members, name, numel, None, 0)[:ranks]:
                expected = costs.bytes_sent(formula, 4 * numel, ranks)
                assert wire == pytest.approx(expected, rel=0.02), (ranks, name)


def leaf_and_slice():
    """Tensors that autograd knows, views of a larger tensor, and a reduce-scatter in place."""
    rank = dist.get_rank()
    weight = torch.full((3, 4), float(rank), requires_grad=True)
    collectives.broadcast(weight, 2)
    collectives.all_reduce(weight)
    store = torch.full((4, 6), float(rank))
    collectives.all_reduce(store[1:3])
    rows = torch.arange(float(WORLD)).repeat(3, 1).T.contiguous()
    collectives.reduce_scatter(rows[rank], rows)
    collectives.all_gather(rows, rows[rank])
    return weight, store, rows


def test_leaves_views_and_in_place(five):
    for rank, (weight, store, rows) in enumerate(five.call(leaf_and_slice)):
        assert weight.requires_grad and weight.eq(2.0 * WORLD).all()
        assert store[1:3].eq(sum(range(WORLD))).all()
        assert store[0].eq(rank).all() and store[3].eq(rank).all()
        assert torch.equal(rows, WORLD * torch.arange(float(WORLD)).repeat(3, 1).T)


def refusals():
    """The error of each bad call, then what a good one gives, and the bytes sent in between."""
    row, rows = torch.ones(4), torch.ones(WORLD, 4)
    transposed = torch.ones(4, 3).T
    others = group_of((0, 1))
    is_root = dist.get_rank() == 0
    bad = {
        "broadcast root": lambda: collectives.broadcast(row, WORLD),
        "broadcast negative root": lambda: collectives.broadcast(row, -1),
        "reduce root": lambda: collectives.reduce(row, "0"),
        "broadcast memory": lambda: collectives.broadcast(transposed),
        "all_reduce memory": lambda: collectives.all_reduce(transposed),
        "all_reduce algorithm": lambda: collectives.all_reduce(row, algorithm="star"),
        "all_gather by halves": lambda: collectives.all_gather(
            torch.ones(WORLD, 4), row, algorithm="doubling"
        ),
        "all_reduce conjugate": lambda: collectives.all_reduce(
            torch.ones(2, dtype=torch.cfloat).conj()
        ),
        "all_reduce dtype": lambda: collectives.all_reduce(row.to(torch.float8_e4m3fn)),
        "all_reduce device": lambda: collectives.all_reduce(row.to("meta")),
        "reduce dtype": lambda: collectives.reduce(row.to(torch.uint16)),
        "reduce_scatter dtype": lambda: collectives.reduce_scatter(
            row.to(torch.uint16), rows.to(torch.uint16)
        ),
        "all_gather shape": lambda: collectives.all_gather(torch.ones(WORLD, 3), row),
        "all_gather dtype": lambda: collectives.all_gather(rows.double(), row),
        "all_gather list": lambda: collectives.all_gather(list(rows), row),
        "reduce_scatter shape": lambda: collectives.reduce_scatter(row, torch.ones(4)),
        "all_to_all shape": lambda: collectives.all_to_all(rows, torch.ones(WORLD + 1, 4)),
        "all_to_all scalar": lambda: collectives.all_to_all(torch.tensor(1.0), torch.tensor(1.0)),
        "all_to_all dtype": lambda: collectives.all_to_all(rows, rows.double()),
        "scatter inputs": lambda: collectives.scatter(row, None if is_root else rows),
        "gather output": lambda: collectives.gather(None if is_root else rows, row),
        "gather shape": lambda: collectives.gather(torch.ones(2, 4), row),
    }
    if dist.get_rank() > 1:
        bad["not a member"] = lambda: collectives.all_reduce(row, others)
    else:
        bad["root of a group"] = lambda: collectives.broadcast(row, 2, others)
    dist.barrier()
    before, told = measure.wire_bytes(), {}
    for name, call in bad.items():
        try:
            call()
            told[name] = "nothing was refused"
        except (ValueError, TypeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    quiet = measure.wire_bytes() - before
    collectives.all_reduce(row)
    return told, quiet, row


REASONS = {
    "all_reduce algorithm": "one of ('ring', 'halving_doubling', 'doubling'), not 'star'",
    "all_gather by halves": "needs a power of two of ranks, not 5",
    "broadcast root": "0 to 4, not 5",
    "root of a group": "0 to 1, not 2",
    "not a member": "not a member of the group",
    "all_gather shape": "shape (5, 4), not (5, 3)",
    "all_gather dtype": "dtype torch.float32, not torch.float64",
    "all_gather list": "a tensor of shape (5, 4) here, not a list",
    "all_reduce memory": "contiguous",
    "all_reduce dtype": "torch cannot add tensors of",
    "all_reduce device": "no backend of the group sends from meta: use NCCL between GPUs",
}


def test_bad_arguments_are_refused_before_anything_is_sent(five):
    for told, quiet, row in five.call(refusals):
        assert quiet == 0
        assert row.eq(WORLD).all()
        for name, error in told.items():
            kind = "TypeError: " if "dtype" in name and "add" in error else "ValueError: "
            assert error.startswith(kind) and len(error) < 200, (name, error)
            assert REASONS.get(name, "") in error, (name, error)
        assert set(REASONS) - set(told) <= {"not a member", "root of a group"}


def to_no_rank():
    """The errors of messages from and to ranks that the world, or a group of it, does not have."""
    errors = []
    for group in (None, group_of((0, 2))):
        if group is not None and dist.get_rank() not in (0, 2):
            continue
        ranks = dist.get_world_size(group)
        for way, peer in product(("sends", "receives"), (-1, ranks)):
            with pytest.raises(ValueError) as error:
                chunks.start(group, **{way: [(torch.ones(1), peer)]})
            assert f"rank {peer}, not 0 to {ranks - 1}" in str(error.value)
            errors.append(error)
    return len(errors)


def test_a_message_to_a_rank_that_the_group_does_not_have_is_refused(five):
    """On gloo it would end the process, or wait for the deadline."""
    assert five.call(to_no_rank) == [8, 4, 8, 4, 4]


def after_a_refusal():
    """Rank 0 sends, and receives with gaps, which is refused; then ranks 0 and 1 exchange."""
    rank, received = dist.get_rank(), torch.zeros(4)
    if rank == 0:
        with pytest.raises(ValueError, match="contiguous"):
            chunks.start(None, sends=[(received, 1)], receives=[(torch.ones(4, 4)[:, 0], 1)])
    dist.barrier()
    if rank < 2:
        own = torch.full((4,), float(rank + 1))
        chunks.finish(chunks.start(None, sends=[(own, 1 - rank)], receives=[(received, 1 - rank)]))
    return received[0].item()


def test_a_refused_receive_leaves_no_send_behind(five):
    assert five.call(after_a_refusal) == [2, 1, 0, 0, 0]


@pytest.mark.ranks
def test_the_same_kernels_under_torchrun():
    ranks = 3
    script = Path(__file__).with_name("under_torchrun.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    support = str(script.parents[1] / "support")  # which `test_collectives` imports from
    environment["PYTHONPATH"] = os.pathsep.join([support, environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == f"{ranks} ranks: every collective is its definition"


def on_inference_tensors():
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def made(*shape):
        with torch.inference_mode():
            return torch.full(shape, 1.0 + rank)

    total, rows, part, sent = made(3), made(ranks, 3), made(3), made(3)
    collectives.all_reduce(total)
    collectives.all_gather(rows, made(3))
    collectives.reduce_scatter(part, made(ranks, 3))
    collectives.broadcast(sent, ranks - 1)
    whole = ranks * (ranks + 1) / 2
    return (
        total.tolist() == part.tolist() == [whole] * 3
        and rows[:, 0].tolist() == [1.0 + r for r in range(ranks)]
        and sent.tolist() == [float(ranks)] * 3
    )


def test_tensors_made_in_inference_mode(five):
    assert five.call(on_inference_tensors) == [True] * WORLD
