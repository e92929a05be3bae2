"""Every family has what its record does not hold: a small model in the tests, a row in the docs."""

import re
from pathlib import Path

from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.multimodal import MULTIMODAL, TEXTS
from fivefold.config.huggingface.unsupported import UNSUPPORTED
from fivefold.config.rules.dependence import orphans
from tests.config.families import CASES
from tests.config.multimodal import TINY as TINY_MULTIMODAL

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config-json.md"


def test_each_family_has_a_small_model() -> None:
    assert {fields["model_type"] for fields in CASES.values()} == {*FAMILIES}
    assert {*TINY_MULTIMODAL} == {*MULTIMODAL}
    assert {text.family for text in TEXTS.values()} <= {*FAMILIES}


def test_each_family_is_the_class_that_transformers_has_for_it() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    told = {kind: family.architecture for kind, family in FAMILIES.items()}
    assert told == {kind: CLASSES.get(kind, _UNLISTED.get(kind)) for kind in FAMILIES}


_UNLISTED = {"kimi_k2": "DeepseekV3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}
"""Of transformers' classes, those that its list by family has not."""


def test_what_files_say_of_layers_that_a_model_lacks_is_left_out() -> None:
    """A file has sizes of all kinds of layers; settings without effect would be refused."""
    mixers = ({"hybrid_override_pattern": letters} for letters in ("MM", "M-ME", "ME*"))
    for fields in (*CASES.values(), *(CASES["nemotron_h"] | more for more in mixers)):
        assert not [orphan.shown for orphan in orphans(Config(from_hf_config(fields)))], fields


def test_what_is_not_read_is_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert {*UNSUPPORTED} <= {*CONFIG_MAPPING} - {*FAMILIES, *MULTIMODAL}


def test_each_family_has_one_row_in_the_docs() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", text, re.MULTILINE)
    named = [kind for row in rows for kind in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(["model_type", *FAMILIES])
    _, _, multimodal = text.partition("\nOf multimodal models ")
    prose, _, _ = multimodal.partition("\nIts fields are in ")
    assert {*re.findall(r"`(\w+)`", prose)} == {*MULTIMODAL}
