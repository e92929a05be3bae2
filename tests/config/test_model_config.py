from dataclasses import fields, replace

import pytest

from fivefold.config.model import ModelConfig, check_model
from fivefold.config.presets import HUB_NAMES, PRESETS, resolve_model
from fivefold.errors import ConfigError, Mistakes
from fivefold.model.shape import count_parameters


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
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert count_parameters(PRESETS[name], padded=False).total == published


def test_every_field_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in fields(ModelConfig))


def test_derived_sizes() -> None:
    model = ModelConfig(num_layers=1, hidden_size=96, num_attention_heads=6, vocab_size=130)
    assert (model.num_kv_heads, model.head_dim, model.ffn_size) == (6, 16, 384)
    assert model.padded_vocab_size == 256
    model = replace(model, num_query_groups=2, kv_channels=32, vocab_size=128)
    assert (model.q_size, model.kv_size, model.padded_vocab_size) == (192, 64, 128)


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
    assert "num_attention_heads=4" in message
    assert "5 query heads cannot share 2 key/value heads" in message
    assert "did you mean 'silu'" in message
    assert "hidden_dropout must be in [0, 1)" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"kv_channels": 15}, "head size 15 is odd"),
        ({"use_rope_scaling": True, "rope_high_freq_factor": 1.0}, "rope_high_freq_factor"),
        (
            {"use_rope_scaling": True, "position_embedding_type": "learned_absolute"},
            "use_rope_scaling needs",
        ),
    ],
)
def test_single_mistakes(change: dict, part: str) -> None:
    assert part in mistakes_of(replace(PRESETS["debug-llama"], **change))


def test_hub_names_and_presets_name_the_same() -> None:
    assert resolve_model("meta-llama/Llama-3.1-8B") == PRESETS["llama3-8b"]
    assert set(HUB_NAMES.values()) <= set(PRESETS)


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        resolve_model("lama3-8b")
