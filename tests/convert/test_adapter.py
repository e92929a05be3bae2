"""Adapters as PEFT has them: its logits are ours, alone and merged, and it reads what we write."""

import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.huggingface import read_adapter
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.model import ModelConfig
from fivefold.config.rules.lora import linear_names
from fivefold.config.sources import to_toml
from fivefold.config.training import TrainingConfig
from fivefold.convert.hub import HubFolder
from fivefold.convert.load import checked_sources, fill_from_folder, model_in
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import piece_of
from fivefold.model.lora import LORA
from fivefold.model.transformer import Stage
from fivefold.train.folder.convert import keep_side_files, to_hub, to_run
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.folder.saved_state import SavedState
from tests.config.oracle import LENGTH, InFp64, oracle_logits
from tests.convert.test_huggingface import KINDS, TABLES, written
from tests.model.models import batch_of
from tests.verify.cases import chosen

# Where several of our layers are one.
JOINT = [kind for kind in KINDS if FAMILIES[kind].tensors.joint_qkv is not None]
RENAMED = [kind for kind in KINDS if FAMILIES[kind].tensors.renamed]
OF_MLP = "gate_proj", "up_proj", "down_proj"


def adapted_alone(base: ModelConfig, kind: str) -> tuple[str, ...]:
    """Linear layers of which PEFT can adapt each by itself."""
    files = FAMILIES[kind].tensors
    others = OF_MLP if base.num_experts is not None or files.joint_mlp else ()
    others += (*(name.removesuffix(".") for name in files.apart), "in_proj_xc", "in_proj_b")
    return tuple(name for name in linear_names(base) if name not in others)


def _adapted(base: Path, **settings: Any) -> tuple[ModelConfig, Stage]:
    """A Hugging Face folder's model with random adapters, in fp64."""
    model = replace(model_in(HubFolder(base)), lora_rank=3, lora_alpha=5.0, **settings)
    stage = Stage(model, training=TrainingConfig(seq_length=LENGTH)).double().eval()
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    frozen = {name: piece_of(tensor) for name, tensor in tensors.items() if LORA not in name}
    fill_from_folder(base, model.base, frozen)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if LORA in name:
            tensor.data.normal_(std=0.1, generator=generator)
    return model, stage


def _saved(model: ModelConfig, stage: Stage, base: Path, run: Path) -> Path:
    """A run folder with these weights."""
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    state = SavedState(0, {"consumed_samples": 0, "fingerprint": {}}, vars(model), LENGTH)
    Checkpointer(run / "checkpoints").save(
        0, {name: tensor.detach() for name, tensor in tensors.items()}, vars(state)
    )
    config = Config(model).with_values(seq_length=LENGTH, precision="fp64", load=str(base))
    (run / "config.toml").write_text(to_toml(config))
    keep_side_files(base, run)
    return run


def _logits(stage: Stage, model: ModelConfig) -> torch.Tensor:
    with torch.no_grad():
        return stage.logits(batch_of(model, [[LENGTH]]))[:, : model.vocab_size]


# Of the others, weights that are converted come back to the byte (test_huggingface.py).
@pytest.mark.parametrize("kind", chosen(KINDS, *TABLES[::2]))
def test_merged_weights_have_our_logits(kind: str, tmp_path: Path) -> None:
    theirs = written(kind, tmp_path / "base").eval()
    kinds = {"use_rslora": kind in KINDS[::3], "use_dora": kind in KINDS[::2]}
    model, stage = _adapted(tmp_path / "base", **kinds)
    to_hub(_saved(model, stage, tmp_path / "base", tmp_path / "run"), tmp_path / "merged")
    with InFp64():
        merged = type(theirs).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    merged.config._experts_implementation = "eager"
    tokens, ours = batch_of(model, [[LENGTH]]).tokens, _logits(stage, model)
    assert (ours - oracle_logits(theirs, tokens)).abs().max() > 1e-4
    assert (oracle_logits(merged, tokens) - ours).abs().max() < 1e-10


# Of every table of tensors test_peft_folder.py reads what PEFT wrote, and of some writes it
# again to the byte; so some suffice here, and those that are refused.
@pytest.mark.parametrize("kind", chosen(KINDS, *JOINT, *KINDS[::6]))
def test_peft_has_our_logits(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = written(kind, tmp_path / "base").eval()
    base = model_in(HubFolder(tmp_path / "base"))
    targets = adapted_alone(base, kind)
    kinds = {"use_rslora": kind in KINDS[::3], "use_dora": kind in KINDS[1::2]}
    model, stage = _adapted(tmp_path / "base", **kinds, lora_target_modules=targets)
    run = _saved(model, stage, tmp_path / "base", tmp_path / "run")
    if kind in (*JOINT, *RENAMED, "nemotron_h", "kimi_linear"):
        why = r"one linear layer|layers with (Mamba-2|Kimi Delta)|modules of"
        with pytest.raises(CheckpointError, match=why):
            to_hub(run, tmp_path / "adapter", adapter=True)
        return
    to_hub(run, tmp_path / "adapter", adapter=True)
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens, ours = batch_of(model, [[LENGTH]]).tokens, _logits(stage, model)
    assert (oracle_logits(wrapped, tokens) - ours).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("kind", "targets", "several"),
    [("qwen3_5_text", ("q_proj", "in_proj_ba"), "in_proj_qkvz"), ("afmoe", ("q_proj",), "q_proj")],
)
def test_several_layers_there_have_adapters_each(
    kind: str, targets: tuple[str, ...], several: str, tmp_path: Path
) -> None:
    written(kind, tmp_path / "base")
    model, stage = _adapted(tmp_path / "base", lora_target_modules=targets)
    run = _saved(model, stage, tmp_path / "base", tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"several linear layers for {several}"):
        to_hub(run, tmp_path / "adapter", adapter=True)


@pytest.mark.parametrize("kind", ["glm", "granitemoehybrid"])
def test_gate_and_up_of_one_layer_have_one_adapter_there(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "base")
    model, stage = _adapted(tmp_path / "base", lora_target_modules=("q_proj", "up_proj"))
    run = _saved(model, stage, tmp_path / "base", tmp_path / "run")
    with pytest.raises(CheckpointError, match="gate_proj and up_proj in one linear layer"):
        to_hub(run, tmp_path / "adapter", adapter=True)


def test_the_weights_that_a_run_adapts_are_those_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever has the same name in the folder where the adapter is written."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        written("llama", folder / "base")
    monkeypatch.chdir(there)
    run = _saved(*_adapted(Path("base")), Path("base"), there / "run")
    RunFolder(run).open((run / "config.toml").read_text())
    monkeypatch.chdir(here)
    assert main(["convert", str(run), "adapter", "--adapter"]) == 0
    assert read_adapter(Path("adapter")).base == str(there / "base")
    assert "AutoPeftModelForCausalLM" in capsys.readouterr().out
    shutil.rmtree(there / "base")
    assert main(["convert", str(run), "without", "--adapter"]) == 0
    assert read_adapter(Path("without")).base is None
    assert "adapter_config.json" in capsys.readouterr().out


def test_a_folder_is_whole_or_absent_and_is_read_by_whom_the_mask_lets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("llama", tmp_path / "base")
    run = _saved(*_adapted(tmp_path / "base"), tmp_path / "base", tmp_path / "run")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for flags in ([], ["--adapter"]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
        try:
            assert main(["convert", str(run), str(tmp_path / "out"), *flags]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        assert "error: disk full: cannot write" in capsys.readouterr().err
        assert main(["convert", str(run), str(tmp_path / "file" / "out"), *flags]) == 2
        assert f"error: cannot write {tmp_path}/file/out: " in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
        mask = os.umask(0o027)
        try:
            assert main(["convert", str(run), str(tmp_path / f"out{flags}"), *flags]) == 0
        finally:
            os.umask(mask)
        made = tmp_path / f"out{flags}"
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in [made, *made.iterdir()]}
        assert modes == {**dict.fromkeys(modes, "0o640"), made.name: "0o750"}
        shutil.rmtree(made)


def test_what_peft_would_take_for_other_layers_is_refused(tmp_path: Path) -> None:
    written("deepseek_v3", tmp_path / "base")
    run = _saved(*_adapted(tmp_path / "base"), tmp_path / "base", tmp_path / "run")
    with pytest.raises(CheckpointError, match="gate_proj up_proj down_proj of a model with exp"):
        to_hub(run, tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_that_transformers_made_lacks_further_predictions(tmp_path: Path) -> None:
    """transformers leaves out DeepSeek-V3's last layers, which the published weights have."""
    peft = pytest.importorskip("peft")
    theirs = written("deepseek_v3", tmp_path / "plain")
    model = replace(model_in(HubFolder(tmp_path / "plain")), mtp_num_layers=1)
    stage = Stage(model).double()
    to_hub(_saved(model, stage, tmp_path / "plain", tmp_path / "run"), tmp_path / "base")
    assert model_in(HubFolder(tmp_path / "base")).mtp_num_layers == 1
    of = {"target_modules": ["q_a_proj", "o_proj"], "r": 3, "init_lora_weights": False}
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(**of), autocast_adapter_dtype=False)
    wrapped.eval().save_pretrained(tmp_path / "adapter")
    to_run(tmp_path / "base", tmp_path / "adapted", tmp_path / "adapter")
    to_hub(tmp_path / "adapted", tmp_path / "again", adapter=True)
    one, two = (tmp_path / side / "adapter_model.safetensors" for side in ("adapter", "again"))
    assert one.read_bytes() == two.read_bytes()
    model = replace(model, **read_adapter(tmp_path / "adapter").settings)
    with pytest.raises(CheckpointError, match="--mtp-num-layers 0"):
        checked_sources(tmp_path / "base", model, tmp_path / "adapter")
    checked_sources(tmp_path / "base", replace(model, mtp_num_layers=0), tmp_path / "adapter")
