"""Layers that are more than their class says: cut as they are, or refused by name and unchanged."""

import re

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, T5Config
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.t5.modeling_t5 import T5Block

from naranhi import models
from naranhi.autograd import Recompute, splittable
from naranhi.tensor_parallel import (
    Column,
    Row,
    SequenceParallel,
    Vocabulary,
    full_state_dict,
    gpt2_plan,
    load_full_state_dict,
    mlp_plan,
    parallelize,
    sum_sequence_gradients,
)

WORDS = 51  # two ranks do not divide them


def member(ranks):
    """The group of the first ranks, and this rank; None for one that is not in it."""
    group = first_ranks(ranks)
    torch.manual_seed(0)
    return (group, dist.get_rank()) if dist.get_rank() < ranks else None


# --- what is refused -----------------------------------------------------------------------------


class Double(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OtherAttention(GPT2Attention):
    pass


def hook(*_):
    pass


def mlp(change=None, name="up"):
    (block,) = models.mlp(1, 8, 12)
    new = change(getattr(block, name)) if change else None
    if new is not None:
        setattr(block, name, new)
    return block


def registered(register, *args):
    def change(layer):
        getattr(layer, register)(hook, *args)

    return change


def parameter_hook(layer):
    layer.weight.register_hook(hook)


def other_forward(layer):
    layer.forward = lambda x, own=layer.forward: own(x) * 2


def gpt2():
    torch.manual_seed(0)
    return nn.ModuleList(models.gpt2(models.gpt2_config(10, 12, 16, 4, 1), True, 0.0))


def gpt2_with(change):
    layers = gpt2()
    change(layers)
    return layers


def other_attention(layers):
    layers[1].block.attn.__class__ = OtherAttention


def two_uses(layers):
    layers[2].extra = layers[1].block.ln_1


def only(name, **plan):
    return {name: plan.get("way", SequenceParallel())}


LATER = (
    "would be lost, or get only parts of tensors: make its effect permanent, as prune.remove "
    "and remove_weight_norm do, or register it on what parallelize returns"
)

REFUSED = {  # what is made, its plan, and the message
    "subclass": (
        lambda: mlp(lambda up: Double(8, 12)),
        mlp_plan,
        TypeError,
        "up: a Linear or GPT-2's Conv1D is needed, not the subclass Double, whose own "
        "behaviour would be lost",
    ),
    "splittable": (
        lambda: splittable([mlp()])[0],
        mlp_plan,
        TypeError,
        "not the subclass SplittableLinear",
    ),
    "lazy": (
        lambda: mlp(lambda up: nn.LazyLinear(12)),
        mlp_plan,
        TypeError,
        "not the subclass LazyLinear",
    ),
    "output of nn.MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2),
        lambda: {"out_proj": Row()},
        TypeError,
        "out_proj: .* not the subclass NonDynamicallyQuantizableLinear",
    ),
    "scaled embedding": (
        lambda: nn.ModuleDict({"wte": BartScaledWordEmbedding(10, 4, 0, embed_scale=2.0)}),
        lambda: only("wte", way=Vocabulary()),
        TypeError,
        "wte: an Embedding is needed, not the subclass BartScaledWordEmbedding",
    ),
    "scaled positions": (
        lambda: nn.ModuleDict({"wpe": BartScaledWordEmbedding(10, 4, 0, embed_scale=2.0)}),
        lambda: only("wpe"),
        TypeError,
        "wpe: an Embedding is needed, not the subclass",
    ),
    "subclass of the attention": (
        lambda: gpt2_with(other_attention),
        gpt2_plan,
        TypeError,
        "1.block.attn: GPT-2's attention is needed, not OtherAttention",
    ),
    "forward hook": (
        lambda: mlp(registered("register_forward_hook")),
        mlp_plan,
        ValueError,
        f"up: the forward hook hook {LATER}",
    ),
    "forward pre-hook": (
        lambda: mlp(registered("register_forward_pre_hook"), "down"),
        mlp_plan,
        ValueError,
        "down: the forward pre-hook hook would be lost",
    ),
    "backward hook": (
        lambda: mlp(registered("register_full_backward_hook")),
        mlp_plan,
        ValueError,
        "up: the backward hook hook would be lost",
    ),
    "backward pre-hook": (
        lambda: mlp(registered("register_full_backward_pre_hook")),
        mlp_plan,
        ValueError,
        "up: the full backward pre-hook hook would be lost",
    ),
    "state_dict hook": (
        lambda: mlp(registered("register_state_dict_post_hook")),
        mlp_plan,
        ValueError,
        "up: the state_dict hook hook would be lost",
    ),
    "hook of an attention": (
        lambda: gpt2_with(lambda layers: layers[1].block.attn.register_forward_hook(hook)),
        gpt2_plan,
        ValueError,
        "1.block.attn: the forward hook hook would be lost",
    ),
    "hook of a norm": (
        lambda: gpt2_with(lambda layers: layers[1].block.ln_2.register_forward_hook(hook)),
        gpt2_plan,
        ValueError,
        "1.block.ln_2: the forward hook hook would be lost, or get only parts",
    ),
    "hook of a parameter": (
        lambda: mlp(parameter_hook),
        mlp_plan,
        ValueError,
        "up: its weight has a hook, which would see only a part of the gradient",
    ),
    "hook of a norm's parameter": (
        lambda: gpt2_with(lambda layers: parameter_hook(layers[1].block.ln_2)),
        gpt2_plan,
        ValueError,
        "1.block.ln_2: its weight has a hook, which would see only a part",
    ),
    "old spectral norm": (
        lambda: mlp(spectral_norm),
        mlp_plan,
        ValueError,
        "up: the forward pre-hook SpectralNorm would be lost",
    ),
    "old weight norm": (
        lambda: mlp(weight_norm),
        mlp_plan,
        ValueError,
        "up: the forward pre-hook WeightNorm would be lost",
    ),
    "pruned": (
        lambda: mlp(lambda up: prune.l1_unstructured(up, "weight", 0.5)),
        mlp_plan,
        ValueError,
        "up: the forward pre-hook L1Unstructured would be lost",
    ),
    "spectral norm": (
        lambda: mlp(parametrizations.spectral_norm),
        mlp_plan,
        ValueError,
        "up: its weight is parametrized by _SpectralNorm, which would be lost: call "
        "torch.nn.utils.parametrize.remove_parametrizations",
    ),
    "weight norm": (
        lambda: mlp(parametrizations.weight_norm, "down"),
        mlp_plan,
        ValueError,
        "down: its weight is parametrized by _WeightNorm",
    ),
    "parametrized bias": (
        lambda: mlp(lambda up: parametrizations.orthogonal(up, "weight")),
        mlp_plan,
        ValueError,
        "up: its weight is parametrized by _Orthogonal",
    ),
    "another forward": (
        lambda: mlp(other_forward),
        mlp_plan,
        ValueError,
        "up: its forward was replaced or compiled",
    ),
    "compiled": (
        lambda: mlp(lambda up: up.compile(backend="aot_eager")),
        mlp_plan,
        ValueError,
        "up: its forward was replaced or compiled",
    ),
    "compiled module": (
        lambda: mlp(lambda up: torch.compile(up, backend="aot_eager")),
        mlp_plan,
        TypeError,
        "up: a Linear or GPT-2's Conv1D is needed, not OptimizedModule",
    ),
    "another parameter": (
        lambda: mlp(lambda up: up.register_parameter("scale", nn.Parameter(torch.ones(1)))),
        mlp_plan,
        ValueError,
        "up: it must hold weight and bias, and nothing else, but differs in scale",
    ),
    "frequencies": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(10, 4, scale_grad_by_freq=True)}),
        lambda: only("wte", way=Vocabulary()),
        ValueError,
        "wte: an embedding with scale_grad_by_freq=True is not provided for: make it without",
    ),
    "sparse": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(10, 4, sparse=True)}),
        lambda: only("wte", way=Vocabulary()),
        ValueError,
        "with sparse=True is not",
    ),
    "longest rows": (
        lambda: nn.ModuleDict({"wpe": nn.Embedding(10, 4, max_norm=2.0)}),
        lambda: only("wpe"),
        ValueError,
        "wpe: an embedding with max_norm=2.0 is not",
    ),
    "norm of batches": (
        lambda: nn.ModuleDict({"norm": nn.BatchNorm1d(4)}),
        lambda: only("norm"),
        TypeError,
        "norm: BatchNorm1d computes statistics over all tokens",
    ),
    "another dropout": (
        lambda: nn.ModuleDict({"drop": nn.AlphaDropout()}),
        lambda: only("drop"),
        TypeError,
        "drop: a Dropout is needed, not AlphaDropout",
    ),
    "parametrized norm": (
        lambda: nn.ModuleDict({"norm": parametrizations.weight_norm(nn.LayerNorm((4, 4)))}),
        lambda: only("norm"),
        ValueError,
        "norm: its weight is parametrized by _WeightNorm",
    ),
    "norm outside of the plan": (
        lambda: gpt2_with(two_uses),
        gpt2_plan,
        ValueError,
        "1.block.ln_1.weight and 2.extra.weight are one parameter: the plan has to split both",
    ),
    "all words of an embedding": (
        gpt2,
        lambda: {**gpt2_plan(), "*wte": Vocabulary(gather_output=True)},
        ValueError,
        "0.wte: what an embedding returns is whole on every rank",
    ),
    "whole model along the sequence": (
        lambda: language_model(),
        gpt2_plan,
        ValueError,
        "the model is a GPT2LMHeadModel of "
        "transformers, which counts positions and builds masks by the tokens that it sees",
    ),
    "fast path": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
        lambda: {"linear1": Column(), "linear2": Row()},
        ValueError,
        "linear1: in evaluation, nn.TransformerEncoderLayer uses its layers' weights directly",
    ),
}


def refused(what):
    """The type and the words of the error, when the model is as it was."""
    if not (here := member(2)):
        return None
    make, plan, _, _ = REFUSED[what]
    model = make()
    before = [
        (name, module, type(module), list(vars(module))) for name, module in model.named_modules()
    ]
    params = [(param, len(param._backward_hooks or ())) for param in model.parameters()]
    with pytest.raises((TypeError, ValueError)) as error:
        parallelize(model, plan(), here[0], sequence=True)
    assert before == [
        (name, module, type(module), list(vars(module))) for name, module in model.named_modules()
    ]
    assert params == [(param, len(param._backward_hooks or ())) for param in model.parameters()]
    return error.type, str(error.value)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_cut_layer_would_lose_is_refused(five, what):
    _, _, kind, words = REFUSED[what]
    for error, message in five.call(refused, what)[:2]:
        assert error is kind
        assert re.search(words, message), message


def on_one_rank():
    """A hook on one rank only is an error on all."""
    if not (here := member(2)):
        return None
    group, rank = here
    with pytest.raises(ValueError) as error:
        parallelize(mlp(registered("register_forward_hook") if rank else None), mlp_plan(), group)
    return str(error.value)


def test_a_hook_on_one_rank_is_refused_on_all(five):
    first, second = five.call(on_one_rank)[:2]
    assert first == second
    assert first.startswith("up: the forward hook hook would be lost")


# --- what is kept --------------------------------------------------------------------------------


def hooked_afterwards():
    """Hooks on what is not cut, and on what parallelize returns, see what they always saw."""
    if not (here := member(2)):
        return
    group, rank = here
    seen, results = [], []
    for cut in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(mlp(), nn.LayerNorm(8))
        model[0].register_forward_hook(lambda module, args, y: y * 2)
        model[0].down.bias.requires_grad_()
        model[1].weight.register_hook(lambda grad: grad * 0.5)
        if cut:
            parallelize(model, {"0.up": Column(), "0.down": Row()}, group)
        model[0].up.register_forward_hook(lambda module, args, y: seen.append(y.detach()))
        model[0].up.weight.register_hook(lambda grad: grad * 3)
        x = torch.randn(3, 8, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, model[1].weight.grad, model[0].down.bias.grad])
        own = model[0].up.weight.grad
        results[-1].append(own if cut else own.chunk(2)[rank])
    for tensor, expected in zip(*results, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[1], seen[0].chunk(2, -1)[rank], rtol=0, atol=1e-6)


def test_other_hooks_are_as_they_were(five):
    five.call(hooked_afterwards)


def padding(ranks, index, sequence):
    """An embedding with padding_idx, as the unsplit one, to the bit."""
    if not (here := member(ranks)):
        return
    group, rank = here
    whole, positions = (nn.Embedding(13, 6, padding_idx=index) for _ in range(2))
    with torch.no_grad():
        whole.weight.normal_()  # also of the padding: its row is a row
    model = nn.ModuleList([whole, positions])
    tokens = torch.randint(13, (3, 12))
    tokens[0, :5] = index
    grad = torch.randint(-4, 5, (3, 12, 6)).float()
    outputs = whole(tokens) + positions(tokens)
    outputs.backward(grad)
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    parallelize(model, {"0": Vocabulary(), "1": SequenceParallel()}, group, sequence=sequence)
    own = (lambda x: x.chunk(ranks, 1)[rank]) if sequence else (lambda x: x)
    found = model[0](tokens) + model[1](tokens)
    assert torch.equal(found, own(outputs))
    found.backward(own(grad))
    sum_sequence_gradients(model)
    for param in model.parameters():
        param.data = param.grad
    for name, tensor in full_state_dict(model).items():
        assert torch.equal(tensor, expected[name]), name
        assert not tensor[index].any()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_padding_is_exact(five, ranks, sequence):
    for index in (0, 4, 7, 12):
        five.call(padding, ranks, index, sequence)


def inplace_dropout():
    if not (here := member(2)):
        return
    model = nn.ModuleList([nn.Dropout(0.5, inplace=True)])
    parallelize(model, {"0": SequenceParallel()}, here[0], sequence=True)
    x = torch.ones(2, 3)
    assert model[0](x) is x


def test_dropout_in_place_stays_so(five):
    five.call(inplace_dropout)


# --- models of transformers and torch ------------------------------------------------------------


def bert_plan():
    return {
        "*word_embeddings": Vocabulary(),
        "*intermediate.dense": Column(),
        "encoder.layer.?.output.dense": Row(),
    }


def bert():
    return BertModel(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5_block():
    return T5Block(T5Config(d_model=16, d_kv=8, d_ff=24, num_heads=2, dropout_rate=0.0), True)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


MODELS = {  # made, its plan, its inputs, and what it returns
    "bert": (bert, bert_plan, lambda: torch.randint(WORDS, (2, 5)), lambda y: y.last_hidden_state),
    "t5": (
        t5_block,
        lambda: {"*wi": Column(), "*wo": Row()},
        lambda: torch.randn(2, 5, 16),
        lambda y: y[0],
    ),
    "encoder": (
        encoder,
        lambda: {"*linear1": Column(), "*linear2": Row()},
        lambda: torch.randn(2, 5, 16),
        lambda y: y,
    ),
}


def beside_unsplit(what):
    """How far outputs, in evaluation too, and gradients of one of MODELS are from the unsplit's."""
    if not (here := member(2)):
        return None
    make, plan, inputs, read = MODELS[what]
    torch.backends.mha.set_fastpath_enabled(False)
    unsplit, model = make(), make()
    model.load_state_dict(unsplit.state_dict())
    parallelize(model, plan(), here[0])
    x, apart = inputs(), []
    for module in (unsplit, model):
        module.eval()
    with torch.no_grad():
        apart.append((read(unsplit(x)) - read(model(x))).abs().max().item())
    for module in (unsplit, model):
        module.train()
        read(module(x)).square().mean().backward()
    grads = {name: param.grad for name, param in unsplit.named_parameters()}
    for param in model.parameters():
        if param.grad is not None:
            param.data = param.grad
    for name, tensor in full_state_dict(model).items():
        if grads.get(name) is not None:
            apart.append((tensor - grads[name]).abs().max().item())
    assert len(apart) > 5
    return max(apart)


@pytest.mark.parametrize("what", MODELS)
def test_models_of_others_equal_the_unsplit_ones(five, what):
    try:
        assert max(five.call(beside_unsplit, what)[:2]) <= 2e-6
    finally:
        five.call(torch.backends.mha.set_fastpath_enabled, True)


# --- generating ----------------------------------------------------------------------------------


def language_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=None,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            initializer_range=0.5,
        )
    )


def generated(gathered):
    """Tokens of the unsplit model and of the cut one: greedy, and drawn; or the errors."""
    if not (here := member(2)):
        return None
    unsplit, model = language_model().eval(), language_model().eval()
    parallelize(model, gpt2_plan(gathered), here[0])
    prompt, tokens = torch.tensor([[3, 4, 5], [7, 1, 1]]), []
    for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 3}):
        for module in (unsplit, model):
            torch.manual_seed(1)
            try:
                tokens.append(
                    module.generate(prompt, use_cache=False, max_new_tokens=8, **options).tolist()
                )
            except ValueError as error:
                tokens.append(str(error))
    return tokens


def test_every_rank_generates_what_the_unsplit_model_does(five):
    first, second = five.call(generated, True)[:2]
    assert first == second
    assert first[::2] == first[1::2]
    assert first[0] != first[2]


def test_a_head_of_some_words_is_refused_where_all_are_needed(five):
    for tokens in five.call(generated, False)[:2]:
        assert (
            tokens[1::2]
            == [
                "generate needs the logits of all words, and lm_head returns only those of this "
                "rank: split it with Vocabulary(gather_output=True)"
            ]
            * 3
        )


def labelled(ranks):
    """With transformers' own loss: how far loss and gradients are from the unsplit model's."""
    if not (here := member(ranks)):
        return None
    group, _ = here
    unsplit, model, part = language_model(), language_model(), language_model()
    parallelize(model, gpt2_plan(gather_output=True), group)
    parallelize(part, gpt2_plan(), group)
    tokens = torch.randint(WORDS, (3, 8))
    losses = [module(tokens, labels=tokens, use_cache=False).loss for module in (unsplit, model)]
    for loss in losses:
        loss.backward()
    with pytest.raises(ValueError, match="loss_function needs the logits of all words"):
        part(tokens, labels=tokens, use_cache=False)
    apart = [(losses[0] - losses[1]).abs().item()]
    assert model.lm_head.weight is model.transformer.wte.weight
    for param in set(model.parameters()):
        param.data = param.grad
    state = full_state_dict(model)
    apart += [
        (state[name] - param.grad).abs().max().item() for name, param in unsplit.named_parameters()
    ]
    return max(apart)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_logits_have_the_unsplit_models_gradients(five, ranks):
    assert max(five.call(labelled, ranks)[:ranks]) <= 2e-5  # of numbers up to 20


def loaded_into_wrapped():
    """State of a cut model whose layers are recomputed or splittable, whole and loaded."""
    if not (here := member(2)):
        return
    plain = gpt2()
    expected = plain.state_dict()
    for wrap in (
        lambda layer: Recompute(layer),
        lambda layer: splittable([layer])[0],
        lambda layer: splittable([Recompute(layer)])[0],
    ):
        layers = parallelize(gpt2(), gpt2_plan(), here[0])
        wrapped = nn.ModuleList([wrap(layer) for layer in layers])
        state = full_state_dict(wrapped)
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
        load_full_state_dict(wrapped, {name: tensor * 2 for name, tensor in state.items()})
        for name, tensor in full_state_dict(layers).items():
            assert torch.equal(tensor, expected[name] * 2), name


def test_state_is_that_of_the_unsplit_model_also_of_wrapped_layers(five):
    five.call(loaded_into_wrapped)
