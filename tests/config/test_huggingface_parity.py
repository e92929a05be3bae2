"""What is read of a config.json against the model that transformers builds from it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.comparing import differences
from fivefold.config.huggingface.generic import WITHOUT_EFFECT
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.model.context import Context
from fivefold.model.moe.layer import MoE
from fivefold.model.transformer import Stage
from tests.config.families import CASES, LENGTH, TINY, VARIATIONS
from tests.config.oracle import (
    assert_same,
    config_of,
    oracle,
    oracle_logits,
    oracle_windows,
    our_logits,
)
from tests.config.published import OF_EACH_KIND, PUBLISHED
from tests.model.models import batch_of
from tests.verify.cases import chosen


@st.composite
def configs(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(VARIATIONS)), max_size=4, unique=True))
    changes = {name: draw(st.sampled_from(VARIATIONS[name])) for name in names}
    return CASES[kind] | changes


def agrees(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is read, and then, that it is read as transformers reads it."""
    try:
        ours = from_hf_config(fields)
    except ConfigError as error:
        tables = [value for value in fields.values() if isinstance(value, dict)]
        assert any(name in str(error) for names in (fields, *tables) for name in names), error
        return False
    ours = ours.without_predictions  # which transformers leaves out
    trained = not ours.unmodelled
    try:
        theirs = oracle(fields, meta=not trained)
    except StrictDataclassFieldValidationError:  # version 5 takes no null, no int, of version 4
        return False
    except TypeError:  # nor YaRN of Mixtral where the size of heads follows from others
        assert fields["model_type"] == "mixtral" and ours.rope_type == "yarn"
        return False
    counted = count_parameters(ours, padded=False).total
    assert counted == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    if trained:
        windows = [ours.window_of(layer) for layer in range(ours.num_layers)]
        assert windows == oracle_windows(theirs)  # however much longer than the text
        learned = ours.position_embedding_type == "learned_absolute"
        length = min(LENGTH, ours.max_position_embeddings) if learned else LENGTH
        tokens, logits = our_logits(ours, theirs, [[length]])
        expected = oracle_logits(theirs, tokens)
        assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
    return True


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """And what it writes of the model is read back."""
    fields = CASES[case]
    ours, theirs = from_hf_config(fields), oracle(fields)
    assert ours.unmodelled == ()
    assert_same(ours.without_predictions, theirs)
    config: Any = theirs.config
    config.save_pretrained(tmp_path)
    for source in (config.to_dict(), tmp_path):
        assert _written_out(from_hf_config(source)) == _written_out(ours)


def test_tokens_are_multiplied_by_their_weights_as_in_transformers_to_the_bit() -> None:
    """In bf16, in which the weight is rounded before the product, not after it."""
    fields = CASES["llama4_text"]
    theirs, ours = oracle(fields).bfloat16(), from_hf_config(fields)
    mixture = Stage(ours).bfloat16().eval().layers["1"].mlp
    assert isinstance(mixture, MoE)
    router = theirs.model.layers[1].feed_forward.router
    with torch.no_grad():
        mixture.router.weight.copy_(router.weight)
        x_TH = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        scores_TE, _ = router(x_TH)
        read: list[torch.Tensor] = []

        def told(x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
            read.append(x_TH)
            return x_TH

        mixture.dispatch = told
        batch = batch_of(ours, [[64]])
        context = Context(1, {}, None, None, None, None, {}, None, batch.token_ids[:, 0], 0)
        mixture(x_TH, context)
    assert torch.equal(read[0], x_TH * scores_TE.max(1, keepdim=True).values)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(64, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", TINY)
def test_any_config_is_refused_by_name_or_read_as_transformers_reads_it(
    kind: str, count: int
) -> None:
    """Of so many, drawn anew each time."""

    @settings(max_examples=count)
    @given(configs(kind))
    def tried(fields: dict[str, Any]) -> None:
        agrees(fields)

    tried()


def numbers_of(kind: str) -> set[str]:
    dropout = "attn_pdrop" if kind == "gpt2" else "attention_dropout"
    return {*CASES[kind], dropout, "initializer_range"} - {"model_type", "vocab_size"}


@pytest.mark.parametrize("kind", chosen(TINY, *[*TINY][::6]))
def test_a_wrong_number_is_told_by_its_field_and_what_is_offered_mends_it(kind: str) -> None:
    """Flags of this project could not be typed: the file is read before any of them."""
    assert refusals(kind, numbers_of(kind)) > 20


def test_a_wrong_number_of_any_field_is_told() -> None:
    """Of the first family that has it, and of the last."""
    first = {name: kind for kind in reversed(TINY) for name in numbers_of(kind)}
    last = {name: kind for kind in TINY for name in numbers_of(kind)}
    for name in first:
        for kind in {first[name], last[name]}:
            refusals(kind, {name})


def refusals(kind: str, names: set[str]) -> int:
    """How many wrong numbers were, each by its field."""
    fields, refused = CASES[kind], 0
    for name in names:
        for value in (-1, 0, 1, 3, 7, 9, 0.5, 2.0):
            try:
                from_hf_config(fields | {name: value})
            except ConfigError as error:
                refused += 1
                assert name in str(error) and "--" not in str(error), error
                first = error.mistakes[0]
                for choice in first.works:
                    field, _, offered = choice.partition(" = ")
                    with suppress(ConfigError):  # of something else
                        from_hf_config(fields | {name: value} | {field: json.loads(offered)})
                        continue
                    with pytest.raises(ConfigError) as left:
                        from_hf_config(fields | {name: value} | {field: json.loads(offered)})
                    assert first.what not in str(left.value)
    return refused


@pytest.mark.parametrize("count", ["n_group", "topk_group"])
def test_groups_of_experts_without_their_count_are_refused(count: str) -> None:
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, count: None}
    with pytest.raises(ConfigError, match=f"{count} = null"):
        from_hf_config(CASES["deepseek_v2"] | groups)


@pytest.mark.parametrize("field", [{"layer_types": None}, {"layer_types": []}])
def test_lists_of_mixers_without_any_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"layer_types = .* is not supported"):
        from_hf_config(CASES["nemotron_h"] | field)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "nemotron_h"])
def test_more_groups_than_there_are_cannot_be_chosen(kind: str) -> None:
    method = {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
    fields = CASES[kind] | method | {"n_group": 1, "topk_group": 2}
    with pytest.raises(ConfigError, match="works: topk_group = 1"):
        from_hf_config(fields)


def test_one_expert_a_token_is_refused_or_weighs_as_in_transformers() -> None:
    mixtures = [kind for kind in TINY if "num_experts_per_tok" in CASES[kind]]
    assert sum(agrees(CASES[kind] | {"num_experts_per_tok": 1}) for kind in mixtures) > 5


_SPELLINGS = (
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_routed_experts", "num_local_experts"),
    ("num_experts", "num_local_experts"),
    ("layers_block_type", "layer_types"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)
"""Fields that say the same."""


@pytest.mark.parametrize("names", _SPELLINGS, ids=" ".join)
def test_what_is_said_twice_is_refused_or_said_alike(names: tuple[str, str]) -> None:
    one, other = names
    said = [
        CASES[kind] | {one: value, other: another}
        for kind in TINY
        for value, another in product(VARIATIONS[one], VARIATIONS[other])
        if value != another and None not in (value, another)
    ]
    known = [fields for fields in said if not unknown(fields)]
    assert known
    for fields in known:
        agrees(fields)


def unknown(fields: Mapping[str, Any]) -> bool:
    try:
        from_hf_config(fields)
    except ConfigError as error:
        return "unknown field" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(TINY, *[*TINY][::60]))  # the test above draws of all
def test_each_field_is_refused_by_name_or_read_as_transformers_reads_it(kind: str) -> None:
    fields = CASES[kind]
    read = {
        name
        for name, values in VARIATIONS.items()
        for value in values
        if agrees(fields | {name: value})
    }
    assert len(read) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", chosen(["llama", "mistral", "qwen3", "gpt2", "gpt_neox"], "llama", "gpt2", "gpt_neox")
)
def test_fields_without_effect_have_none_in_transformers(kind: str) -> None:
    fields = CASES[kind]
    tokens, read = torch.arange(LENGTH)[None], from_hf_config(fields)
    expected = oracle_logits(oracle(fields), tokens)
    tried = 0
    for name in WITHOUT_EFFECT:
        for value in (*_OTHER_VALUES.get(name, ()), True, 2, 0.5, "eager", ["a"], {"a": 1}):
            changed = fields | {name: value}
            assert from_hf_config(changed) == read
            try:
                theirs = oracle(changed)
            except Exception:  # transformers takes no such value
                continue
            tried += 1
            assert torch.equal(oracle_logits(theirs, tokens), expected), (name, value)
            break
    assert tried >= 0.9 * len(WITHOUT_EFFECT)


_OTHER_VALUES = {
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "pad_token_id": [3],
    "attn_implementation": ["sdpa"],
    "_attn_implementation": ["sdpa"],
    "experts_implementation": ["eager"],
}


def _written_out(model: ModelConfig) -> ModelConfig:
    return replace(model, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim)


@pytest.mark.parametrize("name", chosen(PUBLISHED, *OF_EACH_KIND))
def test_absent_fields_are_what_transformers_takes_them_for(name: str) -> None:
    fields = PUBLISHED[name]
    if "qwen" in name.lower() and "linear_key_head_dim" not in fields:
        fields = fields | {"use_sliding_window": True}
    compared = 0
    for absent in set(fields) - {"model_type"}:
        left = {other: value for other, value in fields.items() if other != absent}
        try:
            ours = from_hf_config(left)
        except ConfigError:  # a size, which has to be there
            continue
        written = config_of(left).to_dict()
        assert _written_out(from_hf_config(written)) == _written_out(ours), absent
        compared += 1
    assert compared >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(PUBLISHED, *OF_EACH_KIND))
def test_published_models_have_as_many_parameters_as_in_transformers(name: str) -> None:
    model = from_hf_config(PUBLISHED[name]).without_predictions  # which it leaves out
    theirs = oracle(PUBLISHED[name], meta=True)
    assert count_parameters(model, padded=False).total == sum(
        parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad
    )


@pytest.mark.parametrize(
    ("preset", "kind"), [("deepseek-v3.2", "deepseek_v32"), ("glm-5", "glm_moe_dsa")]
)
def test_presets_with_indexers_have_the_sizes_of_transformers_defaults(
    preset: str, kind: str
) -> None:
    """Not its positions, which their own files say."""
    theirs = from_hf_config(config_of({"model_type": kind}).to_dict())
    model = PRESETS[preset]
    of_rope = {name: getattr(model, name) for name in OF_ROPE}
    assert differences(model, replace(theirs, **of_rope)) == []


OF_ROPE = (
    *("rope_type", "rotary_base", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "yarn_correction_range_round_to_int"),
)
