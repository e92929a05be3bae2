"""What a run of adapters starts from, and that it goes on in another layout as if undisturbed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.main import main
from fivefold.mesh.slices import local_tensor
from fivefold.model.lora import MAGNITUDE
from fivefold.optim.adamw import OPTIMIZER
from fivefold.train.engine import Engine
from fivefold.train.folder.new_adapters import measure_rows
from tests.pool import run
from tests.verify.cases import LLAMA, config, named, shared_groups

SPLIT = "--nproc 2 --tp 2 --sequence-parallel"
SHARDED = "--nproc 2 --data-parallel-sharding-strategy optim_grads_params"
COMMON = "--seq-length 16 --global-batch-size 2 --fp64 --lr 0.01 --lr-decay-style constant"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("adapters") / "base"
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=512, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    ).save_pretrained(folder)
    return folder


def train(base: Path, run: Path, *words: str, steps: int = 2) -> int:
    fixed = f"train debug --model {base} {COMMON} --train-iters {steps} --save {run}"
    return main([*fixed.split(), *" ".join(words).split()])


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the base without adapters, which is only read. New ones have its first loss: B is
    zero at first, and magnitudes are the lengths of rows."""
    run = tmp_path_factory.mktemp("plain") / "run"
    assert train(base, run, f"--load {base}") == 0
    return run


@pytest.mark.slow
def test_a_run_from_a_folder_goes_on_in_another_layout(
    base: Path, plain: Path, tmp_path: Path
) -> None:
    start = f"--load {base} --lora-rank 3 --use-dora"
    assert train(base, tmp_path / "one", start, SPLIT) == 0
    assert train(base, tmp_path / "two", start, SHARDED, steps=1) == 0
    assert train(base, tmp_path / "two", start, SPLIT) == 0
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-12)
    assert len(set(losses(tmp_path / "one"))) == 2
    assert losses(tmp_path / "one")[0] == pytest.approx(losses(plain)[0], rel=1e-12)


@pytest.mark.slow
def test_adapters_of_a_run_without_any_start_afresh(
    base: Path, plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = f"--load {plain} --lora-rank 3 --use-dora"
    assert train(base, tmp_path / "second", start) != 0
    assert "without adapters" in (said := capfd.readouterr().err) and "--finetune" in said
    assert train(base, tmp_path / "second", start, "--finetune", steps=1) == 0
    assert train(base, tmp_path / "third", f"--load {plain} --finetune", steps=1) == 0
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "third"), rel=1e-12)
    assert train(base, tmp_path / "third", "--lora-rank 3", steps=4) != 0
    assert "of a run without adapters" in capfd.readouterr().err
    assert train(base, tmp_path / "second", steps=4) != 0
    assert "lora_rank: was 3, is none" in capfd.readouterr().err


AWARE = {"use_precision_aware_optimizer": True}
MASTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "apart": (1, {}),
    "weights and remainders": (2, {**AWARE, "store_param_remainders": True}),
    "the weights": (1, {**AWARE, "main_params_dtype": "bf16"}),
    "sharded": (2, named(strategy="optim_grads_params")),
}


@shared_groups()
def _magnitudes(rank: int, world: int, masters: dict[str, Any], folder: Path) -> None:
    device, wide = torch.device("cpu"), torch.float32
    settings = config(LLAMA, world, precision="bf16", **masters)
    longer = settings.with_values(init_method_std=0.3)  # than those that adapters begin with
    checkpoints = Checkpointer(folder)
    checkpoints.save(0, Engine(check(longer, world), rank, device).written_tensors(), {})
    adapted = settings.with_values(lora_rank=2, use_dora=True)
    engine = Engine(check(adapted, world), rank, device, initialises=False)
    loaded = engine.weights_to_load(new_adapters=True)
    checkpoints.load(0, loaded, skip=(OPTIMIZER,))
    measure_rows(engine, checkpoints, checkpoints.filling(0), new=True)
    engine.after_load(0, loaded)
    weights = engine.optimizer.weights()
    measured = [name for name in weights if name.endswith(MAGNITUDE)]
    assert measured
    for name in measured:
        of = weights[f"{name.removesuffix(MAGNITUDE)}.weight"].local.to(wide)
        for found in (weights[name].local, local_tensor(engine.parameters[name])):
            torch.testing.assert_close(found.to(wide), of.norm(dim=1), rtol=2**-7, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("masters", MASTERS)
def test_new_magnitudes_are_lengths_however_masters_are_kept(masters: str, tmp_path: Path) -> None:
    world, settings = MASTERS[masters]
    run(world, _magnitudes, settings, tmp_path)


@pytest.mark.slow
def test_an_adapter_of_peft_goes_on_from_its_folder(
    base: Path, plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    chosen = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_dora": True}
    of = peft.LoraConfig(**chosen, init_lora_weights=False, task_type="CAUSAL_LM")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, of).save_pretrained(tmp_path / "adapter")
    start = f"--load {base} --load-adapter {tmp_path}/adapter"
    assert train(base, tmp_path / "one", start, SPLIT) == 0
    assert main(["convert", f"{tmp_path}/adapter", f"{tmp_path}/run"]) == 0
    settings = "--lora-rank 3 --lora-alpha 6 --lora-target-modules q_proj up_proj --use-dora"
    assert train(base, tmp_path / "two", f"--load {tmp_path}/run", settings, SHARDED) == 0
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-12)
    assert losses(tmp_path / "one")[0] != pytest.approx(losses(plain)[0], rel=1e-12)
    assert train(base, tmp_path / "three", start, "--lora-alpha 7") != 0
    assert "lora_alpha: is 7.0, there 6" in (said := capfd.readouterr().err)
    assert "works: --lora-alpha 6" in said
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.1}))
    assert train(base, tmp_path / "three", start, "--lora-dropout 0", steps=1) == 0
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one")[:1], rel=1e-12)
    assert train(base, tmp_path / "four", start, steps=1) == 0
    assert abs(losses(tmp_path / "four")[0] - losses(tmp_path / "one")[0]) > 1e-6
    assert "lora_dropout = 0.1" in (tmp_path / "four" / "config.toml").read_text()
