"""Weights of transformers' models: in, out again to the byte, and the same logits both ways."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.write import differences, to_hf_config
from fivefold.config.training import TrainingConfig
from fivefold.convert.hub import INDEX, HubFolder
from fivefold.convert.load import fill_from_folder, model_in
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece, piece_of
from fivefold.model.transformer import Stage
from fivefold.train.engine import Engine
from fivefold.train.folder.convert import to_hub, to_run
from fivefold.train.folder.origin import find_origin
from fivefold.train.health.not_finite import fill_finite
from tests.config.families import CASES, TINY
from tests.config.oracle import LENGTH, InFp64, config_of, oracle, oracle_logits
from tests.config.published import OF_EACH_KIND, PUBLISHED
from tests.model.models import batch_of
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

KINDS = sorted(TINY)


def _covering() -> list[str]:
    """Few families of which some table of where weights are in files has each value of each field;
    but for plain names, of which one dict reads and writes."""
    having: dict[tuple[str, str], set[str]] = {}
    for kind in KINDS:
        for field in fields_of(FAMILIES[kind].tensors):
            if field.name != "names":
                value = repr(getattr(FAMILIES[kind].tensors, field.name))
                having.setdefault((field.name, value), set()).add(kind)
    found: list[str] = []
    while left := [kinds for kinds in having.values() if not kinds & {*found}]:
        found.append(max(KINDS, key=lambda kind: sum(kind in kinds for kinds in left)))
    return found


TABLES = _covering()
"""What is read and written follows tables of where weights are in files."""


def written(kind: str, folder: Path, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """transformers' model of a family, saved as it saves models; returns the model."""
    model = oracle({**TINY[kind], "model_type": kind}).to(dtype)
    for name, held in (*model.named_buffers(), *model.named_parameters()):
        if "score_correction" in name or "expert_bias" in name:
            held.data = held.data.float()
    model.save_pretrained(folder, **how)
    return model


def our_stage(folder: Path) -> tuple[Config, Stage]:
    model = model_in(HubFolder(folder))
    stage = Stage(model, training=TrainingConfig(seq_length=LENGTH)).double().eval()
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    for tensor in tensors.values():
        tensor.data.fill_(float("nan"))
    fill_from_folder(folder, model, {name: piece_of(tensor) for name, tensor in tensors.items()})
    return Config(model), stage


def both_logits(folder: Path, theirs: Any) -> tuple[Tensor, Tensor]:
    """The logits of a folder's model as we read it, and those of transformers' model."""
    config, stage = our_stage(folder)
    batch = batch_of(config.model, [[LENGTH]])
    with torch.no_grad():
        ours = stage.logits(batch)[:, : config.model.vocab_size]
    return ours, oracle_logits(theirs.eval(), batch.tokens)


@pytest.mark.parametrize("kind", chosen(KINDS, *TABLES))
def test_there_and_back_is_the_same_to_the_byte(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "hub", torch.bfloat16, max_shard_size="20KB")
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "again", most_bytes=15_000)
    before, after = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "again")
    if kind == "kimi_linear":  # whose dense MLPs transformers saves by names of its experts
        dense = re.compile(r"\.block_sparse_moe\.(\w+_proj\.)")
        before = {dense.sub(r".mlp.\1", name): tensor for name, tensor in before.items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        bits = (each.flatten().view(torch.uint8) for each in (tensor, after[name]))
        assert torch.equal(*bits), name
    one, two = ((tmp_path / side / "config.json").read_bytes() for side in ("hub", "again"))
    assert one == two


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, and that the index says where they are."""
    found: dict[str, torch.Tensor] = {}
    places = {}
    for file in folder.glob("*.safetensors"):
        inside = load_file(file)
        found |= inside
        places |= dict.fromkeys(inside, file.name)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"] == places
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


# Each value of a table comes back to the byte, above; test_huggingface_parity.py has logits of all
# families from the same tensors in memory, and tests below have what is written of some read again.
@pytest.mark.parametrize("kind", chosen(KINDS, *KINDS[::8]))
def test_logits_are_theirs_and_what_is_written_loads_in_transformers(
    kind: str, tmp_path: Path
) -> None:
    """Without the config.json that the weights came with."""
    from transformers import AutoModelForCausalLM, Mistral4ForCausalLM

    # Which transformers has in no list of causal language models.
    loads = Mistral4ForCausalLM if kind == "mistral4" else AutoModelForCausalLM
    theirs = written(kind, tmp_path / "hub").eval()
    torch.testing.assert_close(*both_logits(tmp_path / "hub", theirs), rtol=1e-11, atol=1e-11)
    to_run(tmp_path / "hub", tmp_path / "run")
    (tmp_path / "run" / "huggingface" / "config.json").unlink()
    to_hub(tmp_path / "run", tmp_path / "out", dtype="fp64")
    with InFp64():
        again = loads.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    tokens = torch.arange(LENGTH)[None] % 90
    again.config._experts_implementation = "eager"
    torch.testing.assert_close(
        oracle_logits(again, tokens), oracle_logits(theirs, tokens), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", chosen(PUBLISHED, *OF_EACH_KIND))
def test_published_configurations_are_written_again(name: str) -> None:
    model = from_hf_config(PUBLISHED[name])
    again = to_hf_config(model)
    assert not differences(model, from_hf_config(again))
    config_of(again)  # transformers reads it


def test_whatever_is_read_is_written_by_its_family() -> None:
    """Of OLMo 3, other bases than its own were not."""
    for case, fields in CASES.items():
        family, model = FAMILIES[fields["model_type"]], from_hf_config(fields)
        if family.write is not None:
            again = from_hf_config({"model_type": family.kind, **family.write(model)})
            assert not differences(model, again), case


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp 2, pp 2": (4, "llama", {"tp": 2, "pp": 2}),
    "tp 4 over two key heads, ZeRO-3": (
        8,
        "qwen3",
        {"tp": 4, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "experts 2 x 2": (4, "deepseek_v3", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "joint experts": (2, "gpt_oss", {"ep": 2}),
    "joint projection": (2, "gpt_neox", {"tp": 2}),
    "linear attention": (4, "qwen3_next", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "linear attention, several linear layers": (
        4,
        "qwen3_5_text",
        {"tp": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "one mixer each": (4, "nemotron_h", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "transposed, tied over stages": (4, "gpt2", {"tp": 2, "pp": 2}),
}
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def _differing(rank: int, world: int, settings: Config, folder: Path) -> list[str]:
    """Tensors of a rank that are not the slices of the whole model's."""
    with shared_groups():
        engine = Engine(check(settings, world), rank, torch.device("cpu"), initialises=False)
        stored = engine.stored_tensors()
        pieces = {
            name: tensor if isinstance(tensor, Piece) else piece_of(tensor)
            for name, tensor in stored.items()
            if not name.startswith("optim.")
        }
        fill_from_folder(folder, settings.model, pieces)
    return not_slices(our_stage(folder)[1], pieces)


def not_slices(stage: Stage, pieces: Mapping[str, Piece]) -> list[str]:
    """The pieces, of which there are some, that are not those of the whole model."""
    whole = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    assert pieces
    return [
        name
        for name, piece in pieces.items()
        if not torch.equal(piece.local, whole[name].detach()[piece.slices].to(piece.local.dtype))
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_reads_its_own_slices(name: str, tmp_path: Path) -> None:
    world, kind, flags = LAYOUTS[name]
    written(kind, tmp_path, torch.bfloat16)
    values = {SHORT.get(flag, flag): value for flag, value in flags.items()}
    model = model_in(HubFolder(tmp_path))
    settings = Config(model).with_values(
        precision="fp32", seq_length=16, global_batch_size=8, micro_batch_size=1, **values
    )
    assert run(world, _differing, settings, tmp_path) == [[]] * world


def assert_same_weights(*folders: Path) -> None:
    one, two = (dict(our_stage(folder)[1].named_parameters()) for folder in folders)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_files_of_the_bare_model_lack_the_prefix(tmp_path: Path) -> None:
    model = written("gpt2", tmp_path / "whole")
    model.transformer.save_pretrained(tmp_path / "bare")
    assert_same_weights(tmp_path / "whole", tmp_path / "bare")


def test_experts_may_be_together_and_further_predictions_there(tmp_path: Path) -> None:
    """As Qwen3.5 is published: transformers saves experts one by one, and leaves the others out."""
    written("qwen3_5_moe_text", tmp_path / "each", torch.float32)
    tensors = tensors_of(tmp_path / "each")
    for layer in range(2):
        before = f"model.layers.{layer}.mlp.experts."
        each = {
            part: torch.stack([tensors.pop(f"{before}{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{before}gate_up_proj"] = torch.cat((each["gate"], each["up"]), dim=1)
        tensors[f"{before}down_proj"] = each["down"]
    folder = tmp_path / "together"
    folder.mkdir()
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((tmp_path / "each" / "config.json").read_bytes())
    assert_same_weights(tmp_path / "each", folder)


def test_block_scaled_fp8_is_widened(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published, in blocks that do not divide the matrix."""
    written("deepseek_v3", tmp_path / "wide", torch.float32)
    tensors = tensors_of(tmp_path / "wide")
    name, size = "model.layers.0.mlp.down_proj.weight", (7, 5)
    true = tensors[name]
    scales = torch.rand([-(-n // s) for n, s in zip(true.shape, size, strict=True)]) + 0.5
    grown = scales.repeat_interleave(7, 0)[: len(true)].repeat_interleave(5, 1)[:, : true.shape[1]]
    narrow = (true / grown).to(torch.float8_e4m3fn)
    folder = tmp_path / "narrow"
    folder.mkdir()
    save_file(tensors | {name: narrow, name + "_scale_inv": scales}, folder / "model.safetensors")
    fields = json.loads((tmp_path / "wide" / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(size)}
    (folder / "config.json").write_text(json.dumps(fields))
    found = dict(our_stage(folder)[1].named_parameters())["layers.0.mlp.down_proj.weight"]
    assert torch.equal(found, (narrow.float() * grown).double())
    part = HubFolder(folder).read(name, (slice(6, 20), slice(3, 11)))
    assert torch.equal(part, (narrow.float() * grown)[6:20, 3:11])


def test_mxfp4_is_widened(tmp_path: Path) -> None:
    """As gpt-oss is published; transformers' own function is the oracle."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    written("gpt_oss", tmp_path / "wide", torch.bfloat16)
    tensors = tensors_of(tmp_path / "wide")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts, columns, rows = tensors.pop(name).shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
    folder = tmp_path / "narrow"
    folder.mkdir()
    packed = {name + "_blocks": blocks, name + "_scales": scales}
    save_file(tensors | packed, folder / "model.safetensors")
    (folder / "config.json").write_bytes((tmp_path / "wide" / "config.json").read_bytes())
    hub = HubFolder(folder)
    assert hub.shape(name) == (experts, columns, rows)
    true = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    whole = hub.read(name, (slice(0, experts), slice(0, columns), slice(0, rows)))
    assert torch.equal(whole.float(), true)
    part = hub.read(name, (slice(1, 3), slice(5, 30), slice(2, 9)))
    assert torch.equal(part.float(), true[1:3, 5:30, 2:9])
    our_stage(folder)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    written("llama", tmp_path / "good")
    tensors = tensors_of(tmp_path / "good")
    wrong = {
        "the checkpoint has not": {k: v for k, v in tensors.items() if "k_proj" not in k},
        "of another shape": tensors | {"model.norm.weight": torch.ones(5)},
        "the model has not": tensors | {"model.layers.0.adapter.weight": torch.ones(5)},
    }
    for message, content in wrong.items():
        folder = tmp_path / message.replace(" ", "-")
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_bytes((tmp_path / "good" / "config.json").read_bytes())
        with pytest.raises(CheckpointError, match=message):
            to_run(folder, tmp_path / "never")
        assert not (tmp_path / "never").exists()
    file = tmp_path / "good" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        to_run(tmp_path / "good", tmp_path / "never")
    file.rename(tmp_path / "good" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"save_pretrained"):
        HubFolder(tmp_path / "good")
    config = Config(from_hf_config(tmp_path / "good")).with_values(load=str(tmp_path / "good"))
    with pytest.raises(CheckpointError, match=r"save_pretrained"):
        find_origin(config, tmp_path / "run")


def test_a_damaged_file_of_several_is_named(tmp_path: Path) -> None:
    written("llama", tmp_path, max_shard_size="20KB")
    file = sorted(tmp_path.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(CheckpointError, match=rf"does not give model.*\n  {file} cannot be read"):
        our_stage(tmp_path)


@pytest.mark.parametrize("several", [False, True])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(several: bool, tmp_path: Path) -> None:
    """As a clone holds where Git LFS is not installed."""
    written("llama", tmp_path, max_shard_size="20KB" if several else "5GB")
    file = sorted(tmp_path.glob("model*.safetensors"))[-1]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=f"pointer.*\n  try:   git -C {tmp_path} lfs pull"):
        our_stage(tmp_path)


def test_weights_that_are_not_finite_are_named_before_the_first_step(tmp_path: Path) -> None:
    written("llama", tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    model = from_hf_config(tmp_path)
    held = {"norm.weight": piece_of(torch.ones(model.hidden_size))}
    with pytest.raises(CheckpointError, match=r"not finite.*\n  norm\.weight \(1 of \d+ elem"):
        fill_finite(tmp_path, model, held)


def test_what_a_promise_of_predictions_suggests_works(tmp_path: Path) -> None:
    """transformers saves no such layer, and its config.json says that there is one."""
    written("deepseek_v3", tmp_path)
    config = Config(from_hf_config(tmp_path)).with_values(load=str(tmp_path))
    with pytest.raises(CheckpointError, match=f"--model {tmp_path} --mtp-num-layers 0"):
        find_origin(config, tmp_path / "run")
    found = find_origin(config.with_values(mtp_num_layers=0), tmp_path / "run")
    assert found is not None and found.foreign
    with pytest.raises(CheckpointError, match="ckpt_step chooses one of several"):
        find_origin(config.with_values(ckpt_step=3), tmp_path / "run")
