"""What a rank of `naranhi.train` builds of the model: its own layers, with the same values."""

import contextlib
import json
import weakref

import pytest
import small_corpus
import small_gpt2
import small_llama
import torch
import torch.distributed as dist
from exported import run
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from naranhi import data, models, train
from naranhi.expert_parallel import divide_experts
from naranhi.tensor_parallel import full_state_dict, gpt2_plan, materialize, parallelize
from naranhi.train import part

WIDE = models.gpt2_config(hidden=512, blocks=4)
BLOCK, ENDS = 4 * (12 * 512**2 + 13 * 512), 4 * 512 * (1024 + 128 + 2)  # bytes


class Live(TorchDispatchMode):
    """The most bytes of tensors that are alive at once, of those that operations make."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if id(storage) not in self.alive:
            self.alive.add(id(storage))
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.remove, id(storage), storage.nbytes())

    def remove(self, key, size):
        self.alive.remove(key)
        self.now -= size


def held_and_most(arguments):
    """On a rank: bytes of its parameters, and the most of all tensors while they are made."""
    with Live() as live, train.Training(train.parse(arguments)) as training:
        return sum(param.nbytes for param in training.pipeline.parameters()), live.most


@pytest.mark.parametrize("source", ["config", "model"])
def test_no_rank_ever_has_the_whole_model(eight, tmp_path, source):
    data.tokenizer().save_pretrained(tmp_path)
    GPT2LMHeadModel(WIDE).save_pretrained(tmp_path)
    base = [f"--{source}", str(tmp_path), *small_corpus.write(tmp_path)]
    alone, most = eight(1, held_and_most, base)[0]
    assert alone == 4 * BLOCK + ENDS < most
    for ranks, options in (4, ["--pp=4"]), (4, ["--pp=2", "--tp=2"]), (2, ["--tp=2"]):
        for held, most in eight(ranks, held_and_most, [*base, *options]):
            assert held < 0.6 * alone
            assert most < held + 1.5 * BLOCK, "its part, a whole layer, a shard, and the corpus"
    for held, most in eight(4, held_and_most, [*base, "--pp=4", "--experts=2"]):
        assert held < 2.7 * BLOCK and most < held + 1.5 * BLOCK, "no experts of other stages"


def test_no_rank_ever_has_all_experts(eight, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    small_llama.config("mixtral", **sizes, num_local_experts=8).save_pretrained(tmp_path)
    experts = 4 * 8 * 3 * 256 * 512  # bytes in a block
    more = [*small_corpus.write(tmp_path), "--batch=16"]
    alone, most = eight(1, held_and_most, ["--config", str(tmp_path), *more])[0]
    assert 4 * experts < alone < most
    for held, most in eight(4, held_and_most, ["--config", str(tmp_path), "--ep=4", *more]):
        assert experts < held < 0.4 * alone
        assert most < held + 2.5 * experts, "its part, and the experts of a block, drawn"
    torch.manual_seed(0)
    data.tokenizer().save_pretrained(tmp_path)
    config = models.configuration(tmp_path)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for held, most in eight(4, held_and_most, ["--model", str(tmp_path), "--ep=4", *more]):
        assert most < held + 2.5 * experts / 4, "its part, and its experts of a block, read"


def test_blocks_share_the_coefficient_of_the_auxiliary_loss():
    for kind, each in ("mixtral", 0.1 * 2 / 2), ("qwen3_moe", 0.001 * 3 / 1):
        model = models.DeferredLM(small_llama.config(kind))
        assert part.mixture_coefficient(model) == pytest.approx(each)


def states(arguments):
    """On a rank: {number of a layer: {name: whole tensor}} of its layers."""
    with train.Training(train.parse(arguments)) as training:
        return {
            stage.first + place: full_state_dict(layer)
            for stage in training.pipeline.stages.values()
            for place, layer in enumerate(stage.layers)
        }


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, "--pp=2 --tp=2 --sequence-parallel"),
        (4, "--schedule=interleaved --chunks=2 --pp=2 --cp=2"),
        (4, "--pp=2 --ep=2 --experts=4"),
        (8, "--pp=2 --tp=2 --dp=2 --experts=4 --recompute"),
    ],
)
def test_random_weights_are_the_same_on_every_mesh(eight, tmp_path, options, ranks):
    corpus = small_corpus.write(tmp_path)
    more = [*corpus, *(option for option in options.split() if "--experts" in option)]
    [alone] = eight(1, states, ["--seed=3", *more])
    seen = set()
    for found in eight(ranks, states, ["--seed=3", *corpus, *options.split()]):
        seen |= found.keys()
        for number, state in found.items():
            for name, tensor in state.items():
                assert torch.equal(tensor, alone[number][name]), (number, name)
    assert seen == alone.keys()
    for blocks in zip(alone[2].items(), alone[4].items(), strict=True):  # with experts, if any
        (name, one), (_, other) = blocks
        assert one.std() < 1e-3 or not torch.equal(one, other), name
    [other] = eight(1, states, ["--seed=4", *more])
    name = "block.attn.c_attn.weight"
    assert not torch.equal(other[1][name], alone[1][name])


def in_own_folder(folders, options):
    """On a rank: what is said of a training of "model" in its own folder, as on its own disk."""
    with contextlib.chdir(folders[dist.get_rank() % len(folders)]):
        corpus = ["--corpus", "model/squad.json"]
        return run(["--model", "model", *corpus, *options.split(), "--steps=1"])


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("weights", "--pp=2 --dp=2", "rank 0 and rank 1 have different weights"),
        ("weights", "--pp=4", "rank 0 and rank 1 have different weights"),
        ("config", "--pp=2 --dp=2", "model: num_attention_heads"),
        ("layers", "--tp=2 --dp=2", "rank 0 and rank 1 have different layers"),
    ],
)
def test_ranks_that_find_other_models_are_refused(eight, tmp_path, what, options, words):
    """As on nodes with disks of their own; also if no two ranks have a layer in common."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        torch.manual_seed(0)
        folder.mkdir()
        small_llama.write(folder / "model", "llama")
    path = folders[1] / "model"
    if what == "weights":
        weights = load_file(path / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][3, 2] += 1e-3
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    elif what == "config":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    else:
        wider = small_llama.config("llama", intermediate_size=48)
        AutoModelForCausalLM.from_config(wider).save_pretrained(path)
    for said in eight(4, in_own_folder, [str(folder) for folder in folders], options):
        assert isinstance(said, str) and words in said


def what_ranks_say_of_experts(groups_of, changed):
    """On a rank of two: what is said of a block with experts, which one rank may have otherwise."""
    groups = [dist.new_group(ranks) for ranks in groups_of]
    rank = dist.get_rank()
    group = next(group for group, ranks in zip(groups, groups_of, strict=True) if rank in ranks)
    model = models.DeferredLM(small_llama.config("mixtral"))
    divide_experts(model.layers, group)
    values = model.values

    def other(*args):
        state = values(*args)
        if changed and rank == 1:
            state[f"2.mlp.{changed}"][0] += 1e-3
        return state

    model.values = other
    digests = part.fill(model, [2], 0, "cpu")
    try:
        part.require_same_layers(digests)
    except ValueError as error:
        return str(error)


def test_ranks_agree_on_the_experts_that_both_have(eight):
    words = "rank 0 and rank 1 have different weights of layer 2"
    apart, together = [[0], [1]], [[0, 1]]
    for groups, changed, said in [
        (together, None, None),
        (together, "gate.weight", words),
        (together, "experts.down_proj", None),
        (apart, "experts.down_proj", words),
        (apart, None, None),
    ]:
        assert eight(2, what_ranks_say_of_experts, groups, changed) == [said] * 2, (groups, changed)


def losses(arguments):
    return train.losses(" ".join(arguments))


def test_ranks_need_not_divide_the_vocabulary(eight, tmp_path):
    """Nor has it to be that of the tokenizer: 1,025 words."""
    base = [*small_gpt2.write(tmp_path, extra=1), "--steps=3", "--lr=1e-2"]
    alone = eight(1, losses, base)[0]
    assert alone[-1] < alone[0] - 0.05
    for ranks, options in (2, ["--tp=2"]), (4, ["--tp=2", "--pp=2"]):
        for found in eight(ranks, losses, [*base, *options]):
            assert found == pytest.approx(alone, abs=1e-5)


def hooks_are_kept():
    """On a rank of two: the gradient that a hook of a norm sees, under sequence parallelism."""
    seen = []
    for deferred in False, True:
        model = models.DeferredLM(models.gpt2_config(blocks=1), dropout=0.0)
        layers = model.layers
        values = [model.values(number) for number in range(3)]
        if deferred:
            parallelize(layers, gpt2_plan(), sequence=True)
        for state in values:
            materialize(layers, state)
        if not deferred:
            parallelize(layers, gpt2_plan(), sequence=True)
        layers[1].block.ln_1.weight.register_hook(seen.append)
        torch.manual_seed(0)
        tokens = torch.randint(1024, (2, 16))
        torch.nn.Sequential(*layers)(tokens).square().sum().backward()
    return [gradient.clone() for gradient in seen]


def test_a_hook_sees_the_whole_gradient_of_a_model_that_was_filled(eight):
    (first, filled), (other, _) = eight(2, hooks_are_kept)
    assert torch.equal(first, other) and torch.equal(first, filled)


def forwards_of_blocks(arguments):
    """On a rank: how often blocks run in a step, and in the trial before it."""
    seen = []
    with train.Training(train.parse(arguments)) as training:
        for stage in training.pipeline.stages.values():
            for layer in stage.layers[1:-1]:
                layer.block.register_forward_hook(lambda *_: seen.append(1))
        next(iter(training))
    return len(seen)


def test_recomputed_blocks_run_twice(eight, tmp_path):
    """No number but this one shows it: losses are those without."""
    base = [*small_gpt2.write(tmp_path), "--microbatches=4", "--steps=1"]
    plain = eight(1, forwards_of_blocks, base)[0]
    assert plain >= 2 * 4
    assert eight(1, forwards_of_blocks, [*base, "--recompute"])[0] == plain + 2 * 4
