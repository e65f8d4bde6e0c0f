"""Read the rows of published runs, each source by its own conventions.

The tables have what the sources print. What they leave out is filled in here, with its origin.
Rates become seconds as the source counts them: some rates count recomputed operations.
"""

import re

from naranhi.planning.cluster import GIB, Cluster
from naranhi.planning.communication import NETWORK
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.run import Run

# Narayanan et al. (2021) do not print micro-batches and chunks of table 1: they are in the scripts
# that the authors published with it (Megatron-LM, examples/sc21/run_table_1.sh).
SC21 = {
    1: (16, 1), 3: (16, 1), 7: (16, 1), 18: (8, 1), 39: (4, 1), 76: (2, 3), 145: (2, 2),
    310: (1, 2), 529: (1, 3), 1008: (1, 1),
}  # fmt: skip
# Shapes of the models that a source only names, from the configurations of the models' authors.
SHAPES = {
    "GPT 174.6B": {"layers": 96, "hidden": 12288, "heads": 96},
    "GPT 529.6B": {"layers": 105, "hidden": 20480, "heads": 128},
    "Llama2 7b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
    "Llama2 13b": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
    "Llama2 34b": {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016},
    "Llama2 70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
}
ZERO_BUBBLE_CHUNKS = {"GPT 1.5B": 3, "GPT 6.2B": 4, "GPT 14.6B": 3, "GPT 28.3B": 2}


def read(row: dict[str, str]) -> Run:
    """Return the run of a row of `published_runs.csv` or `published_runs_sweep.csv`.

    Raises:
        KeyError: If its source is unknown here.
    """
    given = {name: float(row[name]) for name in row if row[name] and name not in _WORDS}
    given = {name: int(value) if value == int(value) else value for name, value in given.items()}
    return _READERS[row["source"]](row, given)


_WORDS = ("source", "model", "gpu_type", "precision", "recompute", "note", "ep")


def _gpt(given, **more):
    sizes = {name: given[name] for name in ("layers", "hidden", "heads", "ffn") if name in given}
    sizes = SHAPES.get(more.pop("name", None), {}) | sizes
    return Model(**sizes, vocabulary=given.get("vocab", 51200), **more)


def _llama(given, name=None, **more):
    return _gpt(given, name=name, gated=True, **more)


def _seconds(given, batch, sequence, flops=None):
    """Return the seconds of a step from what is printed."""
    if "step_s" in given:
        return given["step_s"]
    if "tokens_per_s_per_gpu" in given:
        return batch * sequence / given["tokens_per_s_per_gpu"] / given["gpus"]
    if flops and "tflops_per_gpu" in given:
        return flops / (given["tflops_per_gpu"] * 1e12 * given["gpus"])
    return None


def _megatron(row, given):
    table_2 = row["source"].endswith("T2")
    model = _gpt(given, name=row["model"], positions=2048, biases=True, dropout=True)
    batch, sequence, gpus = given["global_batch"], given["seq"], given["gpus"]
    zero = given.get("zero", 0)
    tp, pp = given.get("tp", 8), given.get("pp")
    if table_2:
        pp = pp or {96: 12, 280: 35}[int(re.search(r"t\*p=(\d+)", row["note"])[1])]
        microbatch, chunks = given["microbatch"], 1 if zero else (2 if pp == 12 else 3)
    else:
        microbatch, chunks = SC21[int(given["params"])]
    dp = gpus // tp // pp
    plan = Plan(
        dp, tp, pp, chunks=chunks, microbatch=microbatch, zero=zero, recompute="full",
        schedule="interleaved" if chunks > 1 else "one_f_one_b", sequence_parallel=False,
    )  # fmt: skip
    # Equation 3: with the recomputed forward.
    layers, h, vocabulary = model.layers, model.hidden, model.vocabulary
    flops = 96 * batch * sequence * layers * h**2
    flops *= 1 + sequence / 6 / h + vocabulary / 16 / layers / h
    engine = "deepspeed-2021" if zero == 3 else "megatron-2021"
    cluster = Cluster(gpus, 8, "A100", engine=engine)
    seconds = _seconds(given, batch, sequence, flops)
    name = f"{row['model']} on {gpus}" + (" with ZeRO-3" if zero else "")
    return Run(row["source"], name, model, cluster, plan, sequence, batch, seconds, None)


def _korthikanti(row, given):
    if "memory_gb" in given:
        given = {**given, "vocab": given["tp"]}  # figure 1 counts Transformer layers only
    model = _gpt(given, positions=2048, biases=True, dropout=True)
    recompute = row["recompute"]
    chunks = 3 if given["pp"] in (8, 35) else 1
    plan = Plan(
        given.get("dp", 1), given["tp"], given["pp"], chunks=chunks,
        microbatch=given["microbatch"], schedule="interleaved" if chunks > 1 else "one_f_one_b",
        recompute=recompute, sequence_parallel=recompute == "selective",
    )  # fmt: skip
    cluster = Cluster(given["gpus"], 8, "A100", engine="megatron-2021")
    memory = given["memory_gb"] * GIB if "memory_gb" in given else None
    name = f"{row['model']} {recompute} on {given['gpus']}"
    return Run(
        row["source"], name, model, cluster, plan, given["seq"], given["global_batch"],
        given.get("step_s"), memory, counted="kept",
    )  # fmt: skip


def _zero_bubble(row, given):
    schedule = re.search(r"schedule ([^,]+),", row["note"])[1]
    name, chunks = {
        "1F1B": ("one_f_one_b", 1),
        "1F1B-I": ("interleaved", ZERO_BUBBLE_CHUNKS[row["model"]]),
        "ZB-1p": ("zero_bubble_h1", 1),
        "ZB-2p": ("zero_bubble_h2", 1),
    }[schedule]
    model = _gpt({**given, "vocab": 50304}, positions=1024, biases=True, dropout=True)
    plan = Plan(
        1, 1, given["pp"], chunks=chunks, microbatch=given["microbatch"], schedule=name,
    )  # fmt: skip
    cluster = Cluster(given["gpus"], 8, "A100", engine="megatron-2021")
    batch = given["global_batch"]
    # ZB-1p and ZB-2p are searched, within the memory of p and 2p micro-batches (section 5.1): as
    # many as H1 has in flight, and one more than H2.
    more = 2 * plan.pp / (2 * plan.pp - 1) if schedule == "ZB-2p" else 1.0
    return Run(
        row["source"], f"{row['model']} {schedule} {batch}", model, cluster, plan, given["seq"],
        batch, _seconds(given, batch, given["seq"]), given["memory_gb"] * GIB, activations=more,
    )  # fmt: skip


def _llm_foundry(row, given):
    gpu = {"h100_80gb": "H100", "a100_80gb": "A100", "a100_40gb": "A100-40GB"}[row["gpu_type"]]
    model = _gpt(given, positions=given["seq"])
    plan = Plan(
        given["dp"], microbatch=given["microbatch"], zero=given["zero"],
        recompute=row["recompute"], precision="fp8" if "fp8" in row["precision"] else "bf16",
    )  # fmt: skip
    cluster = Cluster(given["gpus"], 8, gpu, engine="fsdp-2023")
    batch = given["global_batch"]
    name = f"{row['model']} {given['seq']} x {given['microbatch']} on {given['gpus']} {gpu}"
    return Run(
        row["source"], name, model, cluster, plan, given["seq"], batch,
        _seconds(given, batch, given["seq"]), None,
    )  # fmt: skip


def _internevo(row, given):
    ffn = {4096: 11008, 5120: 13824}[given["hidden"]]
    model = _llama({**given, "ffn": ffn}, tied=False)
    sequence = given.get("seq", 2048)
    microbatch = given.get("microbatch", 2)
    batch = given.get("global_batch")
    if not batch:
        count = int(re.search(r"micro_num (\d+)", row["note"])[1])
        batch = microbatch * count * given["dp"]
    zero = given["zero"]
    printed = re.search(r"zero1 group (\w+)", row["note"])
    group = int(printed[1]) if printed and printed[1].isdigit() else None
    plan = Plan(
        given["dp"], given["tp"], given["pp"], microbatch=microbatch, zero=zero,
        recompute=row["recompute"], sequence_parallel=False,
        zero_group=group if zero == 1 else None,
    )  # fmt: skip
    gpu = "A800" if row["gpu_type"] == "A800" else "A100"
    cluster = Cluster(
        given["gpus"], 8 if given["gpus"] % 8 == 0 else given["gpus"], gpu, 50, "internevo"
    )
    # GB of 10^9 bytes: without data parallel ranks, that is the 28 bytes for each parameter that an
    # unfused Adam holds, and 34 with the copies that flat tensors need. As GiB there would be 2
    # more of each, for which its code has no use.
    memory = given["memory_gb"] * 1e9 if "memory_gb" in given else None
    name = f"{row['model']} zero group {group or 'all'} x {microbatch} on {given['gpus']}"
    return Run(
        row["source"], name, model, cluster, plan, sequence, batch,
        _seconds(given, batch, sequence), memory, counted="reserved",
    )  # fmt: skip


def _torchtitan(row, given):
    model = _llama(given, tied=False, kv_heads=8)
    note = row["note"]
    # The length of 8192 tokens is in the title of the report only. At that commit a pipeline had
    # as many micro-batches as stages, unless configured otherwise.
    sequence = given.get("seq", 8192)
    chunks = 2 if "Interleaved" in note else 1
    pp, dp = given["pp"], given["dp"]
    local = re.search(r"local batch (\d+)", note)
    microbatch = int(local[1]) // pp if local else given["microbatch"]
    batch = (int(local[1]) if local else microbatch) * dp
    plan = Plan(
        dp, given["tp"], pp, given["cp"], chunks=chunks, microbatch=microbatch, zero=3,
        schedule="interleaved" if chunks > 1 else "one_f_one_b", recompute=row["recompute"],
        precision="fp8" if row["precision"] == "float8" else "bf16",
    )  # fmt: skip
    engine = "fsdp-compile" if "compile" in note or row["precision"] == "float8" else "fsdp"
    cluster = Cluster(given["gpus"], 8, "H100-96GB", engine=engine)
    table = re.search(r"Table (.*);", note)[1]
    return Run(
        row["source"], f"{row['model']} {table} {sequence}", model, cluster, plan, sequence, batch,
        _seconds(given, batch, sequence), given["memory_gb"] * GIB, counted="reserved",
    )  # fmt: skip


def _llama_3(row, given):
    model = _llama(given, tied=False, kv_heads=8)
    plan = Plan(
        given["dp"], given["tp"], given["pp"], given["cp"], chunks=8, schedule="interleaved", zero=1
    )
    cluster = Cluster(given["gpus"], 8, "H100", engine="llama-3")
    batch, sequence = given["global_batch"], given["seq"]
    # Model operations with causal attention counted once.
    dense = 6 * (model.active_parameters - model.embedding_parameters)
    flops = (dense + 6 * model.layers * model.hidden * sequence) * batch * sequence
    return Run(
        row["source"], f"405B {given['gpus']} x {sequence}", model, cluster, plan, sequence, batch,
        _seconds(given, batch, sequence, flops), None,
    )  # fmt: skip


def _fms(row, given):
    model = _llama({**given, "vocab": 32000}, name=row["model"], tied=False)
    hsdp = "HSDP" in row["note"]
    plan = Plan(
        given["dp"], microbatch=given["microbatch"], zero=3,
        recompute=row["recompute"], zero_group=8 if hsdp else None,
    )  # fmt: skip
    gpu, network = ("A100", 50) if "A100" in row["gpu_type"] else ("H100", 100)
    cluster = Cluster(given["gpus"], 8, gpu, network, "fms-fsdp")
    batch = given["microbatch"] * given["dp"]
    return Run(
        row["source"], f"{row['model']} on {gpu}", model, cluster, plan, 4096, batch,
        _seconds(given, batch, 4096), None,
    )  # fmt: skip


def _sweep(row, given):
    # GiB, by the code that prints it (nanotron, `helpers.py`: / 1024**3): what its ZeRO-0 runs have
    # allocated after a step is then 20 bytes for each parameter, with the buckets of torch's DDP.
    model = _llama(given, tied=given["layers"] == 16)
    plan = Plan(
        given["dp"], given["tp"], given["pp"], microbatch=given["microbatch"], zero=given["zero"]
    )
    # What an all-reduce over all GPUs reached before a job trained (the sweep's bench_final2.csv;
    # copied of 512 GPUs only): GB/s of the eight ports of a node together, so Gbit/s of each.
    reached = given.get("all_reduce_gb_s", 400 * NETWORK)
    cluster = Cluster(given["gpus"], 8, "H100", reached / NETWORK, "nanotron")
    # The source's status of a run is Success, OOM, or Other: an error that is not an OOM.
    failed = "FAILED" in row["note"]
    # A few runs had a batch other than the usual 256 sequences: their names say so.
    count = int(re.search(r"grad accumulation (\d+)", row["note"])[1])
    batch = plan.dp * plan.microbatch * count
    return Run(
        row["source"],
        f"{row['model']} dp {plan.dp} tp {plan.tp} pp {plan.pp} x {plan.microbatch} "
        f"zero {plan.zero}" + ("" if batch == 256 else f" of {batch}"),
        model, cluster, plan, given["seq"], batch,
        None if failed else _seconds(given, batch, given["seq"]),
        None if failed else given["memory_gb"] * GIB, failed, counted="first",
        crashed="FAILED (other" in row["note"],
        flawed=plan.pp > 1 and given.get("mended") == 0,
    )  # fmt: skip


_READERS = {
    "Megatron SC'21": _megatron,
    "Megatron SC'21 T2": _megatron,
    "Korthikanti 2022": _korthikanti,
    "Korthikanti 2022 Fig 1 (via Calculon)": _korthikanti,
    "Zero Bubble": _zero_bubble,
    "llm-foundry": _llm_foundry,
    "InternEvo throughput": _internevo,
    "InternEvo flops": _internevo,
    "InternEvo memory": _internevo,
    "torchtitan 2024-12": _torchtitan,
    "Llama 3 paper": _llama_3,
    "IBM fms-fsdp": _fms,
    "HF Ultra-Scale sweep": _sweep,
}
