"""Models as lists of layers: the arithmetic is the original's, and the time is what one sets."""

import copy
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

from naranhi import models
from naranhi.autograd import Recompute, SavedTensors, split_backward, weight_gradients
from naranhi.models import Paced, paced


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- MLP -----------------------------------------------------------------------------------------


def test_an_mlp_is_a_list_of_residual_blocks():
    layers = models.mlp(3, 8)
    assert [
        (layer.up.in_features, layer.up.out_features, layer.down.out_features) for layer in layers
    ] == [(8, 32, 8)] * 3
    x = torch.randn(5, 8)
    layer = layers[0]
    inner = F.gelu(x @ layer.up.weight.T + layer.up.bias)
    torch.testing.assert_close(layer(x), x + inner @ layer.down.weight.T + layer.down.bias)
    assert not torch.equal(layers[0].up.weight, layers[1].up.weight)
    assert models.mlp(1, 8, inner=5)[0].up.out_features == 5


@pytest.mark.parametrize("sizes", [(0, 8), (1, 0), (1, 8, 0)])
def test_an_mlp_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        models.mlp(*sizes)


# --- Paced ---------------------------------------------------------------------------------------


class Clock:
    """Time that passes when someone sleeps, or says so."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (paced, split_backward, weight_gradients):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(paced, "sleep", clock.sleep)
    return clock


class Busy(nn.Module):
    """A Linear whose forward and backward take a second each of the clock's time."""

    def __init__(self, clock):
        super().__init__()
        self.linear, self.clock = nn.Linear(4, 4), clock

    def forward(self, x):
        self.clock.now += 1
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: setattr(self.clock, "now", self.clock.now + 1))
        return y


def near(times):
    return pytest.approx(times, abs=1e-9)


def test_forward_and_backward_take_their_time_whatever_the_arithmetic_takes(clock):
    layer = Paced(Busy(clock), forward=3, backward=5)
    y = layer(torch.randn(2, 4, requires_grad=True))
    assert (clock.now, clock.slept) == (103, near([2]))
    y.sum().backward()
    assert (clock.now, clock.slept) == (108, near([2, 4]))
    assert layer.late == 0


def test_the_first_layer_of_a_model_is_paced_too(clock):
    """Its input needs no gradient."""
    layer = Paced(Busy(clock), forward=3, backward=5)
    layer(torch.randn(2, 4)).sum().backward()
    assert clock.now == 108
    tokens = Paced(nn.Embedding(5, 3), forward=1, backward=2)
    tokens(torch.tensor([1, 2])).sum().backward()
    assert clock.now == 111
    assert tokens.layer.weight.grad[1].tolist() == [1, 1, 1]


def test_without_gradients_the_forward_is_paced(clock):
    with torch.no_grad():
        assert not Paced(Busy(clock), forward=3, backward=5)(torch.randn(2, 4)).requires_grad
    assert clock.now == 103


def test_arithmetic_that_is_too_slow_is_counted(clock):
    layer = Paced(Busy(clock), forward=0.5, backward=2)
    layer(torch.randn(2, 4)).sum().backward()
    assert layer.late == 1
    assert clock.now == 103


def test_recomputation_costs_another_forward(clock):
    layer = Recompute(Paced(Busy(clock), forward=3, backward=5))
    y = layer(torch.randn(2, 4))
    assert clock.now == 103
    y.sum().backward()
    assert clock.now == 111


def test_a_split_backward_takes_its_times_and_leaves_the_weights_for_later(clock):
    busy = Busy(clock)
    layer = Paced(busy, forward=3, backward=5, input_grad=2, weight_grad=4)
    x = torch.randn(2, 4, requires_grad=True)
    whole = torch.autograd.grad(layer(x).square().sum(), [x, *busy.parameters()])

    later = []
    layer.defer = later.append
    for times in (1, 2):
        x.grad = None
        loss = layer(x).square().sum()
        start = clock.now
        loss.backward()
        assert clock.now - start == near(2)
        assert torch.equal(x.grad, whole[0])
        assert len(later) == 1
        start = clock.now
        later.pop()()
        assert clock.now - start == near(4)
        for weight, gradient in zip(busy.parameters(), whole[1:], strict=True):
            torch.testing.assert_close(weight.grad, times * gradient)


def test_half_a_backward_is_the_default_of_each_part():
    assert Paced(nn.Identity(), 1, 6).times == {
        "forward": 1,
        "backward": 6,
        "input_grad": 3,
        "weight_grad": 3,
    }


def test_arithmetic_is_real():
    layers = [nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), *models.mlp(2, 8)]
    x = torch.randn(4, 8, requires_grad=True)
    parameters = [x, *nn.Sequential(*layers).parameters()]
    results = []
    for stack in (layers, [Paced(layer, 0, 0) for layer in layers]):
        torch.manual_seed(0)
        with SavedTensors(stack) as saved:
            y = nn.Sequential(*stack)(x)
        kept = saved.bytes
        results.append((y, kept, *torch.autograd.grad(y.square().sum(), parameters)))
    (y, kept, *gradients), (paced_y, paced_kept, *paced_gradients) = results
    assert kept == paced_kept
    assert torch.equal(y, paced_y)
    assert all(map(torch.equal, gradients, paced_gradients))


def test_tuples_pass_and_masks_stay_without_gradient():
    class Masked(nn.Module):
        def forward(self, inputs):
            x, mask, factor = inputs
            return x * mask * factor, mask, factor

    x = torch.randn(3, requires_grad=True)
    mask, factor = torch.tensor([True, False, True]), torch.tensor(2.0)
    y, *others = Paced(Masked(), 0, 0)((x, mask, factor))
    y.sum().backward()
    assert x.grad.tolist() == [2, 0, 2]
    assert torch.equal(others[0], mask)
    assert not any(other.requires_grad for other in others)


def test_results_that_nobody_uses_need_no_gradient():
    class Squares(nn.Module):
        def forward(self, a, b):
            return a * a, b * b

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    first, second = Paced(Squares(), 0, 0)(a, b)
    (3 * first).sum().backward()
    assert torch.equal(a.grad, 6 * a.detach())
    assert b.grad is None
    assert second.requires_grad


def test_an_output_can_go_before_its_backward():
    """As in a pipeline, where it has been sent: its place in the graph is enough."""

    class AddOne(nn.Module):
        def forward(self, x):
            return x + 1

    x = torch.randn(3, requires_grad=True)
    y = Paced(AddOne(), 0, 0)(x)
    edge, storage = get_gradient_edge(y), StorageWeakRef(y.untyped_storage())
    assert not storage.expired()
    del y
    assert storage.expired()
    torch.autograd.backward((edge,), (torch.ones(3),))
    assert x.grad.tolist() == [1, 1, 1]


def test_pace_on_a_real_clock():
    layer = Paced(nn.Linear(4, 4), forward=0.03, backward=0.06)
    y = layer(torch.randn(2, 4))
    middle = time.perf_counter()
    y.sum().backward()
    took = time.perf_counter() - middle
    assert 0.06 <= took < 1
    start = time.perf_counter()
    layer(torch.randn(2, 4))
    assert 0.03 <= time.perf_counter() - start < 1


@pytest.mark.parametrize("times", [(-1, 1), (1, float("nan")), (1, 1, float("inf")), (1, 1, 1, -1)])
def test_a_time_that_is_none_is_refused(times):
    with pytest.raises(ValueError, match="0 or more"):
        Paced(nn.Identity(), *times)


def test_a_result_that_is_no_tensor_is_refused():
    class Listing(nn.Module):
        def forward(self, x):
            return [x, iter([x])]

    with pytest.raises(TypeError, match="Listing returned list_iterator, not a tensor or tensors"):
        Paced(Listing(), 0, 0)(torch.ones(2))


# --- GPT-2 ---------------------------------------------------------------------------------------


def unique(layers):
    return dict.fromkeys(nn.Sequential(*layers).parameters())


def count(layers):
    return sum(parameter.numel() for parameter in unique(layers))


def tiny(**options):
    return GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )


def test_gpt2_has_as_many_parameters_as_gpt2():
    with torch.device("meta"):
        tied, untied = (models.gpt2(GPT2Config(), tied=tied) for tied in (True, False))
    assert len(tied) == 1 + 12 + 1
    assert count(tied) == 124_439_808
    assert count(untied) == 163_037_184
    assert tied[0].wte.weight is tied[-1].lm_head.weight


def test_an_untied_head_starts_as_a_copy():
    layers = models.gpt2(tiny(), tied=False)
    assert layers[0].wte.weight is not layers[-1].lm_head.weight
    assert torch.equal(layers[0].wte.weight, layers[-1].lm_head.weight)


def test_an_untied_head_of_a_frozen_model_is_frozen():
    model = GPT2LMHeadModel(tiny()).requires_grad_(False)
    for tied in (True, False):
        assert not any(param.requires_grad for param in unique(models.gpt2_layers(model, tied)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_of_any_integers(dtype):
    embedding = models.gpt2(tiny(), dropout=0.0)[0]
    tokens = torch.randint(0, 50, (2, 5))
    assert torch.equal(embedding(tokens.to(dtype)), embedding(tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_of_16_bits_is_summed_in_32(dtype):
    logits, targets = torch.zeros(8, 2048, 64, dtype=dtype), torch.zeros(8, 2048, dtype=torch.long)
    logits.requires_grad_()
    loss = models.loss(logits, targets)
    torch.testing.assert_close(loss, models.loss(logits.float(), targets), rtol=1e-6, atol=0)
    loss.backward()
    assert logits.grad.dtype == dtype and logits.grad.isfinite().all()
    assert models.loss(logits.double(), targets).dtype == torch.float64


def test_the_default_is_small_random_and_learns():
    torch.manual_seed(1)
    layers = models.gpt2()
    assert len(layers) == 14
    assert count(layers) < 10**6
    assert all(module.training for module in nn.Sequential(*layers).modules())
    torch.manual_seed(1)
    assert all(map(torch.equal, unique(layers), unique(models.gpt2())))
    logits = nn.Sequential(*layers)(torch.randint(0, 1024, (2, 5)))
    assert logits.shape == (2, 5, 1024)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_logits_and_gradients_are_those_of_transformers(attention, padding, dropout):
    torch.manual_seed(0)
    config = tiny(
        attn_implementation=attention, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout
    )
    theirs = GPT2LMHeadModel(config).train()
    ours = copy.deepcopy(theirs)
    layers = models.gpt2_layers(ours)
    tokens = torch.randint(0, 50, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.long)
    if padding == "right":
        mask[1, 6:] = mask[2, 4:] = 0
    if padding == "left":
        mask[1, :3] = 0
    real = mask.bool()

    torch.manual_seed(1)
    expected = theirs(
        tokens, attention_mask=None if padding is None else mask, use_cache=False
    ).logits
    torch.manual_seed(1)
    logits = nn.Sequential(*layers)(tokens if padding is None else (tokens, mask))
    assert torch.equal(logits, expected)
    for result in (expected, logits):
        F.cross_entropy(result[real], tokens[real]).backward()
    names = [name for name, _ in theirs.named_parameters()]
    assert len(names) == len(list(ours.parameters()))
    for name in names:
        assert torch.equal(ours.get_parameter(name).grad, theirs.get_parameter(name).grad), name


def test_the_mask_travels_with_the_hidden_state_to_the_head():
    embedding, block, *_, head = models.gpt2(tiny())
    tokens, mask = torch.randint(0, 50, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    assert embedding(tokens).shape == block(embedding(tokens)).shape == (2, 5, 16)
    for layer, inputs in ((embedding, (tokens, mask)), (block, embedding((tokens, mask)))):
        hidden, passed = layer(inputs)
        assert hidden.shape == (2, 5, 16)
        assert passed is mask
    assert head((hidden, mask)).shape == (2, 5, 50)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_right_changes_no_real_token(attention):
    model = nn.Sequential(*models.gpt2(tiny(), dropout=0.0, attention=attention))
    tokens = torch.randint(0, 50, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    real = mask.bool()
    other = tokens.where(real, (tokens + 1) % 50)
    with torch.no_grad():
        plain, masked, padded_otherwise = model(tokens), model((tokens, mask)), model(other)
        # Without a mask: whatever the padding is, a causal model looks only back.
        assert torch.equal(plain[real], padded_otherwise[real])
        assert not torch.equal(plain[~real], padded_otherwise[~real])
        # With one: the same logits, from another kernel for "sdpa".
        torch.testing.assert_close(masked[real], plain[real], rtol=0, atol=1e-6)

        left = tokens.flip(1), mask.flip(1)
        assert not torch.allclose(
            model(left)[left[1].bool()], model(left[0])[left[1].bool()], atol=1e-4
        ), "padding on the left is seen by all"


def test_options_reach_the_model():
    layers = models.gpt2(tiny(), dropout=0.25, attention="eager")
    assert (layers[0].drop.p, layers[1].block.attn.attn_dropout.p) == (0.25, 0.25)
    assert layers[1].block.mlp.dropout.p == 0.25
    assert layers[1].attention == layers[1].block.attn.config._attn_implementation == "eager"
    config = tiny()
    models.gpt2(config, dropout=0.0)
    assert config.attn_pdrop == 0.1, "one's own configuration stays as it is"


def test_what_cannot_be_is_refused():
    layers = models.gpt2(tiny())
    with pytest.raises(ValueError, match="17 tokens in a row, but the model has 16 positions"):
        layers[0](torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="'flex'"):
        models.gpt2(tiny(), attention="flex")


def test_trained_weights_come_from_a_folder(tmp_path, capfd):
    model = GPT2LMHeadModel(tiny()).half()
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    layers = models.gpt2(tmp_path, dropout=0.0)
    assert capfd.readouterr() == ("", "")
    assert all(module.training for module in nn.Sequential(*layers).modules())
    assert layers[0].wte.weight is layers[-1].lm_head.weight
    assert layers[0].wte.weight.dtype == torch.float32
    tokens = torch.randint(0, 50, (2, 5))
    expected = model.float().eval()(tokens).logits
    assert torch.equal(nn.Sequential(*layers)(tokens), expected)
    assert torch.equal(
        nn.Sequential(*models.gpt2(str(tmp_path)))[0].wte.weight, model.transformer.wte.weight
    )


def test_a_folder_that_holds_something_else_is_named(tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"bert'.*not a GPT-2"):
        models.gpt2(tmp_path / "bert")
    tiny().save_pretrained(tmp_path / "half")
    with pytest.raises(OSError, match=r"half'.*not completely"):
        models.gpt2(tmp_path / "half")


@pytest.mark.processes
def test_offline_one_error_says_what_to_do(tmp_path):
    """In another process, because the hub's client reads HF_HUB_OFFLINE when it is imported."""
    GPT2LMHeadModel(tiny()).save_pretrained(tmp_path / "saved")
    program = (
        "import sys; from naranhi import models\n"
        "print(len(models.gpt2(sys.argv[1])), flush=True)\n"
        "models.gpt2('gpt2')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "saved"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")},
    )
    assert run.stdout == "4\n"
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("OSError: no weights of 'gpt2'.")
    assert "hf download gpt2 --local-dir" in message
    assert "small GPT-2 with random weights" in message


def rewritten(folder, weights, **config):
    """A small GPT-2 of two blocks, saved, but with other weights or settings."""
    model = GPT2LMHeadModel(tiny())
    model.save_pretrained(folder)
    kept = {name: value for name, value in model.state_dict().items() if weights(name)}
    kept.pop("lm_head.weight", None)  # tied
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("weights", "config", "words"),
    [
        (
            lambda name: ".h.1." not in name,
            {},
            r"lack transformer\.h\.1\.\S+ and \d+ more: they were not",
        ),
        (lambda name: True, {"n_layer": 3}, r"lack transformer\.h\.2\."),
        (
            lambda name: True,
            {"n_layer": 1},
            r"have transformer\.h\.1\.\S+ .*its config.json has 1 blocks",
        ),
        (lambda name: True, {"n_layer": 0}, "has 0 blocks of"),
        (lambda name: True, {"activation_function": "none"}, "no GPT-2 can be made of the weights"),
        (lambda name: True, {"n_embd": 12}, "no GPT-2 can be made of the weights"),
        (lambda name: True, {"n_head": "two"}, r"no GPT-2 can be made of the config\.json"),
    ],
)
def test_weights_that_are_not_the_configs_are_refused(tmp_path, weights, config, words):
    """transformers would draw what is missing, and leave out what is too many."""
    with pytest.raises(ValueError, match=words):
        models.gpt2(rewritten(tmp_path, weights, **config))


def test_all_weights_of_a_saved_model_are_there(tmp_path):
    models.gpt2(rewritten(tmp_path, lambda name: True))


def test_damaged_weights_are_refused(tmp_path):
    file = rewritten(tmp_path, lambda name: True) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"no GPT-2 can be made of the weights of .*Safetensor"):
        models.gpt2(tmp_path)
