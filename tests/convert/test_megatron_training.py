"""Runs that go on from Megatron-core's checkpoints: recorded ones (`make_megatron_training`) are
loaded to the bit, and the next step is its own."""

import json
import shutil
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from fivefold.check import check
from fivefold.checkpoint.index import SavedTensor, read_foreign_index
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.megatron import megatron_checkpoint
from fivefold.config.model import ModelConfig
from fivefold.convert.load import fill_from_folder
from fivefold.convert.megatron_common import read_common
from fivefold.data.packing import Microbatch
from fivefold.errors import CheckpointError, FivefoldError
from fivefold.mesh.slices import Piece, as_piece
from fivefold.model.transformer import Stage
from fivefold.optim.loss_scale import ScaleState
from fivefold.optim.schedule import rates
from fivefold.train.engine import Engine
from fivefold.train.folder.megatron_state import megatron_state
from fivefold.train.folder.origin import find_origin
from fivefold.verify.batches import microbatches, rows_of
from tests.convert.make_megatron_training import (
    CASES,
    DECAY,
    DECAYS,
    FOLDER,
    LENGTH,
    RATES,
    SAMPLES,
    STEP,
    VOCABULARY,
    WARMUP,
    batch,
    make,
)
from tests.pool import run
from tests.verify.cases import chosen, named, shared_groups

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=12,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
    make_vocab_size_divisible_by=4,
)
MODELS = {
    "sharded": LLAMA,
    "flat": LLAMA,
    "tied": replace(
        LLAMA,
        num_query_groups=None,
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func="gelu",
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
    ),
    "experts": replace(
        LLAMA,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=8,
        moe_layer_freq="[0]*1+[1]*1",
    ),
    "narrow": replace(LLAMA, num_layers=1),
    "buckets": replace(LLAMA, num_layers=1),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("sharded", {}),
    "tp 4 over two key heads": ("sharded", {"tp": 4}),
    "tp 2, ZeRO-1, updated on the host": (
        "sharded",
        {"tp": 2, "strategy": "optim", "optimizer_cpu_offload": True},
    ),
    "cp 2, ZeRO-2, kept on the host": (
        "sharded",
        {"cp": 2, "strategy": "optim_grads", "offload_optimizer_states": True},
    ),
    "HSDP": ("sharded", {"replicas": 2, "strategy": "optim_grads_params"}),
    "from flattened parts, tp 4": ("flat", {"tp": 4}),
    "from flattened parts, ZeRO-3": ("flat", {"strategy": "optim_grads_params"}),
    "tied, tp 2, pp 2": ("tied", {"tp": 2, "pp": 2}),
    "experts, pp 2, ZeRO-1": ("experts", {"pp": 2, "strategy": "optim"}),
    "experts, ep 2, etp 2, ZeRO-3": (
        "experts",
        {"tp": 2, "ep": 2, "etp": 2, "strategy": "optim_grads_params"},
    ),
    "bf16": ("narrow", {"tp": 2, "strategy": "optim", "precision": "bf16"}),
}
_NOISE = "k_proj.bias"
"""What no loss depends on: its gradients are rounding errors, which Adam makes as large as any."""


def settings(name: str, **flags: Any) -> Config:
    """Those of the job."""
    values = {
        "precision": "fp32",
        "seq_length": LENGTH,
        "global_batch_size": SAMPLES,
        "micro_batch_size": 1,
        "train_iters": DECAY,
        "lr_warmup_iters": WARMUP,
        "lr_decay_iters": DECAY,
        "lr_decay_style": "cosine",
        "weight_decay_incr_style": "linear",
        "start_weight_decay": DECAYS[0],
        "end_weight_decay": DECAYS[1],
        **RATES,
        **named(**flags),
    }
    return Config(MODELS[name]).with_values(**values)


def checkpoint(name: str, folder: Path = FOLDER) -> Path:
    return megatron_checkpoint(folder / name, None)


def whole(path: Path, model: ModelConfig, *, trained: bool) -> dict[str, torch.Tensor]:
    """Weights, or masters and moments, of the whole model in fp32 by our names."""
    stage = Stage(model).float()
    tensors = {n: torch.zeros(p.shape) for n, p in stage.named_parameters()}
    if trained:
        moments = ("exp_avg", "exp_avg_sq")
        tensors |= {
            f"optim.{m}.{n}": torch.zeros(p.shape) for m in moments for n, p in tensors.items()
        }
    pieces = {
        name: Piece(t, t.shape, tuple(slice(0, size) for size in t.shape))
        for name, t in tensors.items()
    }
    fill_from_folder(path, model, pieces, trained=trained)
    return tensors


_kept = cache(whole)  # of this rank, for all layouts of the same model


def _next_batch() -> Microbatch:
    tokens, labels = (part.numpy() for part in batch(STEP))
    places = np.tile(np.arange(LENGTH), (SAMPLES, 1))
    ids = np.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH)
    return Microbatch(tokens, labels, places, np.zeros_like(places), ids, np.ones(ids.shape))


def _go_on(rank: int, world: int, config: Config, path: Path) -> tuple[list[str], float, float]:
    """What was loaded otherwise than it is stored; the difference from the job's next step, and by
    how much that moved."""
    model = config.model
    with shared_groups():
        engine = Engine(check(config, world), rank, torch.device("cpu"), initialises=False)
        stored = engine.stored_tensors()
        pieces: dict[str, Piece] = {n: as_piece(t) for n, t in stored.items()}
        fill_from_folder(path, model, pieces, trained=True)
        now = _kept(path, model, trained=True)
        engine.after_load(STEP, stored)
        wrong = [
            n
            for n, piece in ((n, as_piece(t)) for n, t in engine.stored_tensors().items())
            if not torch.equal(piece.local, now[n][piece.slices].to(piece.local.dtype))
        ]
        grid = engine.layout.grid
        rows = rows_of(config, grid.dp_rank(engine.groups.rank), grid.dp)
        engine.step(microbatches(config, _next_batch(), rows))
        after = path.parent / "next" / f"iter_{STEP + 1:07d}"
        if not after.is_dir():
            return wrong, 0.0, 0.0
        theirs, off, moved = _kept(after, model, trained=False), 0.0, 0.0
        for n, weight in ((n, as_piece(t)) for n, t in engine.stored_weights().items()):
            if weight.local.numel() and not n.endswith(_NOISE):
                off = max(off, float((weight.local - theirs[n][weight.slices]).abs().max()))
                moved = max(moved, float((theirs[n] - now[n]).abs().max()))
    return wrong, off, moved


def check_next_step(layout: str, folder: Path) -> None:
    name, flags = LAYOUTS[layout]
    path, world = checkpoint(name, folder), 1 if not flags else 4
    found = run(world, _go_on, settings(name, **flags), path)
    assert [wrong for wrong, _, _ in found] == [[]] * world
    if (path.parent / "next").is_dir():
        assert all(off < 1e-6 and moved > 5e-3 for _, off, moved in found)


# Key heads on several ranks are read from flattened parts too, and shards in other rows.
@pytest.mark.parametrize(
    "layout", chosen(LAYOUTS, *(LAYOUTS.keys() - {"tp 4 over two key heads", "HSDP"}))
)
def test_the_next_step_is_that_of_megatron(layout: str) -> None:
    check_next_step(layout, FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["HSDP", "experts, ep 2, etp 2, ZeRO-3"])
def test_the_next_step_is_that_of_megatron_here(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    make(LAYOUTS[layout][0], tmp_path)
    check_next_step(layout, tmp_path)


def test_all_cases_are_recorded_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CASES.keys() == MODELS.keys()
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 2_000_000


def _as_torch_reads(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, read with torch's own reader."""
    reader = FileSystemReader(path)
    there = reader.read_metadata().state_dict_metadata
    found = {name: torch.zeros(there[name].size) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group is there
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("state", ["param", "exp_avg", "exp_avg_sq"])
def test_what_is_read_is_what_is_stored(state: str) -> None:
    """To the bit, by another reader, and with the order of queries, keys and values spelt out."""
    ours = whole(checkpoint("sharded"), LLAMA, trained=True)
    prefix = f"optimizer.state.{state}."
    attention, mlp = "decoder.layers.self_attention.linear_", "decoder.layers.mlp.linear_"
    theirs = {
        "embed_tokens.weight": "embedding.word_embeddings.weight",
        "lm_head.weight": "output_layer.weight",
        "norm.weight": "decoder.final_layernorm.weight",
    }
    stacked = {
        "input_layernorm.weight": f"{attention}qkv.layer_norm_weight",
        "self_attn.o_proj.weight": f"{attention}proj.weight",
        "post_attention_layernorm.weight": f"{mlp}fc1.layer_norm_weight",
        "mlp.down_proj.weight": f"{mlp}fc2.weight",
    }
    joint = f"{attention}qkv.weight", f"{mlp}fc1.weight"
    raw = _as_torch_reads(
        checkpoint("sharded"),
        [prefix + name for name in (*theirs.values(), *stacked.values(), *joint)],
    )
    expected = {ours_: raw[prefix + name] for ours_, name in theirs.items()}
    for layer in range(2):
        at = f"layers.{layer}."
        expected |= {at + ours_: raw[prefix + name][layer] for ours_, name in stacked.items()}
        gate, up = raw[prefix + joint[1]][layer].chunk(2)
        groups = raw[prefix + joint[0]][layer].view(2, 4, 2, 8)  # two queries, key, value
        for part, rows in (("q", groups[:, :2]), ("k", groups[:, 2:3]), ("v", groups[:, 3:])):
            expected[f"{at}self_attn.{part}_proj.weight"] = rows.reshape(-1, 8)
        expected |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
    named_so = {
        name if state == "param" else f"optim.{state}.{name}": t for name, t in expected.items()
    }
    assert len(named_so) * 3 == len(ours)
    assert all(torch.equal(ours[name], tensor) for name, tensor in named_so.items())


def test_flattened_parts_are_the_same_numbers() -> None:
    """Two releases took the same steps, and stored what they left in other formats."""
    one, other = (whole(checkpoint(n), LLAMA, trained=True) for n in ("sharded", "flat"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "buckets": ("buckets", {}, "in buckets .dp_reshardable.*--dist-ckpt-optim-fully-reshardable"),
    "other moments": ("sharded", {"optimizer": "muon"}, "works: --optimizer adam . --finetune"),
    "narrow moments": (
        "narrow",
        {
            "precision": "bf16",
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
        },
        "works: --exp-avg-dtype fp32 . --finetune",
    ),
    "moments in 8 bits": (
        "narrow",
        {
            "precision": "bf16",
            "use_precision_aware_optimizer": True,
            "exp_avg_sq_dtype": "fp8",
        },
        "works: --exp-avg-sq-dtype fp32 . --finetune",
    ),
    "adapters": ("sharded", {"lora_rank": 2}, "lora_rank asks for some\n  works: --finetune"),
    "other samples": ("sharded", {"seq_length": 4}, "works: --seq-length 8 . --finetune"),
    "no steps left": ("sharded", {"train_iters": STEP}, "works: --train-iters 6 . --finetune"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, flags, said = REFUSED[case]
    config = settings(name, **flags).with_values(load=str(FOLDER / name))
    with pytest.raises(FivefoldError, match=f"(?s){said}"):
        find_origin(config, tmp_path)
    found = find_origin(config.with_values(finetune=True), tmp_path)
    assert found is not None and found.weights_only and found.step == 0


def test_where_it_goes_on_is_told(tmp_path: Path) -> None:
    config = settings("tied").with_values(load=str(FOLDER / "tied"))
    found = find_origin(config, tmp_path)
    assert found is not None and found.foreign and not found.weights_only
    assert found.step == STEP
    assert "after 3 steps" in found.note and "sample is number 13 of" in found.note


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Settings that load a checkpoint of which something is changed: what its index, or what its
    common.pt is read as."""

    def copy(
        name: str,
        index: Callable[[dict[str, SavedTensor]], object] = lambda _: None,
        common: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> Config:
        def read_index(path: Path) -> dict[str, SavedTensor]:
            found = read_foreign_index(path)
            index(found)
            return found

        def read(path: Path) -> dict[str, Any]:
            found = read_common(path)
            common(found)
            return found

        monkeypatch.setattr("fivefold.convert.megatron.read_foreign_index", read_index)
        for module in ("megatron", "megatron_training"):
            monkeypatch.setattr(f"fivefold.convert.{module}.read_common", read)
        return settings(name).with_values(load=str(FOLDER / name))

    return copy


def _without(part: str) -> Callable[[dict[str, SavedTensor]], None]:
    def change(index: dict[str, SavedTensor]) -> None:
        for name in [name for name in index if part in name]:
            del index[name]

    return change


def _retyped(part: str, dtype: torch.dtype) -> Callable[[dict[str, SavedTensor]], None]:
    def change(index: dict[str, SavedTensor]) -> None:
        index.update({n: replace(t, dtype=dtype) for n, t in index.items() if part in n})

    return change


def _renamed(index: dict[str, SavedTensor]) -> None:
    name = "decoder.final_layernorm.weight"
    index[f"optimizer.state.max_exp_avg_sq.{name}"] = index[name]


INDICES: dict[str, tuple[str, Callable[[dict[str, SavedTensor]], None], str]] = {
    "a key less": ("sharded", _without("exp_avg_sq.decoder.final"), "lacks a part.*exp_avg_sq of"),
    "a moment less": ("tied", _without("exp_avg_sq."), "no exp_avg_sq: its optimizer was not"),
    "masters less": ("narrow", _without("fp32_param"), "types.*master of .*: BF16"),
    "half masters": ("sharded", _retyped("state.param.", torch.int16), "types.*: torch.int16"),
    "8 bits": ("sharded", _retyped("exp_avg.output", torch.uint8), "types.*exp_avg of.*uint8"),
    "AMSGrad": ("tied", _renamed, "has max_exp_avg_sq of its optimizer"),
}


@pytest.mark.parametrize("case", INDICES)
def test_other_state_is_refused_by_name(
    case: str, copied: Callable[..., Config], tmp_path: Path
) -> None:
    name, change, said = INDICES[case]
    with pytest.raises(CheckpointError, match=f"(?s){said}.*works: --finetune"):
        find_origin(copied(name, index=change), tmp_path)


def test_bytes_that_changed_are_an_error_or_without_effect(tmp_path: Path) -> None:
    """Whatever became of the metadata, nothing but an error for people comes out."""
    random, path = Random(5), tmp_path / "copy" / f"iter_{STEP:07d}"
    shutil.copytree(checkpoint("tied"), path)
    whole_files = {path / name: (path / name).read_bytes() for name in (".metadata", "common.pt")}
    config = settings("tied").with_values(load=str(path))
    for _ in range(40):
        for other, bytes_of in whole_files.items():
            other.write_bytes(bytes_of)
        file, good = random.choice([*whole_files.items()])
        bad = bytearray(good)
        for _ in range(random.choice((1, 5))):
            bad[random.randrange(len(bad))] = random.randrange(256)
        file.write_bytes(bad)
        try:
            find_origin(config, tmp_path)
        except FivefoldError as error:
            assert str(error).strip()


def test_weights_alone_are_weights_alone(copied: Callable[..., Config], tmp_path: Path) -> None:
    config = copied("tied", _without("optimizer."), lambda common: common.pop("optimizer"))
    found = find_origin(config, tmp_path)
    assert found is not None and found.weights_only and "has weights alone" in found.note


def test_iterations_that_took_no_step_are_none(
    copied: Callable[..., Config], tmp_path: Path
) -> None:
    """In fp16 gradients overflow, and Adam's step and the learning rate stay behind."""
    later = {"iteration": STEP + 2}
    found = find_origin(copied("tied", common=lambda common: common.update(later)), tmp_path)
    assert found is not None and found.step == STEP
    assert "after 3 steps and 2 iterations that changed no weight" in found.note
    young = later | {"opt_param_scheduler": {"num_steps": (STEP + 2) * SAMPLES}}
    with pytest.raises(CheckpointError, match="its moments began later than its learning rate"):
        find_origin(copied("tied", common=lambda common: common.update(young)), tmp_path)


def test_a_loss_scale_goes_on(copied: Callable[..., Config]) -> None:
    """Overflows are counted upwards here, and downwards there."""
    scaler = {"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 1}

    def change(common: dict[str, Any]) -> None:
        common["optimizer"]["grad_scaler"] = scaler
        common["args"]["hysteresis"] = 3

    config = copied("tied", common=change)
    state = megatron_state(checkpoint("tied"), config.training)
    assert state.loss_scale == ScaleState(1024.0, 7, 2)
    assert state.step == STEP and state.loader["consumed_samples"] == STEP * SAMPLES


def test_a_translated_job_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own steps and samples follow, as do its rates."""
    recipe, folder = tmp_path / "job.toml", FOLDER / "sharded"
    assert main(["translate", str(folder), str(recipe)]) == 0
    told = capsys.readouterr().out
    assert f"fivefold train {recipe} --nproc 1 --load {folder}" in told
    saved = tmp_path / "run"
    words = ["train", str(recipe), "--load", str(folder), "--save", str(saved)]
    assert main([*words, "--train-iters", "5"]) == 0
    out = capsys.readouterr()
    assert "resumes" in out.out + out.err
    lines = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5]
    assert lines[0]["tokens_total"] == (STEP + 1) * SAMPLES * LENGTH
    config = settings("sharded").with_values(train_iters=5)
    assert lines[0]["lr"] == pytest.approx(rates(STEP, config.optimizer, config.training).lr)
