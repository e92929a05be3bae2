"""Adapters that PEFT saved: read, they are PEFT's; nothing of their folders is read and ignored."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.huggingface import read_adapter
from fivefold.config.model import ModelConfig
from fivefold.convert.adapter import adapter_places
from fivefold.convert.hub import HubFolder
from fivefold.convert.load import fill_from_folder, model_in, places_in
from fivefold.convert.stored import Stored
from fivefold.errors import CheckpointError, ConfigError, FivefoldError
from fivefold.mesh.slices import Piece, as_piece, piece_of
from fivefold.model.lora import LORA
from fivefold.model.transformer import Stage
from fivefold.train.engine import Engine
from fivefold.train.folder.convert import to_hub, to_run
from tests.config.oracle import LENGTH, InFp64, oracle_logits
from tests.convert.test_adapter import JOINT, adapted_alone
from tests.convert.test_huggingface import KINDS as ALL_KINDS
from tests.convert.test_huggingface import LAYOUTS, SHORT, TABLES, written
from tests.model.models import batch_of
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

REFUSED = (*JOINT, "nemotron_h", "kimi_linear", "exaone")
KINDS = [kind for kind in ALL_KINDS if kind not in REFUSED]
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """An adapter of PEFT's with random A and B to a model of a family, both saved by their owners.

    Returns the adapted model.
    """
    theirs = written(kind, folder / "base", dtype)
    hub = HubFolder(folder / "base")
    model = model_in(hub)
    names = adapted_alone(model, kind)
    places = places_in(hub, model)
    adapted = [place for name, place in places.items() if name.split(".")[-2] in names]
    asked = {place.names[0].split(".")[-2] for place in adapted}
    chosen = {"r": 3, "lora_alpha": 5, "target_modules": sorted(asked), "task_type": "CAUSAL_LM"}
    settings = chosen | {"init_lora_weights": False} | settings
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(**settings), autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "magnitude" in name:  # which PEFT makes such that they change nothing
            parameter.data.mul_(torch.linspace(0.5, 2.0, len(parameter)))
    if kind != "llama":  # a README takes longer to write than the weights
        wrapped.create_or_update_model_card = lambda *_: None
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


def ours(folder: Path) -> tuple[ModelConfig, Stage, dict[str, Stored]]:
    """The same of ours, in fp64, and where PEFT has our adapters."""
    hub = HubFolder(folder / "base")
    model = replace(model_in(hub), **read_adapter(folder / "adapter").settings)
    stage = Stage(model).double().eval()
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    for tensor in tensors.values():
        tensor.data.fill_(float("nan"))
    pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
    fill_from_folder(folder / "base", model, pieces, folder / "adapter")
    return model, stage, adapter_places(model, places_in(hub, model.base))


@pytest.mark.parametrize("kind", chosen(KINDS, "llama", *{*TABLES} & {*KINDS}))
def test_logits_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    magnitudes = kind in KINDS[1::2]
    theirs = saved(kind, tmp_path, use_rslora=kind in KINDS[::3], use_dora=magnitudes).eval()
    model, stage, places = ours(tmp_path)
    batch = batch_of(model, [[LENGTH]])
    logits = stage.logits(batch)[:, : model.vocab_size]
    with InFp64():
        expected = theirs(batch.tokens).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    onto = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).double()
    (logits * onto).sum().backward()
    (expected * onto).sum().backward()
    gradients = {
        name.replace(".default.", ".").replace("_vector.weight", "_vector"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert {place.names[0] for place in places.values()} == gradients.keys()
    for name, parameter in stage.named_parameters():
        assert (LORA in name) == parameter.requires_grad
        if LORA in name:
            place = places[name]
            there = gradients[place.names[0]]
            there = there if place.rows is None else there[place.rows]
            torch.testing.assert_close(parameter.grad, there, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", chosen(KINDS, *KINDS[::5]))
def test_there_and_back_is_the_same_to_the_byte(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path, torch.bfloat16, use_dora=kind in KINDS[::2], lora_dropout=0.1)
    to_run(tmp_path / "base", tmp_path / "run", tmp_path / "adapter")
    to_hub(tmp_path / "run", tmp_path / "again", adapter=True)
    one, two = ((tmp_path / side / WEIGHTS).read_bytes() for side in ("adapter", "again"))
    assert one == two
    before, after = (read_adapter(tmp_path / side) for side in ("adapter", "again"))
    assert before.settings == after.settings and before.modules == after.modules
    assert after.base == str(tmp_path / "base")


@pytest.mark.parametrize("magnitudes", [False, True])
def test_converted_it_is_merged(magnitudes: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = saved("qwen3", tmp_path, use_dora=magnitudes).eval()
    to_run(tmp_path / "base", tmp_path / "run", tmp_path / "adapter")
    to_hub(tmp_path / "run", tmp_path / "merged", dtype="fp64")
    tokens = torch.arange(LENGTH)[None] % 90
    with InFp64():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    found, expected = oracle_logits(merged.eval(), tokens), oracle_logits(theirs, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def _differing(rank: int, world: int, settings: Config, folder: Path) -> list[str]:
    """Adapters of a rank that are not the slices of the whole model's."""
    with shared_groups():
        engine = Engine(check(settings, world), rank, torch.device("cpu"), initialises=False)
        stored: dict[str, Piece] = {n: as_piece(t) for n, t in engine.stored_weights().items()}
        fill_from_folder(folder / "base", settings.model, stored, folder / "adapter")
    whole = dict(ours(folder)[1].named_parameters())
    found = {name: piece for name, piece in stored.items() if LORA in name}
    assert found
    return [
        name
        for name, piece in found.items()
        if not torch.equal(piece.local, whole[name].detach()[piece.slices].to(piece.local.dtype))
    ]


@pytest.mark.parametrize("name", ["tp 4 over two key heads, ZeRO-3", "experts 2 x 2"])
def test_each_rank_reads_its_own_slices(name: str, tmp_path: Path) -> None:
    world, kind, flags = LAYOUTS[name]
    saved(kind, tmp_path, torch.bfloat16, use_dora=True)
    values = {SHORT.get(flag, flag): value for flag, value in flags.items()}
    settings = Config(ours(tmp_path)[0]).with_values(
        precision="fp32", seq_length=16, global_batch_size=8, micro_batch_size=1, **values
    )
    assert run(world, _differing, settings, tmp_path) == [[]] * world


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    saved("llama", folder, torch.float32)
    return folder


def _changed(llama: Path, folder: Path, fields: Mapping[str, Any]) -> Path:
    """A copy of the adapter with other fields; a field of the value `...` is left out."""
    folder.mkdir()
    (folder / WEIGHTS).write_bytes((llama / "adapter" / WEIGHTS).read_bytes())
    whole = json.loads((llama / "adapter" / SETTINGS).read_text()) | dict(fields)
    kept = {name: value for name, value in whole.items() if value is not ...}
    (folder / SETTINGS).write_text(json.dumps(kept))
    return folder


REFUSED: dict[str, Any] = {
    "peft_type": "IA3",
    "task_type": "SEQ_CLS",
    "r": 0,
    "lora_alpha": 0,
    "lora_dropout": 1.0,
    "bias": "lora_only",
    "init_lora_weights": "pissa_niter_4",
    "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [3],
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "layer_replication": [[0, 2], [1, 2]],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"layers.0": 8},
    "lora_bias": True,
    "use_qalora": True,
    "alora_invocation_tokens": [1],
    "kasa_config": {},
    "target_modules": "(q_proj",
    "lora_magic": 1,
}
WITHOUT_EFFECT: dict[str, Any] = {
    "init_lora_weights": "gaussian",
    "fan_in_fan_out": True,
    "rank_pattern": {"q_proj": 3},
    "modules_to_save": [],
    "megatron_core": "other",
    "peft_version": ...,
    "loftq_config": {"loftq_bits": 4},
    "revision": "main",
    "target_modules": r".*\.(mlp|self_attn)\.\w+_proj",
    "exclude_modules": ["lm_head"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_another_adapter_is_refused_by_name(name: str, llama: Path, tmp_path: Path) -> None:
    folder = _changed(llama, tmp_path / "other", {name: REFUSED[name]})
    with pytest.raises(ConfigError, match=rf"{name}\b"):
        to_run(llama / "base", tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_read(name: str, llama: Path, tmp_path: Path) -> None:
    folder = _changed(llama, tmp_path / "other", {name: WITHOUT_EFFECT[name]})
    assert read_adapter(folder).settings == read_adapter(llama / "adapter").settings
    to_run(llama / "base", tmp_path / "run", folder)


def test_every_field_that_peft_writes_is_known(llama: Path) -> None:
    """`saved` has its defaults; a later PEFT with a field more is seen here."""
    peft = pytest.importorskip("peft")
    fields = json.loads((llama / "adapter" / SETTINGS).read_text())
    assert fields.keys() == {*peft.LoraConfig().to_dict()}
    assert read_adapter(llama / "adapter").settings["lora_rank"] == 3


def _tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return changed


def _settings(**fields: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        whole = json.loads((folder / SETTINGS).read_text())
        (folder / SETTINGS).write_text(json.dumps(whole | fields))

    return changed


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no file": (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "a pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "adapter_model.bin"),
    "cut": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]),
        "safetensors cannot be read",
    ),
    "no JSON": (lambda f: (f / SETTINGS).write_text("{"), "is not JSON"),
    "a list": (lambda f: (f / SETTINGS).write_text("[]"), "does not hold what it should"),
    "one missing": (_tensors(lambda t: t.pop(FIRST)), "q_proj: named, and no tensors"),
    "half missing": (_tensors(lambda t: t.pop(FIRST.replace("_A", "_B"))), "checkpoint has not"),
    "another shape": (_tensors(lambda t: t.update({FIRST: torch.ones(3, 5)})), "another shape"),
    "one left": (_tensors(lambda t: t.update({"base_model.x": torch.ones(3)})), "model has not"),
    "of the head": (
        _tensors(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 5)})),
        "lm_head of this adapter has no adapters here",
    ),
    "one not named": (_settings(target_modules=["k_proj"]), "not named, and has tensors"),
    "without magnitudes": (_settings(use_dora=True), "lora_magnitude_vector"),
    "another rank": (_settings(r=4), "another shape"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    damage, said = DAMAGED[name]
    folder = _changed(llama, tmp_path / "other", {})
    damage(folder)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        to_run(llama / "base", tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()


def test_other_values_are_the_same_adapter_or_an_error(llama: Path, tmp_path: Path) -> None:
    """Whatever a field holds, what is read is refused or describes this file."""
    random, fields = Random(4), json.loads((llama / "adapter" / SETTINGS).read_text())
    values = (None, True, False, 0, 1, 3, -1, 1e999, "", "x", [], ["q_proj"], [0], {}, {"a": 1})
    true = read_adapter(llama / "adapter")
    folder = _changed(llama, tmp_path / "other", {})
    for _ in range(200):
        changes = {name: random.choice(values) for name in random.sample([*fields], 2)}
        (folder / SETTINGS).write_text(json.dumps(fields | changes))
        try:
            found = read_adapter(folder)
        except FivefoldError as error:
            assert str(error).strip()
            continue
        of_value = {"r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout"} & changes.keys()
        assert of_value or found.settings == true.settings


def test_a_joint_projection_is_refused(tmp_path: Path) -> None:
    saved("gpt2", tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(ConfigError, match="c_attn of this adapter has no adapters here"):
        to_run(tmp_path / "base", tmp_path / "run", tmp_path / "adapter")
