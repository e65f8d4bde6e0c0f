"""Models: parameters as published, and shapes that cannot be."""

import json

import pytest

from naranhi.planning import Model, config

CONFIGS = {
    # name: (config.json, parameters as the model's authors or its weights say)
    "GPT-2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
        | {"vocab_size": 50257},
        124_439_808,
    ),
    "Llama 3.1 8B": (
        {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
        | {"vocab_size": 128256},
        8_030_261_248,
    ),
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
        | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168}
        | {"num_attention_heads": 128, "intermediate_size": 18432, "vocab_size": 129280}
        | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128},
        671e9,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        30.5e9,
    ),
}


DEEPSEEK, QWEN = (CONFIGS[name][0] for name in ("DeepSeek-V3", "Qwen3-30B-A3B"))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_were_published(name):
    sizes, published = CONFIGS[name]
    exact = isinstance(published, int)
    model = Model.from_config(sizes)
    assert model.parameters == pytest.approx(published, rel=0 if exact else 2e-3)


def test_the_number_of_experts_has_two_names():
    """transformers 5.23 writes another one than the hub has."""
    renamed = dict(QWEN)
    renamed["num_local_experts"] = renamed.pop("num_experts")
    assert Model.from_config(renamed) == Model.from_config(QWEN)


def test_a_token_meets_two_of_mixtrals_eight_experts():
    model = Model.from_config(CONFIGS["Mixtral 8x7B"][0])
    assert model.active_parameters == pytest.approx(12.9e9, rel=5e-3)  # as its authors say


def test_flops_are_those_of_equation_3_without_recomputation():
    """Narayanan et al. (2021): 96 B s l h^2 (1 + s/6h + V/16lh), of which 1/4 of the layers' and
    none of the output layer's operations are recomputed."""
    layers, h, s, v = 96, 12288, 2048, 51200
    model = Model(layers=layers, hidden=h, heads=96, vocabulary=v)
    assert model.flops_per_token(s) == pytest.approx(
        72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)), rel=1e-9
    )


def test_a_config_is_read_from_its_file_and_its_directory(tmp_path):
    sizes, parameters = CONFIGS["GPT-2"]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert Model.from_config(path).parameters == parameters


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; choose one of gpt2, llama"),
        ({}, "model_type None is not supported"),
        ({"model_type": "gpt2", "n_embd": 768}, "n_layer is missing, and a gpt2 configuration"),
        (
            CONFIGS["Qwen3-30B-A3B"][0] | {"decoder_sparse_step": 2},
            "dense and sparse layers alternate",
        ),
        (DEEPSEEK | {"moe_layer_freq": 2}, "dense and sparse layers alternate"),
        (QWEN | {"shared_expert_intermediate_size": 1000}, "1000 is not a multiple of moe_i.* 768"),
        (QWEN | {"moe_intermediate_size": 0}, "moe_intermediate_size is a whole number >= 1"),
        (QWEN | {"tie_word_embeddings": "false"}, "embeddings is true or false, not 'false'"),
        (DEEPSEEK | {"q_lora_rank": -1}, "q_lora_rank is a whole number >= 0, not -1"),
        (DEEPSEEK | {"kv_lora_rank": "512"}, "kv_lora_rank is a whole number >= 1, not '512'"),
        (CONFIGS["GPT-2"][0] | {"n_inner": 0}, "n_inner is a whole number >= 1, not 0"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Model.from_config(sizes)


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: give a config.json"):
        Model.from_config(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    file.write_text("layers: 12")
    with pytest.raises(ValueError, match="is not JSON"):
        Model.from_config(file)
    file.write_text("[12]")
    with pytest.raises(ValueError, match="it is not a JSON object"):
        Model.from_config(file)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"heads": 5}, "hidden = 768 is not a multiple of heads = 5; .* give head_dim"),
        ({"heads": 12, "kv_heads": 5}, "heads = 12 is not a multiple of kv_heads = 5"),
        ({"heads": 12, "experts": 8}, "top_k = 0 of experts = 8: give both"),
        ({"heads": 12, "experts": 2, "top_k": 3}, "top_k = 3 of experts = 2"),
        ({"heads": 12, "dense_layers": 13}, "dense_layers = 13 of only 12 layers"),
        ({"heads": 0}, "heads is at least 1, not 0"),
    ],
)
def test_sizes_that_do_not_fit_one_another_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Model(layers=12, hidden=768, **sizes)


def test_a_size_is_a_whole_number():
    with pytest.raises(TypeError, match=r"layers is a whole number, not 12\.0"):
        Model(layers=12.0, hidden=768, heads=12)


@pytest.mark.parametrize("family", config.LLAMA + config.EXPERTS + config.DEEPSEEK)
def test_sizes_that_are_left_out_are_those_of_transformers(family):
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 11008, "vocab_size": 32000}
    if family == "mixtral":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    elif family in config.EXPERTS:
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}
    elif family in config.DEEPSEEK:
        sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}
        sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        sizes |= {"v_head_dim": 128}
    whole = AutoConfig.for_model(family, **sizes).to_dict()
    assert Model.from_config({"model_type": family} | sizes) == Model.from_config(whole)
