"""Bytes kept for the backward, counted and predicted, and the operations that decide them."""

import warnings
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from naranhi import models
from naranhi.autograd import (
    Dropout,
    FunctionLayer,
    MaskedReLU,
    MaxPool2d,
    Recompute,
    ReLU,
    SavedTensors,
    recompute,
)
from naranhi.costs import gpt2_block_items, transformer_layer_bytes, transformer_layer_items
from naranhi.models import TransformerLayer


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def gradients(function, *inputs, seed=0):
    """The results of a function and the gradients of a fixed weighting of them, by seed."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    torch.manual_seed(seed)
    result = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad] + weights
    rays = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    return result, *torch.autograd.grad(result, wanted, rays)


def same_bits(some, others):
    assert len(some) == len(others)
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# --- counting ------------------------------------------------------------------------------------


def test_a_storage_counts_once_however_often_and_through_whatever_view_it_is_saved():
    x = torch.randn(6, 4, requires_grad=True)
    with SavedTensors(nn.Identity()) as saved:
        y = x * x + (x.view(4, 6) * x.view(4, 6)).view(6, 4) + x.t().exp().t() * x.detach()
    exponential = 6 * 4 * 4  # the only other thing: exp saves its own output
    assert saved.bytes == x.nbytes + exponential
    assert len(saved.items) == 2
    del y


def test_a_view_keeps_the_whole_of_its_storage():
    x = torch.randn(100, 8, requires_grad=True)
    with SavedTensors(nn.Identity()) as saved:
        y = x[:1].square()
    assert saved.items[0].shape == (1, 8)
    assert saved.bytes == saved.held == 100 * 8 * 4
    del y


def test_parameters_and_buffers_are_no_activations():
    layer = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    x = torch.randn(5, 8)
    with SavedTensors(layer) as saved:
        y = layer(x)
    linear, norm = layer
    assert saved.by_layer == {"0": x.nbytes, "1": 5 * 3 * 4 + 2 * 3 * 4}  # and batch statistics
    assert saved.parameter_bytes == sum(
        t.nbytes for t in (norm.weight, norm.running_mean, norm.running_var)
    ), linear
    x.requires_grad_()
    with SavedTensors(layer) as saved:
        y = layer(x)
    assert saved.parameter_bytes == linear.weight.nbytes + sum(
        t.nbytes for t in (norm.weight, norm.running_mean, norm.running_var)
    )
    del y


def test_layers_of_an_mlp_keep_their_input_and_both_sides_of_the_gelu():
    layers = models.mlp(3, 16)
    x = torch.randn(10, 16)
    with SavedTensors(layers) as saved:
        y = nn.Sequential(*layers)(x)
    assert saved.by_layer == {f"{i} MLPBlock": (1 + 4 + 4) * x.nbytes for i in range(3)}
    assert [item.shape for item in saved.items[:3]] == [(10, 16), (10, 64), (10, 64)]
    del y


def test_what_the_backward_has_used_is_no_longer_held():
    layers = models.mlp(4, 8)
    with SavedTensors(layers) as saved:
        loss = nn.Sequential(*layers)(torch.randn(2, 8)).square().sum()
    assert saved.held == saved.peak == saved.bytes > 0
    total = saved.bytes
    loss.backward()
    assert (saved.held, saved.peak, saved.bytes) == (0, total, total)


def test_what_nobody_can_reach_is_no_longer_held():
    x = torch.randn(7, requires_grad=True)
    with SavedTensors(nn.Identity()) as saved:
        y = x.exp().softmax(0)  # both save their own output
        assert saved.held == 2 * x.nbytes
        del y
        assert saved.held == 0
    assert saved.bytes == saved.peak == 2 * x.nbytes


def test_counting_changes_no_gradient():
    layer = nn.Sequential(*models.mlp(2, 8), nn.Softmax(-1))
    x = torch.randn(3, 8)
    plain = gradients(layer, x)
    with SavedTensors(layer):
        counted = gradients(layer, x)
    assert same_bits(plain, counted)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "to_sparse, indices",
    [
        (torch.Tensor.to_sparse, 8 * 2 * 4),
        (torch.Tensor.to_sparse_csr, 8 * (5 + 2 * 4)),  # its columns are a view of both indices
    ],
)
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_sparse_tensor_is_its_values_and_indices(to_sparse, indices, is_buffer):
    x, graph = torch.randn(4, 3, requires_grad=True), nn.Module()
    adjacency = to_sparse(torch.eye(4))
    if is_buffer:
        graph.register_buffer("adjacency", adjacency)
    with SavedTensors([graph]) as saved:
        y = adjacency @ x
    kept = 4 * 4 + indices
    assert (saved.bytes, saved.parameter_bytes) == ((0, kept) if is_buffer else (kept, 0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3)) and saved.held == 0


def test_a_failing_layer_leaves_nothing_behind():
    layers = [nn.Linear(4, 4), nn.Linear(5, 4)]
    saved = SavedTensors(layers)
    with pytest.raises(RuntimeError), saved:
        nn.Sequential(*layers)(torch.randn(2, 4))
    with saved:
        y = layers[0](torch.randn(2, 4)).exp()
    assert [item.layer for item in saved.items[-2:]] == ["0 Linear", ""]
    count = len(saved.items)
    z = layers[0](torch.randn(2, 4, requires_grad=True))
    assert len(saved.items) == count
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    del y, z


# --- the formula ---------------------------------------------------------------------------------


def paper(s, b, h, a, t, sequence_parallel, recompute):
    """Table 2 of the paper, as fractions."""
    scores = Fraction(5 * a * s, h) if recompute == "none" else 0
    if recompute == "full":
        return 2 * s * b * h
    if sequence_parallel:
        return s * b * h * (Fraction(34, t) + scores / t)
    return s * b * h * (10 + Fraction(24, t) + scores / t)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("t, sequence_parallel", [(1, False), (1, True), (2, False), (8, True)])
@pytest.mark.parametrize("s, b, h, a", [(2048, 1, 12288, 96), (16, 3, 24, 8), (1024, 8, 768, 16)])
def test_the_formula_is_the_papers(s, b, h, a, t, sequence_parallel, recompute):
    if t == 1:
        assert paper(s, b, h, a, 1, False, "none") == s * b * h * (34 + Fraction(5 * a * s, h))
    predicted = transformer_layer_bytes(s, b, h, a, t, sequence_parallel, recompute)
    assert predicted == paper(s, b, h, a, t, sequence_parallel, recompute)
    assert isinstance(predicted, int)


def test_attention_keeps_most_of_a_layer_of_gpt3():
    # The paper: 5as/h is 80 for GPT-3, so that selective recomputation saves 70%.
    s, h, a = 2048, 12288, 96
    kept = transformer_layer_bytes(s, 1, h, a, recompute="selective")
    assert transformer_layer_bytes(s, 1, h, a) == s * h * (34 + 80)
    assert kept == s * h * 34


@pytest.mark.parametrize(
    "sizes, options, error, culprit",
    [
        ((0, 1, 8, 2), {}, ValueError, "sequence"),
        ((4, -1, 8, 2), {}, ValueError, "microbatch"),
        ((4, 1, 8.0, 2), {}, TypeError, "hidden"),
        ((4, 1, 8, True), {}, TypeError, "heads"),
        ((4, 1, 8, "2"), {}, TypeError, "heads"),
        ((4, 1, 8, 3), {}, ValueError, "hidden = 8 is not a multiple of heads = 3"),
        ((4, 1, 8, 2), {"tensor_parallel": 0}, ValueError, "tensor_parallel"),
        ((4, 1, 8, 2), {"tensor_parallel": 4}, ValueError, "heads = 2"),
        (
            (5, 1, 8, 2),
            {"tensor_parallel": 2, "sequence_parallel": True},
            ValueError,
            "sequence = 5",
        ),
        ((4, 1, 8, 2), {"sequence_parallel": 2}, TypeError, "sequence_parallel"),
        ((4, 1, 8, 2), {"recompute": "some"}, ValueError, "recompute"),
        ((4, 1, 8, 2), {"recompute": None}, ValueError, "recompute"),
    ],
)
def test_bad_sizes_are_refused_by_name(sizes, options, error, culprit):
    with pytest.raises(error, match=culprit):
        transformer_layer_bytes(*sizes, **options)


def test_a_sequence_that_is_cut_only_by_sequence_parallelism_may_be_odd():
    assert transformer_layer_bytes(5, 1, 8, 2, tensor_parallel=2) > 0


# --- the layer that keeps what the formula says --------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "s, b, h, a, dtype",
    [(32, 2, 64, 4, torch.bfloat16), (7, 3, 24, 3, torch.float16), (16, 1, 8, 8, torch.bfloat16)],
)
def test_the_layer_keeps_what_the_formula_says(s, b, h, a, dtype, kind):
    layer = TransformerLayer(h, a, recompute=kind).to(dtype)
    x = torch.randn(s, b, h, dtype=dtype, requires_grad=True)
    with SavedTensors(layer) as saved:
        y = layer(x)
    assert saved.bytes == saved.held == transformer_layer_bytes(s, b, h, a, recompute=kind)
    y.sum().backward()
    assert saved.held == 0


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_a_layer_of_gpt3_keeps_what_the_formula_says(kind):
    with torch.device("meta"):  # 2.9 GB of activations, and 3.6 GB of weights, that nobody computes
        layer = TransformerLayer(12288, 96, recompute=kind).to(torch.bfloat16)
        x = torch.randn(2048, 1, 12288, dtype=torch.bfloat16, requires_grad=True)
        with SavedTensors(layer) as saved:
            y = layer(x)
    assert saved.bytes == transformer_layer_bytes(2048, 1, 12288, 96, recompute=kind)
    del y


def test_items_are_what_the_layer_keeps_one_by_one():
    layer = TransformerLayer(64, 4).to(torch.bfloat16)
    with SavedTensors(layer) as saved:
        y = layer(torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True))
    predicted = [item.bytes for item in transformer_layer_items(32, 2, 64, 4)]
    assert [item.bytes for item in saved.items] == predicted
    del y


def test_recomputing_changes_no_bit_of_a_layer():
    x = torch.randn(12, 2, 32)
    layers = {
        kind: TransformerLayer(32, 4, dropout=0.3, recompute=kind)
        for kind in ("none", "selective", "full")
    }
    for layer in layers.values():
        layer.load_state_dict(layers["none"].state_dict())
    kept = gradients(layers["none"], x)
    assert not same_bits(kept, gradients(layers["none"], x, seed=1)), "dropout does something"
    assert same_bits(kept, gradients(layers["selective"], x))
    assert same_bits(kept, gradients(layers["full"], x))


def test_the_layer_is_a_transformer_layer():
    """The same function as torch's own, and it looks at no later token."""
    ours = TransformerLayer(16, 4, dropout=0.0)
    torchs = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, activation="gelu", norm_first=True)
    head = torch.cat([torch.arange(4) + 12 * i for i in range(4)])  # q, k, v of a head in a row
    rows = torch.cat([head, head + 4, head + 8])
    names = {
        "self_attn.in_proj_": "qkv.",
        "self_attn.out_proj.": "projection.",
        "linear1.": "up.",
        "linear2.": "down.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    with torch.no_grad():
        for name, parameter in torchs.named_parameters():
            prefix = next(prefix for prefix in names if name.startswith(prefix))
            value = ours.get_parameter(name.replace(prefix, names[prefix]))
            parameter.copy_(value[rows] if prefix == "self_attn.in_proj_" else value)
    x = torch.randn(10, 2, 16)
    future = nn.Transformer.generate_square_subsequent_mask(10)
    torch.testing.assert_close(ours(x), torchs(x, src_mask=future, is_causal=True))
    changed = x.clone()
    changed[6:] += 1
    assert torch.equal(ours(x)[:6], ours(changed)[:6])


def test_dropout_is_off_in_evaluation():
    layer = TransformerLayer(16, 2, dropout=0.9).eval()
    x = torch.randn(4, 1, 16)
    assert torch.equal(layer(x), layer(x))


def test_a_layer_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="3 heads"):
        TransformerLayer(16, 3)
    with pytest.raises(ValueError, match="recompute"):
        TransformerLayer(16, 2, recompute="everything")


def test_at_the_peak_one_layer_is_whole_and_of_the_others_only_the_inputs_are_held():
    sizes = 32, 2, 64, 4
    layers = [TransformerLayer(64, 4, recompute="full").to(torch.bfloat16) for _ in range(5)]
    with SavedTensors(layers) as saved:
        y = nn.Sequential(*layers)(torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True))
        assert saved.held == 5 * transformer_layer_bytes(*sizes, recompute="full")
        y.sum().backward()
    assert saved.peak == transformer_layer_bytes(*sizes) + 4 * transformer_layer_bytes(
        *sizes, recompute="full"
    )
    assert saved.held == 0


# --- GPT-2's block -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("s, b, h, a", [(32, 2, 64, 4), (17, 3, 48, 3)])
def test_the_account_of_a_gpt2_block_is_what_it_keeps(s, b, h, a, device):
    config = models.gpt2_config(positions=s, hidden=h, heads=a, blocks=1)
    _, block, _ = models.gpt2(config, attention="eager")
    block.to(device, torch.bfloat16)
    x = torch.randn(b, s, h, dtype=torch.bfloat16, device=device, requires_grad=True)
    with SavedTensors([block]) as saved:
        y = block(x)
    account = gpt2_block_items(s, b, h, a, device)
    assert saved.bytes == sum(item.bytes for item in account)
    assert account[0].bytes == transformer_layer_bytes(s, b, h, a)
    assert all(item.bytes > 0 and item.why for item in account)
    del y

    with SavedTensors(dict(block.block.named_modules())) as saved:
        y = block(x)
    kept = saved.by_layer
    more = {item.item: item.bytes for item in account[1:]}
    by_part = {
        "steps of gelu_new": kept["mlp.act"] - 8 * s * b * h,
        "statistics of the norms": kept["ln_1"] + kept["ln_2"] - 4 * s * b * h,
        "attention's dropout mask, its second byte": kept["attn"]
        - 6 * s * b * h
        - 5 * a * s * s * b,
        "other dropout masks, their second byte": kept["attn.resid_dropout"]
        + kept["mlp.dropout"]
        - 2 * s * b * h,
    }
    assert more == {item: bytes for item, bytes in by_part.items() if bytes}
    assert len(more) == (4 if device == "cpu" else 2)
    del y


def test_the_account_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="device"):
        gpt2_block_items(4, 1, 8, 2, device="tpu")
    with pytest.raises(ValueError, match="heads"):
        gpt2_block_items(4, 1, 8, 3)


# --- our own functions ---------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ReLU, MaskedReLU])
def test_relu(function):
    x = torch.randn(5, 7, dtype=torch.float64)
    x = (x + 0.1 * x.sign()).requires_grad_()  # not near 0, where it has no derivative
    assert torch.autograd.gradcheck(function.apply, x)
    assert torch.autograd.gradgradcheck(function.apply, x)
    special = torch.tensor([-1.0, -0.0, 0.0, 2.0, torch.inf, -torch.inf, torch.nan])
    ours, torchs = gradients(function.apply, special), gradients(torch.relu, special)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_relu_shares_its_output_with_the_linear_that_follows():
    x = torch.randn(10, 16, requires_grad=True)
    bytes = {}
    for function in (ReLU, MaskedReLU):
        layers = [FunctionLayer(function.apply), nn.Linear(16, 4)]
        with SavedTensors(layers) as saved:
            y = nn.Sequential(*layers)(x)
        bytes[function] = list(saved.by_layer.values())
        del y
    assert bytes[ReLU] == [x.nbytes, 0]
    assert bytes[MaskedReLU] == [x.numel(), x.nbytes]


@pytest.mark.parametrize(
    "shape, window, stride",
    [
        ((2, 3, 4, 4), 2, None),
        ((1, 1, 7, 5), 2, None),
        ((1, 2, 6, 6), 3, 2),
        ((1, 1, 20, 18), 17, 1),
        ((1, 1, 3, 3), 3, None),
        ((2, 1, 5, 5), 1, 2),
    ],
)
def test_max_pooling(shape, window, stride):
    def ours(x):
        return MaxPool2d.apply(x, window, stride)

    apart = torch.randperm(torch.tensor(shape).prod()).double().view(shape)
    assert torch.autograd.gradcheck(ours, apart.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(ours, apart.clone().requires_grad_())
    equals = torch.randint(0, 3, shape).double()
    for x in (apart, equals):
        torch.testing.assert_close(
            gradients(ours, x), gradients(lambda x: F.max_pool2d(x, window, stride), x)
        )
    equals.view(-1)[::5] = torch.nan
    torch.testing.assert_close(ours(equals), F.max_pool2d(equals, window, stride), equal_nan=True)


def test_max_pooling_by_hand():
    x = torch.tensor([[1.0, 5, 2, 0], [4, 3, 8, 7], [6, 1, 0, 2], [2, 9, 3, 1]])[None, None]
    x.requires_grad_()
    y = MaxPool2d.apply(x, 2)
    y.backward(torch.tensor([[0.8, 1.2], [0.9, 0.5]])[None, None])
    assert y[0, 0].tolist() == [[5, 8], [9, 3]]
    torch.testing.assert_close(
        x.grad[0, 0], torch.tensor([[0, 0.8, 0, 0], [0, 0, 1.2, 0], [0, 0, 0, 0], [0, 0.9, 0.5, 0]])
    )


def test_max_pooling_keeps_a_byte_a_result_where_torch_keeps_the_input_and_eight():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    kept = {}
    for name, layer in (("ours", FunctionLayer(MaxPool2d.apply, 2)), ("torch", nn.MaxPool2d(2))):
        with SavedTensors(layer) as saved:
            y = layer(x)
        kept[name] = saved.bytes
        del y
    results = x.numel() // 4
    assert kept == {"ours": results, "torch": x.nbytes + 8 * results}


@pytest.mark.parametrize(
    "shape, window, stride",
    [((3, 8, 8), 2, None), ((1, 1, 4, 4), 0, None), ((1, 1, 4, 4), 5, None), ((1, 1, 4, 4), 2, 0)],
)
def test_a_window_that_does_not_fit_is_refused(shape, window, stride):
    with pytest.raises(ValueError, match=r"\(.*4, 4\)|batch, channels"):
        MaxPool2d.apply(torch.zeros(shape), window, stride)


def test_dropout_keeps_a_byte_an_element():
    x = torch.randn(200, 100, requires_grad=True)
    with SavedTensors(nn.Identity()) as saved:
        y = Dropout.apply(x, 0.25)
    assert saved.bytes == x.numel()
    kept = y != 0
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(kept, 1 / 0.75, 0.0))
    assert torch.equal(Dropout.apply(x, 0.0), x)
    for probability in (1.0, -0.1):
        with pytest.raises(ValueError, match="probability"):
            Dropout.apply(x, probability)


# --- recomputation -------------------------------------------------------------------------------


class Random(nn.Module):
    """A Linear and a dropout: what comes out depends on weights, inputs and chance."""

    def __init__(self, size=8):
        super().__init__()
        self.linear, self.dropout = nn.Linear(size, size), nn.Dropout(0.4)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))


def test_recomputation_changes_no_bit_and_neither_does_torchs():
    layers = [Random() for _ in range(4)]
    x = torch.randn(6, 8)
    plain = gradients(nn.Sequential(*layers), x)
    ours = gradients(nn.Sequential(*map(Recompute, layers)), x)
    torchs = gradients(
        nn.Sequential(
            *(
                FunctionLayer(lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False))
                for layer in layers
            )
        ),
        x,
    )
    assert same_bits(plain, ours)
    assert same_bits(plain[:2], torchs)  # its layers are hidden from `parameters`


def test_it_keeps_the_inputs_as_torchs_does():
    layers = [Random() for _ in range(4)]
    x = torch.randn(6, 8, requires_grad=True)
    kept = []
    for wrapped in (
        layers,
        [Recompute(layer) for layer in layers],
        [
            FunctionLayer(lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False))
            for layer in layers
        ],
    ):
        with SavedTensors(layers) as saved:
            y = nn.Sequential(*wrapped)(x)
        kept.append(saved.bytes)
        del y
    # Kept: x, and of each layer what dropout multiplied by and the output, the next one's input.
    assert kept == [(1 + 4 * 2) * x.nbytes, 4 * x.nbytes, 4 * x.nbytes]


def test_the_random_numbers_that_follow_are_the_same():
    layers, x = [Random(), Random()], torch.randn(6, 8, requires_grad=True)
    after = []
    for stack in (layers, map(Recompute, layers)):
        torch.manual_seed(3)
        nn.Sequential(*stack)(x).sum().backward()
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_recomputation_passes_gradcheck():
    layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Recompute(layer), x)


def test_tuples_masks_and_other_arguments_pass_through():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs, factor):
            x, mask, kind = inputs
            return self.linear(x) * mask[:, None] * factor, mask, kind

    layer = Masked()
    x = torch.randn(3, 4, requires_grad=True)
    mask, kind = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, False, True])
    plain, ours = layer((x, mask, kind), 3), Recompute(layer)((x, mask, kind), 3)
    assert same_bits(plain, ours)
    assert [one.requires_grad for one in ours] == [True, False, False]
    wanted = [x, *layer.parameters()]
    assert same_bits(
        torch.autograd.grad(plain[0].square().sum(), wanted),
        torch.autograd.grad(ours[0].square().sum(), wanted),
    )


def test_results_that_nobody_uses_need_no_gradient():
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    first, second = recompute(lambda a, b: (a * a, b * b), a, b)
    (3 * first).sum().backward()
    assert torch.equal(a.grad, 6 * a.detach())
    assert b.grad is None or not b.grad.any()
    assert second.requires_grad


def test_a_first_layer_whose_input_has_no_gradient_learns():
    embedding = nn.Embedding(5, 3)
    tokens = torch.tensor([1, 4, 1])
    plain = torch.autograd.grad(embedding(tokens).square().sum(), embedding.weight)
    ours = torch.autograd.grad(Recompute(embedding)(tokens).square().sum(), embedding.weight)
    assert same_bits(plain, ours)


def test_frozen_weights_get_no_gradient():
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    Recompute(layer)(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is None


def test_without_anything_to_differentiate_the_function_is_just_called():
    calls = []
    weight = torch.ones(3, requires_grad=True)

    def function(x):
        calls.append(x)
        return x * weight

    y = recompute(function, torch.ones(3))
    y.sum().backward()
    assert len(calls) == 1
    assert torch.equal(weight.grad, torch.ones(3))
    with torch.no_grad():
        assert not Recompute(nn.Linear(3, 3))(torch.ones(3)).requires_grad


def test_a_weight_that_would_get_no_gradient_is_refused():
    hidden = nn.Linear(4, 6)
    x = torch.randn(2, 4, requires_grad=True)
    y = recompute(lambda x: hidden(x), x)
    with pytest.raises(ValueError, match=r"\(6,.*neither an input nor in `parameters`"):
        y.sum().backward()
    y = recompute(lambda x: hidden(x), x, parameters=hidden.parameters())
    y.sum().backward()
    assert hidden.weight.grad is not None


def test_a_weight_changed_before_the_backward_is_noticed():
    """Otherwise the recomputation would silently be that of another network."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = Recompute(layer)(x)
    with torch.no_grad():
        layer.weight -= 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_replaced_before_the_backward_is_noticed(trained):
    layer, weight = Recompute(nn.Linear(3, 3).requires_grad_(trained)), torch.ones(3, 3)
    inputs = torch.ones(2, 3, requires_grad=True)
    result = torch.func.functional_call(layer, {"layer.weight": weight}, inputs)
    with pytest.raises(RuntimeError, match="the parameter weight has been replaced"):
        result.sum().backward()


def test_a_result_that_is_no_tensor_is_refused():
    class Listing(nn.Module):
        def forward(self, x):
            return [x, iter([x])]

    with pytest.raises(TypeError, match="Listing returned list_iterator, not a tensor or tensors"):
        Recompute(Listing())(torch.ones(2, requires_grad=True))


def test_recomputations_nest():
    inner = Random()
    x = torch.randn(6, 8)
    assert same_bits(gradients(inner, x), gradients(Recompute(Recompute(inner)), x))


def test_the_precision_of_the_forward_is_met_again():
    layer = nn.Sequential(Random(), Random())
    x = torch.randn(6, 8)

    def mixed(function, inside, enabled=True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = function(x)
            loss = y.square().sum()
            if inside:
                return torch.autograd.grad(loss, layer.parameters())
        return torch.autograd.grad(loss, layer.parameters())

    plain = mixed(layer, inside=False)
    assert not same_bits(plain, mixed(layer, inside=False, enabled=False)), "it does something"
    assert same_bits(plain, mixed(Recompute(layer), inside=False))
    assert same_bits(plain, mixed(Recompute(layer), inside=True))


def test_recomputed_layers_of_gpt2_keep_their_input_only():
    layers = models.gpt2(models.gpt2_config(blocks=2, hidden=32))
    tokens = torch.randint(0, 1024, (2, 16))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 12:] = 0
    results = {}
    for name, stack in (("kept", layers), ("recomputed", [Recompute(layer) for layer in layers])):
        torch.manual_seed(0)
        with SavedTensors(stack) as saved, warnings.catch_warnings():
            warnings.simplefilter("error")
            logits = nn.Sequential(*stack)((tokens, mask))
        parameters = list(dict.fromkeys(nn.Sequential(*layers).parameters()))
        results[name] = logits, *torch.autograd.grad(logits.square().sum(), parameters)
        bytes = saved.by_layer
    assert same_bits(results["kept"], results["recomputed"])
    hidden = 2 * 16 * 32 * 4
    assert list(bytes.values()) == [tokens.nbytes + mask.nbytes, hidden, hidden, hidden]


def test_a_parameter_frozen_after_the_forward_is_as_without_recomputation():
    found = []
    for wrap in (lambda layer: layer, Recompute):
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        x = torch.randn(2, 3, requires_grad=True)
        output = wrap(layer)(x)
        layer.weight.requires_grad_(False)
        output.square().sum().backward()
        found.append((x.grad, layer.bias.grad, layer.weight.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] is None and found[1][2] is None
