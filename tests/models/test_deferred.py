"""Models without values, and the values of each layer: drawn, or read from files."""

import json
import os
import subprocess
import sys

import pytest
import small_llama
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from naranhi import models
from naranhi.models import DeferredLM
from naranhi.tensor_parallel import materialize

KINDS = ["gpt2", *small_llama.KINDS]


def config(kind, **more):
    """Wide enough that a standard deviation is known to some percent."""
    if kind == "gpt2":
        return models.gpt2_config(vocabulary=512, blocks=2, **more)
    return small_llama.config(kind, hidden_size=64, **more)


def whole(model, seed=0):
    """All its layers, with values."""
    for number in range(len(model.layers)):
        materialize(model.layers, model.values(number, seed))
    return nn.ModuleList(model.layers)


def saved(folder, kind, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind))
    for param in model.parameters():
        param.data.uniform_(-1, 1)
    model.save_pretrained(folder, **options)
    return model


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_read_are_those_that_transformers_reads(tmp_path, kind, tied):
    saved(tmp_path, kind)
    read, layers = (
        whole(DeferredLM(tmp_path, tied)),
        nn.ModuleList(models.causal_lm(tmp_path, tied)),
    )
    assert same(read, layers)
    assert all(param.dtype == torch.float32 for param in read.parameters())
    shared = [x[0].wte.weight is x[-1].lm_head.weight for x in (read, layers)]
    assert shared[0] == shared[1] == (tied and kind in ("gpt2", "qwen2"))
    memory = [param.untyped_storage().data_ptr() for param in read.parameters()]
    assert len({*memory}) == len(memory), "no two share the mapped file"


def test_weights_of_many_files_or_in_16_bits_are_read(tmp_path):
    model = saved(tmp_path / "one", "llama")
    saved(tmp_path / "many", "llama", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert same(whole(DeferredLM(tmp_path / "many")), whole(DeferredLM(tmp_path / "one")))
    model.bfloat16().save_pretrained(tmp_path / "short")
    read = whole(DeferredLM(tmp_path / "short"))
    assert read[0].wte.weight.dtype == torch.float32
    assert torch.equal(read[0].wte.weight, model.model.embed_tokens.weight.float())


def test_weights_saved_without_a_head_have_other_names(tmp_path):
    """As the hub has those of GPT-2."""
    saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    weights = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1)}, file, {"format": "pt"})
    assert same(whole(DeferredLM(tmp_path)), nn.ModuleList(models.gpt2(tmp_path)))


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_drawn_as_transformers_draws_them(kind):
    state = torch.get_rng_state()
    drawn = whole(DeferredLM(config(kind))).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    of_transformers = nn.ModuleList(models.causal_lm(config(kind))).state_dict()
    assert drawn.keys() == of_transformers.keys()
    for name, tensor in of_transformers.items():
        assert drawn[name].dtype == tensor.dtype
        if tensor.std() == 0:  # biases and norms
            assert torch.equal(drawn[name], tensor), name
        else:
            assert drawn[name].std().item() == pytest.approx(tensor.std().item(), rel=0.08), name
            assert drawn[name].mean().abs() < 5 * tensor.std() / tensor.numel() ** 0.5, name
            assert not torch.equal(drawn[name], tensor), name


def test_a_layer_is_the_same_whatever_else_is_drawn():
    model, other = DeferredLM(config("llama")), DeferredLM(config("llama"))
    for number in 3, 1:
        model.values(number, seed=4)
    values, again = model.values(2, seed=4), other.values(2, seed=4)
    assert all(torch.equal(values[name], again[name]) for name in again)
    block, seed = other.values(1, seed=4), other.values(2, seed=5)
    for name, tensor in values.items():
        if tensor.std() > 0:
            assert not torch.equal(tensor, seed[name])
            assert not torch.equal(tensor, block[name.replace("2.", "1.", 1)])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_some_experts_are_among_all(tmp_path, kind):
    saved(tmp_path, kind)
    for model in DeferredLM(tmp_path), DeferredLM(config(kind)):
        for number in 1, 2:  # of Qwen3-MoE's blocks one has no experts
            every, some = model.values(number), model.values(number, experts=range(1, 3))
            assert every.keys() == some.keys()
            for name, tensor in every.items():
                wanted = tensor[1:3] if "experts" in name else tensor
                assert torch.equal(some[name], wanted), name
                assert some[name].untyped_storage().nbytes() == wanted.nbytes, "no more is kept"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_begins_as_the_embedding_if_the_model_ties_them(tied):
    for kind, alike in ("gpt2", True), ("qwen2", True), ("llama", False):
        layers = whole(DeferredLM(config(kind), tied))
        assert torch.equal(layers[0].wte.weight, layers[-1].lm_head.weight) == alike


def test_nothing_is_allocated_before_values_are_asked_for():
    llama = models.llama_config(128256, 8192, 8192, 64, 8, 28672, 80)
    layers = nn.ModuleList(DeferredLM(llama, tied=False).layers)
    assert all(tensor.is_meta for tensor in (*layers.parameters(), *layers.buffers()))
    assert sum(param.numel() for param in layers.parameters()) == 70_553_706_496


def rewritten(folder, change, kind="qwen3"):
    saved(folder, kind)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {n: t for n, t in w.items() if n != NORM}, f"lack {NORM}: they were not"),
        (
            lambda w: w | {NORM[:-6] + "bias": torch.ones(8)},
            "q_norm.bias, which its config.json does not describe",
        ),
        (
            lambda w: w | {NORM.replace("1", "2"): torch.ones(8)},
            "its config.json has 2 blocks only",
        ),
        (lambda w: w | {NORM: torch.ones(4)}, r"weights of .*q_norm.weight is \[4\], not \[8\]"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        DeferredLM(rewritten(tmp_path, change))


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {n: t for n, t in w.items() if n != EXPERT}, f"lack {EXPERT}: they were not"),
        (
            lambda w: w | {EXPERT: w[EXPERT].t().contiguous()},
            r"w2.weight is \[40, 64\], not \[64, 40\]",
        ),
        (
            lambda w: w | {EXPERT.replace("3", "4"): w[EXPERT].clone()},
            "experts.4.w2.weight, which its config.json does not describe",
        ),
    ],
)
def test_experts_that_are_not_the_models_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        DeferredLM(rewritten(tmp_path, change, "mixtral"))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_are_refused(tmp_path, kind):
    saved(tmp_path, kind, save_original_format=False)
    with pytest.raises(ValueError, match=r"in one tensor .*save_original_format=True"):
        DeferredLM(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"no model can be made of the weights of .*Safetensor"):
        DeferredLM(tmp_path)


def test_missing_files_are_refused(tmp_path):
    saved(tmp_path, "gpt2", max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / sorted(index["weight_map"].values())[-1]).unlink()
    with pytest.raises(OSError, match="was not written by save_pretrained, or not completely"):
        DeferredLM(tmp_path)


def test_weights_in_another_format_are_refused(tmp_path):
    model = saved(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    words = (
        "there is neither model.safetensors nor its index: if the weights have a different format"
    )
    with pytest.raises(ValueError, match=words):
        DeferredLM(tmp_path)


@pytest.mark.parametrize("sizes", [("5GB", "40KB"), ("40KB", "5GB")])
def test_of_two_saves_in_a_folder_the_one_is_read_that_transformers_reads(tmp_path, sizes):
    """`save_pretrained` leaves files of the other form, of an earlier save."""
    for size in sizes:
        model = AutoModelForCausalLM.from_config(config("llama"))
        model.save_pretrained(tmp_path, max_shard_size=size)
    assert same(whole(DeferredLM(tmp_path)), nn.ModuleList(models.llama(tmp_path)))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_tied_weight_may_be_stored_under_either_name(tmp_path, kind):
    saved(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith(("wte.weight", "embed_tokens.weight")))
    save_file(weights | {"lm_head.weight": weights[name].clone()}, file, {"format": "pt"})
    both = whole(DeferredLM(tmp_path))
    weights["lm_head.weight"] = weights.pop(name)
    save_file(weights, file, {"format": "pt"})
    assert same(whole(DeferredLM(tmp_path)), both)
    weights[name] = weights["lm_head.weight"] + 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match="have a head that is not the embedding"):
        DeferredLM(tmp_path)


def test_a_fingerprint_is_that_of_the_weights(tmp_path):
    saved(tmp_path / "one", "llama", max_shard_size="40KB")
    saved(tmp_path / "other", "llama", max_shard_size="40KB")
    one, other = (DeferredLM(tmp_path / name).fingerprint() for name in ("one", "other"))
    assert torch.equal(one, other) and len(one) == 32
    file = sorted((tmp_path / "other").glob("*.safetensors"))[-1]
    weights = load_file(file)
    next(iter(weights.values())).mul_(1.001)
    save_file(weights, file, {"format": "pt"})
    assert not torch.equal(one, DeferredLM(tmp_path / "other").fingerprint())
    assert len(DeferredLM().fingerprint()) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "is a model of the kind 'bert', neither a GPT-2 nor"),
        ({"n_head": 0}, "has 2 blocks of 0 heads"),
        ({"n_embd": 0}, "no model can be made of .*ZeroDivisionError"),
        ({"activation_function": "nope"}, "no model can be made of .*KeyError"),
    ],
)
def test_a_configuration_that_cannot_be_is_told_in_a_line(tmp_path, changes, words):
    saved(tmp_path, "gpt2")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=words) as refused:
        DeferredLM(tmp_path)
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(ValueError, match=r"is a llama, which has no dropout: do not .* 0\.1"):
        DeferredLM(config("llama"), dropout=0.1)


def test_the_configuration_has_the_dropout_that_was_asked_for():
    given = models.gpt2_config()
    model = DeferredLM(given, dropout=0.25)
    assert model.config.attn_pdrop == model.config.resid_pdrop == 0.25
    assert {m.p for m in nn.ModuleList(model.layers).modules() if type(m) is nn.Dropout} == {0.25}
    assert given.attn_pdrop == 0.1


@pytest.mark.processes
def test_offline_one_error_says_what_to_do(tmp_path):
    """In another process, because the hub's client reads HF_HUB_OFFLINE when it is imported."""
    run = subprocess.run(
        [sys.executable, "-c", "from naranhi.models import DeferredLM; DeferredLM('gpt2')"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("OSError: no configuration of 'gpt2'.")
    assert "hf download gpt2 --local-dir" in message


@pytest.mark.processes
def test_a_name_that_transformers_has_fetched_is_read_from_its_cache(tmp_path):
    """The hub's cache, laid out as its client does."""
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--some--model"
    saved(repo / "snapshots" / commit, "gpt2")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    program = (
        "from naranhi import models; from naranhi.models import DeferredLM\n"
        "values = DeferredLM('some/model').values(1)\n"
        "print(all((values[f'1.{name}'] == weight).all() for name, weight\n"
        "          in models.gpt2('some/model')[1].state_dict().items()), len(values))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert run.stdout == "True 12\n", run.stderr


def test_materialize_refuses_before_anything_changes():
    model = DeferredLM(config("gpt2"))
    values = model.values(1)
    first, last = next(iter(values)), list(values)[-1]
    for wrong, words in [
        (values | {"1.other": torch.ones(1)}, "1.other is in the state only"),
        (values | {last: torch.ones(3)}, rf"{last} has shape \(3,\) in the state, and \(64,\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            materialize(model.layers, wrong)
        assert nn.ModuleList(model.layers).get_parameter(first).is_meta
    materialize(model.layers, values)
    before = model.layers[1].block.ln_1.weight
    materialize(model.layers, {name: tensor + 1 for name, tensor in values.items()})
    assert model.layers[1].block.ln_1.weight is before, "it has values already"


def test_what_is_filled_from_one_tensor_is_not_one_parameter():
    """As of the state of a tied model, for an untied one."""
    model = DeferredLM(config("gpt2"), tied=False)
    tied = nn.ModuleList(models.gpt2(config("gpt2"))).state_dict()
    materialize(model.layers, tied)
    head, embedding = model.layers[-1].lm_head.weight, model.layers[0].wte.weight
    assert torch.equal(head, embedding) and head.data_ptr() != embedding.data_ptr()
    assert head.data_ptr() != tied["3.lm_head.weight"].data_ptr()


def test_a_model_of_transformers_is_filled_in_the_same_way():
    with torch.device("meta"):
        empty = GPT2LMHeadModel(config("gpt2"))
    real = GPT2LMHeadModel(config("gpt2"))
    materialize(empty, dict(real.named_parameters()))
    assert same(empty, real) and empty.lm_head.weight is empty.transformer.wte.weight


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    saved(tmp_path, "llama")
    with pytest.raises(OSError, match=r"That file is no config\.json"):
        models.configuration(str(tmp_path / "model.safetensors"))
