"""Text models within multimodal ones against transformers' whole models, given text alone."""

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.comparing import differences
from fivefold.config.huggingface.multimodal import MULTIMODAL, TEXTS
from fivefold.config.huggingface.write import text_model_fields
from fivefold.config.presets import PRESETS
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from tests.config.families import TINY as OF_TEXTS
from tests.config.families import VARIATIONS
from tests.config.multimodal import TINY, multimodal, text_parameters
from tests.config.oracle import LENGTH, assert_same, config_of, oracle, oracle_logits, our_logits
from tests.config.published_multimodal import MULTIMODAL as PUBLISHED
from tests.model.models import batch_of
from tests.verify.cases import chosen


def fields_like(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind} | TINY[kind] | changes


def text_like(kind: str, **changes: Any) -> dict[str, Any]:
    return fields_like(kind, text_config=TINY[kind]["text_config"] | changes)


FLAT = {
    kind: {"model_type": kind, "vision_config": TINY[kind]["vision_config"]}
    | TINY[kind]["text_config"]
    for kind in ("qwen2_vl", "qwen2_5_vl")
}
LLAMA4 = ("llama4-scout", "llama4-maverick")
CASES: Mapping[str, dict[str, Any]] = {
    **{kind: fields_like(kind) for kind in TINY},
    **{f"{kind}, flat": fields for kind, fields in FLAT.items()},
    "llava, tied by its text model": text_like("llava", tie_word_embeddings=True),
    "gemma3, untied": fields_like("gemma3", tie_word_embeddings=False),
    "mistral3, latents": fields_like(
        "mistral3", text_config=OF_TEXTS["mistral4"] | {"model_type": "mistral4"}
    ),
    "mistral3, windows": text_like("mistral3", sliding_window=4),
    "qwen2_5_vl, stretched": text_like(
        "qwen2_5_vl",
        rope_scaling={
            **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            "mrope_section": [1, 2, 1],
        },
    ),
    "qwen3_vl, theta in the table": text_like(
        "qwen3_vl", rope_scaling={"rope_type": "default", "rope_theta": 50.0}
    ),
}


def agrees(fields: Mapping[str, Any]) -> None:
    assert_same(from_hf_config(fields), multimodal(fields))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_whole_model(case: str) -> None:
    agrees(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(TINY, "gemma3"))
def test_each_field_of_the_whole_model_is_refused_or_has_no_effect_on_text(kind: str) -> None:
    """Those that transformers has for it, and those of its files before version 5."""
    fields, tried = fields_like(kind), 0
    own = {each.name for each in fields_of(config_of(fields)) if not each.name.startswith("_")}
    for name in sorted({*own, *MULTIMODAL[kind].unused} - {"text_config", "vision_config"}):
        # Gemma 4 looks for tokens that stand for other things in any text.
        token = 300 if kind.startswith("gemma4") else 3
        usual = (token,) if "token" in name else (3, "relu", True, [[16, 16]])
        for value in _OTHER_VALUES.get(name, usual):
            changed = fields | {name: value}
            try:
                read = from_hf_config(changed)
            except ConfigError as error:
                assert name in str(error)
                continue
            try:
                theirs = multimodal(changed)
            except Exception:  # transformers takes no such value
                continue
            tokens, logits = our_logits(read, theirs)
            expected = oracle_logits(theirs, tokens)
            assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max(), (name, value)
            assert read == from_hf_config(fields) or name == "tie_word_embeddings"
            tried += 1
    assert tried > 10


_OTHER_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "downsample_ratio": (0.25,),
    "mm_tokens_per_image": (1,),
    "vision_feature_layer": (-1, [0]),
    "vision_feature_select_strategy": ("full", "default"),
    "id2label": ({"0": "a"},),
    "label2id": ({"a": 0},),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(TINY, "qwen2_vl"))
def test_each_field_of_the_text_model_is_refused_or_read_as_transformers_reads_it(
    kind: str,
) -> None:
    read = 0
    # Of a tie that the text model alone has, versions 4 and 5 of transformers make others.
    for name, values in (VARIATIONS | {"tie_word_embeddings": []}).items():
        for value in values:
            if kind in ("qwen2_vl", "qwen2_5_vl") and isinstance(value, dict):
                value = value | {"mrope_section": [1, 2, 1]}  # transformers asks for them
            fields = text_like(kind, **{name: value})
            try:
                ours = from_hf_config(fields)
            except ConfigError as error:
                assert name in str(error) or isinstance(value, dict), error
                continue
            try:
                theirs = multimodal(fields)
                expected = oracle_logits(theirs, batch_of(ours, [[LENGTH]]).tokens)
            except (StrictDataclassFieldValidationError, TypeError, KeyError, RuntimeError):
                continue  # no null and no int of version 4, nor mrope without its sections
            _, logits = our_logits(ours, theirs)
            assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max(), (name, value)
            read += 1
    assert read >= 20


@pytest.mark.parametrize("kind", TEXTS)
def test_what_a_text_model_leaves_out_is_what_transformers_takes_it_for(kind: str) -> None:
    whole, changes = {
        "gemma3_text": ("gemma3", {}),
        "gemma4_text": ("gemma4", {"hidden_size_per_layer_input": 0}),
        "mistral": ("mistral3", {"sliding_window": None}),
        "ministral3": ("mistral3", {}),
        "mistral4": ("mistral3", {}),
        "deepseek_v3": ("kimi_k25", {}),
        "kimi_k2": ("kimi_k25", {}),
        "exaone4": ("exaone4_5", {}),
        "llama": ("llava", {}),
        "qwen2": ("llava_onevision", {}),
        "qwen3": ("internvl", {}),
    }.get(kind, (kind.removesuffix("_text"), {}))
    bare = {"model_type": whole, "tie_word_embeddings": True}
    found = from_hf_config(bare | {"text_config": {"model_type": kind, **changes}})
    written = config_of(bare | {"text_config": {"model_type": kind, **changes}}).to_dict()
    assert not differences(found, from_hf_config(written))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ones_count_as_in_transformers(name: str) -> None:
    counted = text_parameters(multimodal(PUBLISHED[name], meta=True))
    head = 0
    if name.startswith("Mistral"):  # which transformers 5 ties until it sees the weights
        head = 131072 * 5120
    model = from_hf_config(PUBLISHED[name])
    assert model.unmodelled == ()
    assert count_parameters(model, padded=False).total == counted + head


@pytest.mark.parametrize("name", ["gemma3-4b", "gemma3-12b", "gemma3-27b", *LLAMA4])
def test_presets_are_the_published_text_models(name: str) -> None:
    assert from_hf_config(PUBLISHED[name.replace("gemma3", "gemma-3")]) == PRESETS[name]


@pytest.mark.parametrize("case", [*CASES, *PUBLISHED])
def test_the_text_model_alone_has_a_file_of_its_own(case: str) -> None:
    """As which it is written, and transformers builds the same from it."""
    fields = CASES.get(case) or PUBLISHED[case]
    alone = text_model_fields(fields)
    assert from_hf_config(alone) == from_hf_config(fields)
    theirs = oracle(alone, meta=True)
    assert type(theirs).__name__ == alone["architectures"][0]
    counted = sum(p.numel() for p in theirs.parameters())
    assert counted == count_parameters(from_hf_config(fields), padded=False).total


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (fields_like("gemma3", text_config=None), "an object for 'text_config'"),
        (text_like("gemma3", hiden_size=3), 'unknown field "hiden_size" in text_config'),
        (fields_like("gemma3", boi_tokn=3), '"boi_tokn" of this gemma3 model, did you mean'),
        (text_like("gemma3", model_type="llama"), 'text_config.model_type = "llama"'),
        (text_like("gemma3", final_logit_softcapping=30.0), "caps logits of the text model alone"),
        (text_like("llava", model_type="gpt2"), 'text_config.model_type = "gpt2"'),
        (fields_like("llava", vocab_size=99), "vocab_size = 99 and text_config.vocab_size = 100"),
        (text_like("mistral3", hidden_act="mish"), 'text_config.hidden_act = "mish"'),
        (text_like("qwen2_vl", head_dim=12), "text_config.head_dim = 12"),
        (text_like("qwen3_vl", use_sliding_window=True), "text_config.use_sliding_window = true"),
        (fields_like("qwen2_vl", hidden_size=16), "hidden_size = 16 and text_config.hidden_size"),
        (
            fields_like("gemma3", quantization_config={"bits": 4}),
            'quantization_config = {"bits": 4}',
        ),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config(fields)
    assert part in str(caught.value)


def test_what_qwen_files_have_twice_is_read_once() -> None:
    """Versions of transformers between 4.52 and 5 wrote the text model's fields in both places."""
    fields = fields_like("qwen2_5_vl") | TINY["qwen2_5_vl"]["text_config"]
    turned = {"rope_type": "default", "type": "default", "mrope_section": [1, 2, 1]}
    text = TINY["qwen2_5_vl"]["text_config"] | {"rope_scaling": turned}
    assert from_hf_config(fields | {"text_config": text}) == from_hf_config(fields)
