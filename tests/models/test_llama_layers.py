"""Llama and its relatives as lists of layers: what transformers computes, and back."""

import copy

import pytest
import small_llama
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2MoeConfig,
)

from naranhi import models
from naranhi.planning import config as planning


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def whole(kind, **more):
    """A model of transformers, with biases and norms that are not those of the beginning."""
    model = AutoModelForCausalLM.from_config(small_llama.config(kind, **more)).double()
    if models.is_mixture(model.config):
        model.set_experts_implementation("eager")  # its kernels have no float64
    for name, param in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            param.data.add_(torch.empty_like(param).uniform_(-0.3, 0.3))
    return model.train()


def batch():
    tokens = torch.randint(512, (2, 31))
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    mask[1, 4:7] = 0  # the tokens after these would see them
    return tokens, mask


@pytest.mark.parametrize("kind", small_llama.KINDS)
def test_layers_compute_what_transformers_does(kind):
    """Logits and gradients, but for its norms' rounding to float32; with a mask and without."""
    model = whole(kind)
    layers = nn.Sequential(*models.llama_layers(model))
    tokens, mask = batch()
    for inputs, given in ((tokens, {}), ((tokens, mask), {"attention_mask": mask})):
        seen = mask.bool() if given else torch.ones_like(mask).bool()
        weights = torch.randn(*tokens.shape, 512).double() * seen[..., None]
        expected, found = model(tokens, **given).logits, layers(inputs)
        torch.testing.assert_close(found[seen], expected[seen], rtol=0, atol=1e-5)
        model.zero_grad()
        layers.zero_grad()
        (expected * weights).sum().backward(inputs=list(model.parameters()))
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        layers.zero_grad()
        (found * weights).sum().backward()
        state = {name: p.grad for name, p in layers.named_parameters()}
        if kind == "qwen2":
            assert "4.lm_head.weight" not in state and "3.lm_head.weight" not in state
        back = models.llama_model(state, model.config).state_dict()
        for name, grad in grads.items():
            scale = grad.abs().max()
            torch.testing.assert_close(back[name].double() / scale, grad / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", small_llama.KINDS)
def test_a_model_comes_back_to_the_bit(kind):
    model = whole(kind).float()
    state = nn.ModuleList(models.llama_layers(model)).state_dict()
    generator = torch.get_rng_state()
    back = models.llama_model(state, model.config)
    assert torch.equal(torch.get_rng_state(), generator)
    assert type(back) is type(model) and not back.training
    found, expected = back.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_embedding_and_head_are_what_they_are_in_the_model_or_two(kind):
    tied = kind == "qwen2"
    model = whole(kind)
    first, *_, last = models.llama_layers(model)
    assert (first.wte.weight is last.lm_head.weight) == tied
    assert first.wte.weight is model.model.embed_tokens.weight
    first, *_, last = models.llama_layers(model, tied=False)
    assert first.wte.weight is not last.lm_head.weight
    if tied:
        assert torch.equal(first.wte.weight, last.lm_head.weight)
        layers = models.llama_layers(model, tied=False)
        back = models.llama_model(nn.ModuleList(layers).state_dict(), model.config, tied=False)
        assert not back.config.tie_word_embeddings and model.config.tie_word_embeddings


def test_a_folder_and_a_configuration_are_read(tmp_path):
    _, folder, *_ = small_llama.write(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    layers = nn.Sequential(*models.llama(folder)).eval()
    tokens, _ = batch()
    torch.testing.assert_close(layers(tokens), model(tokens).logits, rtol=0, atol=1e-5)
    torch.manual_seed(3)
    drawn = models.causal_lm(model.config)
    torch.manual_seed(3)
    again = models.llama(models.configuration(f"{folder}/config.json"))
    pairs = zip(nn.ModuleList(drawn).parameters(), nn.ModuleList(again).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert isinstance(models.causal_lm(models.gpt2_config())[0], models.GPT2Embedding)
    logits = nn.Sequential(*models.llama())(torch.randint(1024, (1, 128)))
    assert logits.shape == (1, 128, 1024)


def test_angles_stay_in_float32_in_a_model_of_16_bits():
    """Or positions 257 and 256 would be one."""
    config = small_llama.config("llama", max_position_embeddings=600)
    layers = models.llama_layers(AutoModelForCausalLM.from_config(config))
    rotary = layers[1].attn.rotary
    exact = rotary(torch.arange(600))
    nn.ModuleList(layers).bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(exact, rotary(torch.arange(600)), strict=True))
    assert not torch.equal(exact[0][256], exact[0][257])
    with torch.no_grad():
        assert nn.Sequential(*layers)(torch.randint(512, (1, 600))).dtype == torch.bfloat16


def test_a_window_is_the_longest_sequence():
    """Within it, attention to the last tokens is attention to all."""
    config = MistralConfig(**small_llama.SIZES, vocab_size=512, sliding_window=20)
    model = AutoModelForCausalLM.from_config(config).double().train()
    layers = nn.Sequential(*models.llama_layers(model))
    tokens, _ = batch()
    expected = model(tokens[:, :20]).logits
    torch.testing.assert_close(layers(tokens[:, :20]), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="31 tokens in a row, but the model has sliding_window 20"):
        layers(tokens)


def test_a_weight_is_trained_if_one_of_its_parts_is():
    model = whole("qwen2")
    model.requires_grad_(False)
    model.model.layers[1].self_attn.v_proj.weight.requires_grad_()
    names = [n for n, p in nn.ModuleList(models.llama_layers(model)).named_parameters()]
    trained = [
        name
        for name, param in nn.ModuleList(models.llama_layers(model)).named_parameters()
        if param.requires_grad
    ]
    assert trained == ["2.attn.qkv.weight"] and "2.attn.qkv.bias" in names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BertConfig(), "the configuration is a model of the kind 'bert', neither a GPT-2 nor"),
        (
            small_llama.config("llama", attention_dropout=0.1),
            "attention_dropout is 0.1: these layers have no dropout",
        ),
        (
            small_llama.config("qwen3", num_attention_heads=3),
            "2 heads of keys and values do not divide 3 of queries",
        ),
        (
            Qwen2MoeConfig(),
            "'qwen2_moe', neither a GPT-2 nor a model of Llama's kind .*Mixtral, Qwen3-MoE",
        ),
        (
            small_llama.config("mixtral", router_jitter_noise=0.1),
            "router_jitter_noise is 0.1: these layers have no noise",
        ),
        (small_llama.config("qwen3", num_key_value_heads=0), "0 heads of keys and values do not"),
        (small_llama.config("qwen3", head_dim=3), "a head needs a positive, even size, not 3"),
        (
            small_llama.config("llama", num_hidden_layers=0),
            "the configuration has 0 blocks of 4 heads",
        ),
        (
            small_llama.config("llama", hidden_act="nope"),
            "no model of Llama's kind .* can be made of the configuration .KeyError: 'nope'",
        ),
        (
            small_llama.config(
                "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rotary positions of the kind 'dynamic' depend on a sequence's length",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_is_of_another_kind_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        models.causal_lm(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_in_float32_whatever_the_configuration_says(dtype):
    """Published ones say bfloat16, in which small updates are lost."""
    config = small_llama.config("llama", dtype=dtype)
    state = nn.ModuleList(models.llama(config)).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    back = models.llama_model(state, config).state_dict()
    assert {tensor.dtype for tensor in back.values()} == {torch.float32}


def test_layers_made_without_memory_have_their_angles():
    model = whole("llama").float()
    tokens, _ = batch()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    layers = nn.Sequential(*models.llama_layers(empty))
    layers(tokens.to("meta"))
    layers.to_empty(device="cpu")
    layers.load_state_dict(nn.Sequential(*models.llama_layers(model)).state_dict())
    torch.testing.assert_close(layers(tokens), model(tokens).logits, rtol=0, atol=1e-5)


def test_norms_of_heads_run_in_the_dtype_of_their_weights():
    """In two dtypes torch warns, and computes step by step."""
    layers = models.llama(small_llama.config("qwen3"))
    seen = []
    layers[1].attn.q_norm.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        nn.Sequential(*layers)(batch()[0])
    assert seen == [torch.float32]


def test_a_folder_with_more_weights_than_its_configuration_says_is_refused(tmp_path):
    """As a model with biases would be another one without."""
    model = AutoModelForCausalLM.from_config(small_llama.config("llama", attention_bias=True))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"attention_bias": true', '"attention_bias": false'))
    with pytest.raises(ValueError, match=r"have model.layers.0.self_attn.k_proj.bias and 7 more"):
        models.llama(tmp_path)


@pytest.mark.parametrize("make", [models.llama, models.DeferredLM])
def test_a_quantized_model_is_refused(tmp_path, make):
    """With weights that are not, too: it could be trained, and then not be exported."""
    config = small_llama.config("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    for given in tmp_path, config:
        with pytest.raises(ValueError, match=r"has a quantization_config.*call dequantize\(\)"):
            make(given)


def test_a_name_that_is_no_model_is_told():
    for name in "/no/such/config.json", "./nothing":
        with pytest.raises(OSError, match="There is no such file or folder"):
            models.causal_lm(name)
    with pytest.raises(ValueError, match="of the kind 'llama', not a GPT-2"):
        models.gpt2(small_llama.config("llama"))
    assert isinstance(models.causal_lm()[0], models.GPT2Embedding)


def test_a_state_that_does_not_fit_is_refused():
    config = small_llama.config("qwen2")
    state = nn.ModuleList(models.llama(config)).state_dict()
    for change, message in [
        ({"1.attn.qkv.bias": torch.zeros(3)}, r"1.attn.qkv.bias has shape \(3,\) in the state"),
        ({"3.lm_head.weight": torch.zeros(512, 16)}, "3.lm_head.weight is not 0.wte.weight"),
        ({"4.norm.weight": torch.zeros(16)}, "4.norm.weight has shape .* and None in a Llama"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.llama_model(state | change, config)
    lacking = copy.copy(state)
    del lacking["2.mlp.down.weight"]
    with pytest.raises(ValueError, match=r"2\.mlp\.down\.weight has shape None in the state"):
        models.llama_model(lacking, config)


def test_the_planner_has_the_same_kinds():
    from naranhi.models.llama_weights import KINDS

    assert (*planning.GPT2, *KINDS) == planning.TRAINED
    assert planning.family_of(LlamaConfig().to_dict()) == "llama"
