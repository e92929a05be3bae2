"""Megatron-core's distributed checkpoints: recorded ones (`make_megatron`) give its own logits."""

import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.reader import fill
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.write import to_hf_config
from fivefold.config.megatron import megatron_checkpoint
from fivefold.config.megatron_job.release import known
from fivefold.config.megatron_job.unlike import unlike
from fivefold.config.model import ModelConfig
from fivefold.convert.load import fill_from_folder
from fivefold.convert.megatron import MegatronFolder
from fivefold.errors import CheckpointError, FivefoldError
from fivefold.mesh.slices import Piece, as_piece, piece_of
from fivefold.model.transformer import Stage
from fivefold.train.engine import Engine
from fivefold.train.folder.origin import find_origin
from tests.convert.make_megatron import CASES, FOLDER, LENGTH, PADDED, STEP, VOCABULARY, make
from tests.convert.test_huggingface import SHORT, not_slices
from tests.model.models import batch_of
from tests.pool import run
from tests.verify.cases import shared_groups

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
    make_vocab_size_divisible_by=4,
)
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
MODELS = {
    "llama": LLAMA,
    "gpt2": replace(
        LLAMA,
        num_query_groups=None,
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func="gelu",
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
    ),
    "mixtral": replace(LLAMA, num_query_groups=None, **EXPERTS),
    "mixed": replace(
        LLAMA,
        moe_layer_freq="[0]*1+[1]*1",
        moe_shared_expert_intermediate_size=8,
        qk_layernorm=True,
        kv_channels=8,
        **EXPERTS,
    ),
    "apart": replace(LLAMA, moe_layer_freq="[0]*1+[1]*1", **EXPERTS),
}


def checkpoint(folder: Path) -> Path:
    return megatron_checkpoint(folder, None)


def stage_of(path: Path, model: ModelConfig) -> Stage:
    stage = Stage(model).float().eval()
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    for tensor in tensors.values():
        tensor.data.fill_(float("nan"))
    fill_from_folder(path, model, {name: piece_of(tensor) for name, tensor in tensors.items()})
    return stage


def differences_from_megatron(folder: Path, model: ModelConfig) -> float:
    """The largest difference of logits, relative to the largest logit."""
    told = load_file(folder / "oracle.safetensors")
    batch = replace(batch_of(model, [[LENGTH]]), tokens=told["tokens"][None])
    with torch.no_grad():
        logits = stage_of(checkpoint(folder), model).logits(batch)[:, :VOCABULARY]
    return float((logits - told["logits"]).abs().max() / told["logits"].abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_megatron(name: str) -> None:
    assert differences_from_megatron(FOLDER / name, MODELS[name]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "apart"])
def test_logits_are_those_of_megatron_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    make(name, tmp_path)
    assert differences_from_megatron(tmp_path / name, MODELS[name]) < 1e-5


def test_all_cases_are_recorded_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CASES.keys() == MODELS.keys()
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 600_000


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2, pp 2": ("gpt2", {"tp": 2, "pp": 2}),
    "tp 4 over two key heads": ("llama", {"tp": 4}),
    "ZeRO-3": ("llama", {"tp": 2, "data_parallel_sharding_strategy": "optim_grads_params"}),
    "experts 2 x 2": ("mixed", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "experts apart": ("apart", {"ep": 2}),
}


def _differing(rank: int, world: int, settings: Config, path: Path) -> list[str]:
    """Weights of a rank that are not the slices of the whole model's."""
    with shared_groups():
        engine = Engine(check(settings, world), rank, torch.device("cpu"), initialises=False)
        pieces: dict[str, Piece] = {n: as_piece(t) for n, t in engine.stored_weights().items()}
        fill_from_folder(path, settings.model, pieces)
    return not_slices(stage_of(path, settings.model), pieces)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_reads_its_own_slices(name: str) -> None:
    (kind, flags), world = LAYOUTS[name], 4
    values = {SHORT.get(flag, flag): value for flag, value in flags.items()}
    settings = Config(MODELS[kind]).with_values(
        precision="fp32", seq_length=8, global_batch_size=8, micro_batch_size=1, **values
    )
    assert run(world, _differing, settings, checkpoint(FOLDER / kind)) == [[]] * world


def test_a_run_is_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = replace(LLAMA, vocab_size=PADDED)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(model)))
    words = ["convert", str(FOLDER / "llama"), str(tmp_path / "run")]
    assert main(words) != 0
    assert "--model must say of which model" in capsys.readouterr().err
    words += ["--model", str(tmp_path / "config.json")]
    assert main([*words, "--step", str(STEP + 1)]) != 0
    assert (works := f"works: --step {STEP}\n") in capsys.readouterr().err
    assert main([*words, *works.split()[1:]]) == 0
    path, index = Checkpointer(tmp_path / "run" / "checkpoints").open(0)
    stage = stage_of(checkpoint(FOLDER / "llama"), from_hf_config(to_hf_config(model)))
    for name, tensor in stage.named_parameters():
        whole = tuple(slice(0, size) for size in tensor.shape)
        found = torch.empty(tensor.shape)
        fill(path, index, {name: Piece(found, tensor.shape, whole)})
        assert torch.equal(found, tensor.detach()), name


def test_a_run_starts_from_it() -> None:
    config = Config(LLAMA).with_values(load=str(FOLDER / "llama"))
    with pytest.raises(CheckpointError, match=r"no exp_avg_sq.*\n  works: --finetune"):
        find_origin(config, FOLDER / "none")
    config = config.with_values(finetune=True)
    found = find_origin(config, FOLDER / "none")
    assert found is not None and found.foreign and found.weights_only
    assert found.checkpoints == checkpoint(FOLDER / "llama")
    with pytest.raises(CheckpointError, match=f"works: --ckpt-step {STEP}"):
        find_origin(config.with_values(ckpt_step=STEP + 1), FOLDER / "none")
    one = config.with_values(load=str(checkpoint(FOLDER / "llama")))
    assert find_origin(one, FOLDER / "none") == found
    assert find_origin(one.with_values(ckpt_step=STEP), FOLDER / "none") == found
    with pytest.raises(CheckpointError, match="not known to be that of iteration 4"):
        find_origin(one.with_values(ckpt_step=STEP + 1), FOLDER / "none")
    with pytest.raises(CheckpointError, match="load_adapter is for weights as Hugging Face keeps"):
        find_origin(config.with_values(load_adapter="adapter"), FOLDER / "none")


@pytest.mark.parametrize(("multiple", "fits"), [(4, True), (8, True), (32, True), (5, False)])
def test_the_vocabulary_is_padded_as_the_arguments_say(multiple: int, fits: bool) -> None:
    """64 rows of 60; to multiples of 5 they would be 60, 70, 80, ..."""
    folder = MegatronFolder(checkpoint(FOLDER / "llama"))
    model = replace(LLAMA, make_vocab_size_divisible_by=multiple)
    if fits:
        assert folder.places(model)["lm_head.weight"].of == PADDED
        return
    with pytest.raises(CheckpointError, match="of another shape"):
        folder.places(model)


CHANGES: dict[str, dict[str, Any]] = {
    "num_layers": {"num_layers": 3},
    "num_query_groups": {"num_query_groups": 4},
    "ffn_hidden_size": {"ffn_hidden_size": 32},
    "rotary_base": {"rotary_base": 5e5},
    "norm_epsilon": {"norm_epsilon": 1e-6},
    "norm_placement": {"norm_placement": "both"},
    "qk_layernorm_type": {"qk_layernorm": True, "qk_layernorm_type": "all_heads"},
    "normalization": {"normalization": "LayerNorm"},
    "activation_func": {"activation_func": "gelu"},
    "untie_embeddings_and_output_weights": {"untie_embeddings_and_output_weights": False},
    "position_embedding_type": {"position_embedding_type": "learned_absolute"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_is_named_by_what_differs(name: str) -> None:
    config = Config(replace(LLAMA, **CHANGES[name])).with_values(load=str(FOLDER / "llama"))
    with pytest.raises(CheckpointError, match=rf"is of another model\n(.*\n)*  {name}: "):
        find_origin(config, FOLDER / "none")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixed"])
def test_what_changes_results_alone_is_told_apart(name: str) -> None:
    """Arguments that tensors' names and shapes do not show, with other values, and the setting that
    is named, unless it is called as they are."""
    others: dict[str, tuple[Any, str]] = {
        "apply_layernorm_1p": (True, ""),  # of older releases
        "layernorm_zero_centered_gamma": (True, "apply_layernorm_1p"),
        "apply_residual_connection_post_layernorm": (True, ""),
        "attention_output_gate": (True, ""),
        "experimental_attention_variant": ("gated_delta_net", ""),
        "hybrid_override_pattern": ("M*", ""),
        "squared_relu": (True, "activation_func"),
        "qk_l2_norm": (True, ""),
        "use_mup": (True, ""),
        "quick_geglu": (True, "activation_func"),
        "glu_linear_offset": (1.0, ""),
        "activation_func_clamp_value": (7.0, ""),
        "layernorm_epsilon": (1e-6, "norm_epsilon"),
        "softmax_scale": (0.25, ""),
        "softmax_type": ("off-by-one", ""),
        "window_size": ([128, 0], ""),
    }
    if name != "gpt2":
        others |= {
            "no_rope_freq": (2, ""),
            "rotary_percent": (0.5, ""),
            "rotary_interleaved": (True, ""),
            "rotary_seq_len_interpolation_factor": (8, ""),
            "use_rope_scaling": (True, ""),
        }
    if name == "gpt2":
        others |= {"bias_gelu_fusion": (True, "activation_func")}
    if name == "mixed":
        others |= {
            "moe_apply_probs_on_input": (True, ""),
            "moe_latent_size": (64, ""),
            "moe_router_pre_softmax": (True, ""),
            "moe_router_score_function": ("sigmoid", ""),
            "moe_router_topk_scaling_factor": (2.5, ""),
        }
    model, told = MODELS[name], dict(MegatronFolder(checkpoint(FOLDER / name)).arguments)
    assert not unlike(model, told)
    for key, (other, setting) in others.items():
        gates = {"swiglu": False} if key in ("squared_relu", "quick_geglu") else {}
        lines = unlike(model, {**told, **gates, key: other})
        assert any(re.match(rf"{setting or key}(:| =| cannot) ", line) for line in lines), key
    scaled = replace(model, logits_scaling=8.0, softmax_scale=0.25)
    assert unlike(scaled, told | {"softmax_scale": 0.25}) == ["logits_scaling: 8.0, there 1.0"]
    local = replace(model, window_size=8, rotary_base_local=20.0)
    turns = model.position_embedding_type == "rope"
    assert turns == any("rotary_base_local" in line for line in unlike(local, told))
    assert unlike(replace(model, activation_func="squared_relu"), told)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixed"])
def test_arguments_that_are_as_usual_tell_no_other_model(name: str) -> None:
    """A run of Megatron-LM tells all of its arguments, most of them as they are by default."""
    told = MegatronFolder(checkpoint(FOLDER / name)).arguments
    derived = {"kv_channels", "bias_gelu_fusion"}  # by Megatron-LM, before it writes them
    usual = {key: each for key, each in known().defaults.items() if key not in derived}
    assert not unlike(MODELS[name], {**usual, **told})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moe_layer_freq": "1"}, "moe_layer_freq: true true, there false true"),
        ({"moe_router_topk": 1}, "moe_router_topk: 1, there 2"),
        ({"vocab_size": PADDED + 1}, "of another shape"),
        ({"kv_channels": 4}, "kv_channels: 4, there 8"),
        ({"add_qkv_bias": True}, "add_qkv_bias: true, there false"),
        ({"mtp_num_layers": 1}, "without mtp_num_layers"),
        ({"hybrid_override_pattern": "*E"}, "without hybrid_override_pattern"),
    ],
)
def test_another_mixture_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        MegatronFolder(checkpoint(FOLDER / "mixed")).places(replace(MODELS["mixed"], **change))


def _without_arguments(path: Path) -> None:
    (path / "common.pt").unlink()


def _cut(path: Path) -> None:
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-50])


def _backend(path: Path) -> None:
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file less": (lambda path: next(path.glob("*.distcp")).unlink(), "no file of the checkp"),
    "a file cut": (_cut, "the file has ended"),
    "no metadata": (lambda path: (path / ".metadata").write_bytes(b"x"), "is not what"),
    "no archive": (lambda path: (path / "common.pt").write_bytes(b"x"), "common.pt cannot be"),
    "another format": (_backend, "of format 'zarr'"),
    "the older format": (lambda path: (path / "mp_rank_00").mkdir(), "--ckpt-format torch"),
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER / "mixed", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused(name: str, copied: Path) -> None:
    damage, said = DAMAGED[name]
    damage(checkpoint(copied))
    config = Config(MODELS["mixed"]).with_values(load=str(copied))
    with pytest.raises(CheckpointError, match=said):
        find_origin(config, copied / "none")


def test_without_arguments_shapes_decide(copied: Path) -> None:
    _without_arguments(checkpoint(copied))
    MegatronFolder(checkpoint(copied)).places(MODELS["mixed"])
    with pytest.raises(CheckpointError, match="of another shape"):
        MegatronFolder(checkpoint(copied)).places(replace(MODELS["mixed"], hidden_size=32))


def test_bytes_that_changed_are_an_error_or_without_effect(copied: Path) -> None:
    """Whatever became of the metadata, nothing but an error for people comes out."""
    random, path = Random(3), checkpoint(copied)
    whole = {path / name: (path / name).read_bytes() for name in (".metadata", "common.pt")}
    for _ in range(80):
        for other, bytes_of in whole.items():
            other.write_bytes(bytes_of)
        file, good = random.choice([*whole.items()])
        bad = bytearray(good)
        for _ in range(random.choice((1, 1, 5))):
            bad[random.randrange(len(bad))] = random.randrange(256)
        file.write_bytes(bad[: random.choice((None, None, random.randrange(len(bad))))])
        try:
            MegatronFolder(path).places(MODELS["mixed"])
        except FivefoldError as error:
            assert str(error).strip()


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled(copied: Path, tmp_path: Path) -> None:
    mark, path = tmp_path / "executed", checkpoint(copied)
    evil = pickle.dumps({"args": {"num_layers": 2}, "evil": _Evil(mark)}, protocol=2)
    with zipfile.ZipFile(path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", evil)
    assert MegatronFolder(path).arguments == {"num_layers": 2}
    (path / ".metadata").write_bytes(pickle.dumps(_Evil(mark)))
    with pytest.raises(CheckpointError):
        MegatronFolder(path)
    assert not mark.exists()
