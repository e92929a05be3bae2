"""Folders of others' weights that say two things, or say one in an odd way: understood or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.huggingface import from_hf_config
from fivefold.errors import ConfigError
from tests.config.oracle import LENGTH, InFp64, oracle_logits
from tests.convert.test_huggingface import our_stage, written
from tests.model.models import batch_of


def with_fields(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def agree(folder: Path) -> bool:
    """Whether the logits of a folder's model are those that transformers gives."""
    from transformers import AutoModelForCausalLM

    with InFp64():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    theirs.config._experts_implementation = "eager"
    config, stage = our_stage(folder)
    batch = batch_of(config.model, [[LENGTH]])
    with torch.no_grad():
        ours = stage.logits(batch)[:, : config.model.vocab_size]
    return bool((ours - oracle_logits(theirs, batch.tokens)).abs().max() < 1e-11)


@pytest.mark.parametrize("value", [True, False, None])
def test_rotary_features_lie_where_the_field_says(value: bool | None, tmp_path: Path) -> None:
    written("deepseek_v3", tmp_path)
    with_fields(tmp_path, rope_interleave=value, num_nextn_predict_layers=0)
    assert agree(tmp_path)


@pytest.mark.parametrize("value", [0, 1, "false"])
def test_a_field_about_rotary_features_that_is_no_switch_is_refused(
    value: Any, tmp_path: Path
) -> None:
    written("deepseek_v3", tmp_path)
    with_fields(tmp_path, rope_interleave=value)
    with pytest.raises(ConfigError, match="rope_interleave"):
        from_hf_config(tmp_path)
