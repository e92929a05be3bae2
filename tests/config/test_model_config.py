import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.layer_pattern import layer_frequency, layers_of
from fivefold.config.model import ModelConfig
from fivefold.config.presets import HUB_NAMES, PRESETS, resolve_model
from fivefold.config.rules.model import check_model
from fivefold.config.settings import flag_of
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError, Mistakes


def mistakes_of(model: ModelConfig) -> str:
    mistakes = Mistakes()
    check_model(model, mistakes)
    with pytest.raises(ConfigError) as caught:
        mistakes.raise_if_any()
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    mistakes = Mistakes()
    check_model(PRESETS[name], mistakes)
    assert not mistakes.found


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama4-scout", 107_769_861_120),
        ("llama4-maverick", 400_711_848_960),
        ("mistral-7b", 7_248_023_552),
        ("phi-4", 14_659_507_200),
        ("command-r", 34_980_831_232),
        ("command-r7b", 8_028_033_024),
        ("smollm3-3b", 3_075_098_624),
        ("gemma3-1b", 999_885_952),
        ("gemma3-4b", 3_880_263_168),
        ("gemma3-12b", 11_766_034_176),
        ("gemma3-27b", 27_009_346_304),
        ("gpt-j-6b", 6_050_882_784),
        ("phi-2", 2_779_683_840),
        ("olmo-7b", 6_888_095_744),
        ("olmo2-7b", 7_298_617_344),
        ("olmo2-13b", 13_716_198_400),
        ("olmo2-32b", 32_234_279_936),
        ("olmoe-1b-7b", 6_919_161_856),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        # Published without what `unmodelled` names: 256 router biases in each of 58 layers.
        ("deepseek-v3", 671_026_419_200 - 58 * 256),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    count = count_parameters(PRESETS[name], padded=False)
    assert count.total - count.mtp == published


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("gpt3-5b", 5.0, 5.0),
        ("gpt3-20b", 20.3, 20.3),
        ("gpt3-175b", 174.6, 174.6),
        ("nemotron-8b", 8.5, 8.5),
        ("nemotron-22b", 21.3, 21.3),
        ("nemotron-340b", 341.0, 341.0),
        ("gpt-22b", 22.1, 22.1),
        ("gpt-530b", 529.6, 529.6),
        ("gpt-1t", 1008.0, 1008.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.2),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("qwen3-next-80b-a3b", 79.7, 3.9),
        ("nemotron-3-super-120b-a12b", 120.65, 12.75),  # published as 120.6 and 12.7
        ("llama4-scout", 107.8, 17.2),  # 109 and 17 as published, with what sees images
        ("llama4-maverick", 400.7, 17.2),
        ("deepseek-v2", 235.7, 21.4),
        ("deepseek-v3", 671.0, 37.6),  # 36.6 as published without the input embedding
        ("kimi-k2", 1026.4, 32.9),
        ("gemma4-26b-a4b", 25.2, 3.8),
        ("kimi-linear-48b-a3b", 49.1, 3.5),  # 3 as published, without the input embedding
        ("gemma4-31b", 30.7, 30.7),
        ("mimo-v2-flash", 308.8, 15.4),  # 309 and 15 as published
        ("minimax-m2", 228.7, 11.0),  # 10 as published, without the input embedding
        ("gpt-oss-20b", 20.9, 4.2),  # 3.6 as published without the input embedding
        ("gpt-oss-120b", 116.8, 5.7),  # 5.1
    ],
)
def test_presets_are_as_large_as_their_names_say(name: str, billions: float, active: float) -> None:
    for chosen, expected in ((False, billions), (True, active)):
        count = count_parameters(PRESETS[name], padded=False, active=chosen)
        assert (count.total - count.mtp) / 1e9 == pytest.approx(expected, abs=0.051)


def test_the_module_of_further_prediction_is_as_large_as_published() -> None:
    count = count_parameters(PRESETS["deepseek-v3"])
    assert count.mtp / 1e9 == pytest.approx(11.5, abs=0.12)  # without embedding and output layer


def test_every_field_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in fields(ModelConfig))


def test_derived_sizes() -> None:
    model = ModelConfig(num_layers=1, hidden_size=96, num_attention_heads=6, vocab_size=130)
    assert (model.num_kv_heads, model.head_dim, model.ffn_size) == (6, 16, 384)
    assert model.padded_vocab_size == 256
    model = replace(model, num_query_groups=2, kv_channels=32, vocab_size=128)
    assert (model.q_size, model.k_size, model.padded_vocab_size) == (192, 64, 128)


def test_sizes_of_latent_attention_and_experts() -> None:
    model = PRESETS["deepseek-v3"]
    assert (model.query_dim, model.value_dim) == (192, 128)
    assert (model.q_size, model.k_size) == (128 * 192, 128 * 192)
    assert (model.v_size, model.attention_size) == (128 * 128, 128 * 128)
    assert (model.expert_ffn_size, model.shared_ffn_size) == (2048, 2048)
    assert [model.is_moe(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert PRESETS["mixtral-8x7b"].expert_ffn_size == 14336
    assert not PRESETS["llama3-8b"].is_moe(0)


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ("1", "1111"),
        ("2", "1010"),
        ("3", "1001"),
        ("[0]*1+[1]*3", "0111"),
        (" ([0] + [1]) * 2 ", "0101"),
        ("2*[0, 1]", "0101"),
        ("[1,0,0,1]", "1001"),
    ],
)
def test_layers_with_experts(freq: str, expected: str) -> None:
    assert (
        "".join(str(int(experts)) for experts in layers_of("moe_layer_freq", freq, 4)) == expected
    )


@pytest.mark.parametrize(
    "freq",
    [
        "",
        "one",
        "[0]*3+1",
        "[0]**2",
        "[True]*4",
        "[[1]]*4",
        "-1",
        "1.0",
        "[0]*10**9",
        "[0]*99999999999",
        "__import__('os').getcwd()",
        "(" * 5000,
        "-" * 100000 + "1",
    ],
)
def test_only_numbers_and_lists_say_which_layers_have_experts(freq: str) -> None:
    with pytest.raises(ConfigError, match="is neither a number nor a list"):
        layers_of("moe_layer_freq", freq, 4)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_layer_frequency_is_read_back(has_experts: list[bool]) -> None:
    freq = layer_frequency(has_experts)
    assert layers_of("moe_layer_freq", freq, len(has_experts)) == tuple(has_experts)


def test_all_mistakes_are_told_at_once() -> None:
    model = replace(
        PRESETS["debug-llama"],
        num_attention_heads=5,
        num_query_groups=2,
        activation_func="sillu",
        hidden_dropout=1.0,
    )
    message = mistakes_of(model)
    assert "64 / 5 = 12.80" in message
    assert "--num-attention-heads 4" in message
    assert "5 query heads cannot share 2 key/value heads" in message
    assert "did you mean 'silu'" in message
    assert "hidden_dropout must be in [0, 1)" in message


SPARSE: dict[str, Any] = {
    "num_query_groups": None,
    "kv_channels": None,
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 64,
    "dsa_indexer_topk": 8,
}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"kv_channels": 15}, "head size 15 is odd"),
        ({"use_rope_scaling": True, "rope_high_freq_factor": 0.5}, "rope_high_freq_factor"),
        ({"attention_chunk_size": 8, "window_size": 8}, "--window-size none"),
        ({"qk_l2_norm": True, "qk_layernorm": True}, "--no-qk-layernorm"),
        ({"qk_l2_norm": True, "multi_latent_attention": True}, "--no-qk-l2-norm"),
        (
            {"attention_output_gate": True, "multi_latent_attention": True},
            "--no-attention-output-gate",
        ),
        ({"experimental_attention_variant": "gated_delta_net"}, "works: --linear-attention-freq 2"),
        (
            {
                "experimental_attention_variant": "gated_delta_net",
                "linear_attention_freq": "2",
                "linear_num_key_heads": 5,
                "linear_num_value_heads": 8,
            },
            "works: --linear-num-key-heads 2 | --linear-num-key-heads 4",
        ),
        (
            {"experimental_attention_variant": "dsa"},
            "works: --multi-latent-attention | --experimental-attention-variant none",
        ),
        (
            {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 8},
            "works: --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128",
        ),
        (SPARSE | {"dsa_indexer_head_dim": 32}, "works: --dsa-indexer-head-dim 64"),
        (SPARSE | {"window_size": 8}, "works: --window-size none"),
        (SPARSE | {"attn_logit_softcapping": 8.0}, "works: --attn-logit-softcapping none"),
        (SPARSE | {"softmax_type": "learnable"}, "works: --softmax-type vanilla"),
        (SPARSE | {"attention_dropout": 0.1}, "--attention-dropout 0.0"),
        (SPARSE | {"lora_rank": 4, "dsa_indexer_loss_coeff": 0.1}, "--lora-rank none"),
        (
            {"num_experts": 4, "moe_branch_norms": True, "ffn_hidden_size": 8},
            "works: --moe-shared-expert-intermediate-size 8",
        ),
        (
            {"num_experts": 4, "moe_branch_norms": True, "norm_placement": "after"},
            "works: --norm-placement both",
        ),
        (
            {"num_experts": 4, "moe_branch_norms": True, "parallel_residual": True},
            "works: --no-parallel-residual",
        ),
        (
            {"num_experts": 4, "moe_router_topk": 2, "moe_apply_probs_on_input": True},
            "--moe-router-topk 1",
        ),
        (
            {"use_rope_scaling": True, "position_embedding_type": "learned_absolute"},
            "use_rope_scaling needs",
        ),
        ({"num_experts": 4, "moe_router_topk": 5}, "works: --moe-router-topk 4 | --num-experts 5"),
        (
            {"num_experts": 8, "moe_router_num_groups": 4},
            "a router that chooses among groups needs both",
        ),
        (
            {"num_experts": 8, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "works: --moe-router-num-groups 2 | --moe-router-num-groups 4",
        ),
        (
            {"num_experts": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 1},
            "works: --moe-router-topk 1",
        ),
        (
            {
                "num_experts": 8,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 1,
                "moe_router_group_scores": 3,
            },
            "works: --moe-router-group-scores 2",
        ),
        ({"num_experts": 4, "moe_layer_freq": "[0]*4"}, "gives none of the layers experts"),
        ({"num_experts": 4, "moe_layer_freq": "[0]+[1]*4"}, "5 entries, 4 layers"),
        ({"num_experts": 4, "moe_layer_freq": "[0, 1, 2, 1]"}, "entries other than 0 and 1"),
        ({"num_experts": 4, "moe_layer_freq": "0"}, "must be at least 1, not 0"),
        ({"multi_latent_attention": True}, "num_query_groups 2 would share them"),
        (
            {"multi_latent_attention": True, "num_query_groups": None, "kv_channels": 64},
            "kv_channels 64 has no effect",
        ),
        (
            {"multi_latent_attention": True, "position_embedding_type": "learned_absolute"},
            "multi_latent_attention has no learned positions",
        ),
        (
            {
                "multi_latent_attention": True,
                "num_query_groups": None,
                "qk_pos_emb_head_dim": 7,
            },
            "head size 7 is odd",
        ),
    ],
)
def test_single_mistakes(change: dict, part: str) -> None:
    assert part in mistakes_of(replace(PRESETS["debug-llama"], **change))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("pattern", ["x", "0", "[0]*5", "[2]*3", "1", "[1]*3", "[0]*2"])
@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("moe_layer_freq", {"num_experts": 4}),
        ("window_attn_skip_freq", {"window_size": 8}),
        ("no_rope_freq", {}),
        ("linear_attention_freq", {"experimental_attention_variant": "gated_delta_net"}),
    ],
)
def test_patterns_that_errors_offer_are_taken(
    name: str, beside: dict, pattern: str, layers: int
) -> None:
    model = replace(PRESETS["debug-llama"], num_layers=layers, **beside)
    mistakes = Mistakes()
    check_model(replace(model, **{name: pattern}), mistakes)
    try:
        mistakes.raise_if_any()
    except ConfigError as error:
        (mistake,) = error.mistakes
        offered = [text.split() for text in mistake.works if text.startswith(flag_of(name))]
        assert offered
        for words in offered:
            names = (word[2:].replace("-", "_") for word in words[::2])
            values = (None if word == "none" else word for word in words[1::2])
            mended = Mistakes()
            check_model(replace(model, **dict(zip(names, values, strict=True))), mended)
            mended.raise_if_any()


@pytest.mark.parametrize("groups", range(1, 9))
def test_key_value_heads_of_latents_are_one_mistake_at_most(groups: int) -> None:
    latent = replace(PRESETS["debug-deepseek-v3"], num_query_groups=groups)
    mistakes = Mistakes()
    check_model(latent, mistakes)
    assert mistakes.found == (groups != latent.num_attention_heads)
    if mistakes.found:
        assert mistakes_of(latent).count("works:") == 1


def test_hub_names_and_presets_name_the_same() -> None:
    assert resolve_model("meta-llama/Llama-3.1-8B") == PRESETS["llama3-8b"]
    assert set(HUB_NAMES.values()) <= set(PRESETS)


def test_models_that_differ_in_one_setting_are_told_apart_without_comparing_them() -> None:
    """What is looked up by models would else be compared with all that is kept of others."""
    model = PRESETS["llama3-8b"]
    changed = [replace(model, **{field.name: 7.25}) for field in fields(model)]
    assert len({hash(each) for each in (model, *changed)}) == 1 + len(changed) > 100


def test_the_hash_of_a_model_is_no_part_of_it() -> None:
    model = replace(PRESETS["debug-llama"])
    plain = pickle.dumps(model)
    assert hash(model) == hash(PRESETS["debug-llama"])
    assert pickle.dumps(model) == plain and pickle.loads(plain) == model
    assert vars(model).keys() == {field.name for field in fields(model)}


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        resolve_model("lama3-8b")
