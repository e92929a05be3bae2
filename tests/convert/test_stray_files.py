"""Folders of others' weights that say two things, or one in an odd way: understood or refused."""

import ast
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.families import FAMILIES
from fivefold.convert.hub import INDEX, HubFolder
from fivefold.convert.load import checked_sources, model_in
from fivefold.convert.stored import stored_tensors
from fivefold.errors import CheckpointError, ConfigError
from fivefold.train.folder.convert import to_hub, to_run
from fivefold.train.folder.origin import find_origin
from tests.config.families import TINY
from tests.config.oracle import InFp64, oracle
from tests.convert.test_huggingface import both_logits, our_stage, tensors_of, written


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
    ours, expected = both_logits(folder, theirs)
    return bool((ours - expected).abs().max() < 1e-11)


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


def test_of_one_file_and_an_index_transformers_choice_counts(tmp_path: Path) -> None:
    """A model saved in one file over an older one in several, of which the index is left."""
    written("llama", tmp_path, max_shard_size="20KB")
    older = tensors_of(tmp_path)
    assert (tmp_path / INDEX).exists()
    newer = {name: 1.5 * tensor for name, tensor in older.items()}
    save_file(newer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({"tok_embeddings.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    assert agree(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    written("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "two.safetensors")
    what = r"model\.norm\.weight twice: in one\.safetensors and two\.safetensors"
    with pytest.raises(CheckpointError, match=what):
        our_stage(tmp_path)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("deepseek_v3", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("gpt_oss", {"quant_method": "mxfp4"}),
    ],
)
def test_weights_that_were_widened_are_not_called_quantised(
    kind: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """By config.json: a reader would look for scales, which are no longer there."""
    written(kind, tmp_path / "hub", torch.bfloat16)
    with_fields(tmp_path / "hub", quantization_config=how)
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "out")
    before, after = (
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("hub", "out")
    )
    assert after == {name: value for name, value in before.items() if value != how}


def test_code_that_auto_map_names_goes_along(tmp_path: Path) -> None:
    """As DeepSeek's and Kimi's folders have it: the field is written again, and needs it."""
    written("deepseek_v3", tmp_path / "hub")
    with_fields(tmp_path / "hub", auto_map={"AutoConfig": "configuration_deepseek.OfTheirs"})
    code = "class OfTheirs: ...\n"
    (tmp_path / "hub" / "configuration_deepseek.py").write_text(code)
    (tmp_path / "hub" / "train.py").touch()
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "out")
    assert "auto_map" in json.loads((tmp_path / "out" / "config.json").read_text())
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").glob("*.py")] == [
        ("configuration_deepseek.py", code)
    ]


def test_a_head_of_its_own_is_not_taken_for_a_copy_of_the_embedding(tmp_path: Path) -> None:
    """transformers does not tie what config.json calls tied, if both are there and differ."""
    written("llama", tmp_path)
    with_fields(tmp_path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match='works: "tie_word_embeddings": false'):
        to_run(tmp_path, tmp_path / "run")
    with_fields(tmp_path, tie_word_embeddings=False)
    to_run(tmp_path, tmp_path / "run")
    assert agree(tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with_fields(tmp_path, tie_word_embeddings=True)
    to_run(tmp_path, tmp_path / "tied")
    assert agree(tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_prediction_with_an_embedding_of_its_own_is_refused(
    copy: str, kind: str, tmp_path: Path
) -> None:
    written(kind, tmp_path / "hub")
    layers = json.loads((tmp_path / "hub" / "config.json").read_text())["num_hidden_layers"]
    model = replace(from_hf_config(tmp_path / "hub"), mtp_num_layers=1)
    tensors = tensors_of(tmp_path / "hub")
    for place in stored_tensors(FAMILIES[kind].tensors, model).values():
        tensors |= {n: torch.ones(place.their_shape) for n in place.names if n not in tensors}
    original = "lm_head.weight" if "head" in copy else "model.embed_tokens.weight"
    tensors[f"model.layers.{layers}.{copy}"] = tensors[original].clone()
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    checked_sources(tmp_path / "hub", model)
    tensors[f"model.layers.{layers}.{copy}"][1] += 1
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{copy} is not {original}.*\n.*--mtp-num-layers 0"):
        checked_sources(tmp_path / "hub", model)
    checked_sources(tmp_path / "hub", replace(model, mtp_num_layers=0))


_FP8 = "model.layers.0.mlp.down_proj.weight"


def of_fp8(folder: Path, scales: torch.Tensor | None, how: Any) -> None:
    """A folder with one matrix in fp8, [32, 48], and these scales."""
    written("deepseek_v3", folder, torch.bfloat16)
    tensors = tensors_of(folder)
    tensors[_FP8] = tensors[_FP8].to(torch.float8_e4m3fn)
    if scales is not None:
        tensors[_FP8 + "_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with_fields(folder, quantization_config=how)


@pytest.mark.parametrize(
    ("scales", "sizes", "message"),
    [
        (None, [8, 8], f"{_FP8} is stored as F8_E4M3"),
        (torch.tensor(2.0), [8, 8], f"{_FP8} is stored as F8_E4M3"),
        (torch.ones(1, 1), [8, 8], "4 x 6 are needed, it has 1 x 1"),
        (torch.ones(6, 4), [8, 8], "4 x 6 are needed, it has 6 x 4"),
        (torch.ones(5, 7), [8, 8], "4 x 6 are needed, it has 5 x 7"),
        (torch.ones(1, 1), None, "weight_block_size"),
        (torch.ones(1, 1), "128", "weight_block_size"),
        (torch.ones(1, 1), [128], "weight_block_size"),
        (torch.ones(1, 1), [0, 128], "weight_block_size"),
    ],
)
@pytest.mark.parametrize("verb", ["convert", "train"])
def test_scales_that_do_not_fit_are_refused(
    verb: str, scales: torch.Tensor | None, sizes: Any, message: str, tmp_path: Path
) -> None:
    of_fp8(tmp_path / "hub", scales, {"weight_block_size": sizes})
    with pytest.raises(CheckpointError, match=message):
        read_by(verb, tmp_path)


@pytest.mark.parametrize("verb", ["convert", "train"])
def test_a_type_of_elements_that_is_not_known_is_refused(verb: str, tmp_path: Path) -> None:
    written("deepseek_v3", tmp_path / "hub")
    tensors = tensors_of(tmp_path / "hub")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm\.weight is stored as I8"):
        read_by(verb, tmp_path)


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [((4, 48, 2), "uint8"), ((4, 48), "uint8"), ((4, 48, 1), "int8"), (None, "")],
)
def test_mxfp4_with_scales_that_do_not_fit_is_refused(
    scales: tuple[int, ...] | None, dtype: str, tmp_path: Path
) -> None:
    """One matrix of four experts, [32, 48] each as ours; scales of another shape or type."""
    written("gpt_oss", tmp_path / "hub", torch.bfloat16)
    tensors = tensors_of(tmp_path / "hub")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts, columns, rows = tensors.pop(name).shape
    blocks = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
    good = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
    for held in (good, None if scales is None else torch.ones(scales, dtype=getattr(torch, dtype))):
        packed = {f"{name}_blocks": blocks} | ({} if held is None else {f"{name}_scales": held})
        save_file(tensors | packed, tmp_path / "hub" / "model.safetensors")
        if held is good:
            read_by("train", tmp_path)
            continue
        with pytest.raises(CheckpointError, match="gate_up_proj"):
            read_by("train", tmp_path)


def test_scales_beside_a_tensor_that_needs_none_are_left_over(tmp_path: Path) -> None:
    written("deepseek_v3", tmp_path)
    tensors = tensors_of(tmp_path) | {_FP8 + "_scale_inv": torch.full((1, 1), 2.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{_FP8}_scale_inv"):
        to_run(tmp_path, tmp_path / "run")


def read_by(verb: str, folder: Path) -> None:
    """Read a folder's weights as `convert` or as `train --load` does."""
    if verb == "convert":
        to_run(folder / "hub", folder / "run")
        return
    model = model_in(HubFolder(folder / "hub"))
    find_origin(Config(model).with_values(load=str(folder / "hub")), folder / "run")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("deepseek_v2", {"first_k_dense_replace": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("deepseek_v3", {"hidden_act": "gelu_new"}),
        ("deepseek_v3", {"n_shared_experts": 0}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
        ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
        ("stablelm", {"use_qkv_bias": True}),
        ("seed_oss", {"attention_bias": False}),
        ("granitemoeshared", {"shared_intermediate_size": 0}),
        ("ernie4_5_moe", {"num_hidden_layers": 5, "moe_layer_interval": 2}),
    ],
)
def test_what_is_rare_in_a_family_is_read_and_written(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Without the config.json that the weights came with, transformers loads what is written."""
    oracle({**TINY[kind], "model_type": kind, **fields}).save_pretrained(tmp_path / "hub")
    to_run(tmp_path / "hub", tmp_path / "run")
    (tmp_path / "run" / "huggingface" / "config.json").unlink()
    to_hub(tmp_path / "run", tmp_path / "out", dtype="fp64")
    assert agree(tmp_path / "out")


def test_weights_that_fp16_cannot_hold_are_named(tmp_path: Path) -> None:
    written("llama", tmp_path / "hub", torch.bfloat16)
    tensors = tensors_of(tmp_path / "hub")
    tensors["model.norm.weight"][0] = -1e5
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    to_run(tmp_path / "hub", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"norm\.weight has 99840, .* 65504"):
        to_hub(tmp_path / "run", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    to_hub(tmp_path / "run", tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite_are_converted_and_named(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are what they were; who wants to know where a run broke may look at them."""
    written("llama", tmp_path / "hub", dtype)
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "clean")]) == 0
    assert "NaN" not in capsys.readouterr().err
    tensors = tensors_of(tmp_path / "hub")
    tensors["model.norm.weight"][1:3] = torch.inf
    tensors["lm_head.weight"][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    way = ("hub", "run", "out")
    for start, end, prefix in zip(way, way[1:], ("", "model."), strict=False):
        assert main(["convert", str(tmp_path / start), str(tmp_path / end)]) == 0
        said = capsys.readouterr().err
        assert "2 tensors with infinities or NaN" in said
        assert f"{prefix}norm.weight (2 of " in said and "lm_head.weight (1 of " in said
    kept = tensors_of(tmp_path / "out")
    assert all(torch.equal(kept[n].isfinite(), t.isfinite()) for n, t in tensors.items())


def test_sample_says_what_weights_without_a_tokenizer_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("llama", tmp_path / "hub")
    to_run(tmp_path / "hub", tmp_path / "run")
    assert main(["sample", str(tmp_path / "run"), "hello"]) == 2
    said = capsys.readouterr().err
    assert f"copied to {tmp_path / 'run' / 'tokenizer.json'}" in said
    assert "--tokenizer-model" not in said  # which is no flag of it


def test_the_one_matrix_of_a_tied_model_may_have_the_name_of_its_head(tmp_path: Path) -> None:
    """safetensors' save_model keeps that of the two names which comes first."""
    written("gpt2", tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert agree(tmp_path)
    checked_sources(tmp_path, model_in(HubFolder(tmp_path)))


def test_experts_of_several_types_lose_nothing(tmp_path: Path) -> None:
    written("mixtral", tmp_path / "hub", torch.float32)
    types = {".experts.0.": torch.bfloat16, ".experts.1.": torch.float16}
    tensors = {
        name: tensor.to(next((t for of, t in types.items() if of in name), torch.float32))
        for name, tensor in tensors_of(tmp_path / "hub").items()
    }
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "out", dtype="fp32")
    for name, found in tensors_of(tmp_path / "out").items():
        assert torch.equal(found, tensors[name].float()), name


@pytest.mark.parametrize("name", ["out", "my out", "it's", 'a "b" $HOME', "größe\\n", "line\nend"])
def test_the_command_that_comes_next_can_be_typed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("llama", tmp_path / "hub", torch.float32)
    to_run(tmp_path / "hub", tmp_path / "run")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / name)]) == 0
    typed = shlex.split(capsys.readouterr().out.partition("  next: ")[2])
    assert typed[:2] == ["python", "-c"]
    named = [each.value for each in ast.walk(ast.parse(typed[2])) if isinstance(each, ast.Constant)]
    assert named == [str(tmp_path / name)]


def test_what_a_run_without_a_tokenizer_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("llama", tmp_path / "hub", torch.float32)
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "run")]) == 0
    after = capsys.readouterr().out.partition("  next: ")[2]
    assert f"copied to {tmp_path}/run/tokenizer.json, then fivefold sample" in after
