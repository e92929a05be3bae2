"""A file of settings for DeepSpeed as settings: what is exported for it comes back, and nothing in
it is read and ignored."""

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import SETTINGS, Config
from fivefold.config.deepspeed_job.file import read_file
from fivefold.config.deepspeed_job.settings import translate
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.sources import read_config
from fivefold.config.translation import Translation
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.optim.schedule import learning_rate
from fivefold.tell.export.settings import in_steps
from fivefold.tell.export.targets import export
from tests.config.test_megatron_job import laid_out

COVERED = (
    *("tensor_model_parallel_size", "context_parallel_size", "data_parallel_sharding_strategy"),
    *("global_batch_size", "micro_batch_size", "precision", "clip_grad", "grad_reduce_in_bf16"),
    *("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "optimizer", "muon_momentum"),
    *("loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "param_cpu_offload"),
    *("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)
"""Settings that a file can say."""
USUAL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "sequence_parallel_size": 2,
    "data_parallel_size": 8,
    "tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True},
    "expert_parallel": {"autoep_size": 1},
    "pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "partition": "uniform"},
    "fp16": {"enabled": True, "initial_scale_power": 12, "consecutive_hysteresis": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "gradient_allreduce_op": "mean",
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a", "ratio": 0.5},
        "offload_param": {"device": "cpu"},
        "mics_shard_size": 4,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True, "project": "mine"},
}
PLAIN: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 2, "cpu_offload": True, "overlap_comm": True},
    "optimizer": {"type": "Muon", "params": {"momentum": 0.9}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 100,
            "warmup_num_steps": 10,
            "warmup_max_lr": 1e-3,
            "last_batch_iteration": 0,
        },
    },
}
CONSTANT = PLAIN | {"fp16": {"enabled": True, "loss_scale": 512.0}, "bf16": {"enabled": False}}
CONSTANT |= {"zero_optimization": {"stage": 3, "cpu_offload_param": True}}


def of(file: dict[str, Any], ranks: int | None = None) -> Translation:
    return translate(read_file(json.dumps(file)), ranks)


def outcome(file: dict[str, Any]) -> tuple[Any, ...]:
    """What it is here, and what of it was named; nothing of a file that is refused."""
    try:
        found = of(file)
        read_config(model="debug-llama", **found.values)
    except ConfigError:
        return ()
    return found.values, found.lost, found.harmless, found.ranks


def differing(layout: Layout) -> list[str]:
    """What of a layout does not come back, besides what its export named."""
    found, ours = export(layout, "deepspeed"), in_steps(layout)[0].config
    named, back = " ".join(found.missing), of(json.loads(found.text), layout.grid.world_size)
    theirs = read_config(model="debug-llama", **back.values)
    if ours.memory.offload_optimizer_states:  # which its optimizer updates on the host
        ours = ours.with_values(offload_optimizer_states=False, optimizer_cpu_offload=True)
    idle = {"overlap_grad_reduce": "no_shard", "overlap_param_gather": "no_shard optim optim_grads"}
    strategy = ours.parallel.data_parallel_sharding_strategy
    return [
        f"{name} is {ours.value(name)!r}, and was made {theirs.value(name)!r}"
        for name in COVERED
        if name not in named and strategy not in idle.get(name, "").split()
        if ours.value(name) != theirs.value(name)
    ] + ([] if "lr_" in named else unlike_rates(ours, theirs))


def unlike_rates(ours: Config, theirs: Config) -> list[str]:
    last = ours.optimizer.lr_decay_iters or ours.training.train_iters
    steps = sorted({*range(12), *range(0, last + 2, max(1, last // 50)), last - 1, last})
    pairs = [
        (
            learning_rate(n, ours.optimizer, ours.training),
            learning_rate(n, theirs.optimizer, theirs.training),
        )
        for n in steps
    ]
    return [
        f"step {n} has a rate of {one}, and was made {other}"
        for n, (one, other) in zip(steps, pairs, strict=True)
        if abs(one - other) > 1e-9 * abs(one) + 1e-18
    ]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 6))]
)
def test_what_was_exported_comes_back(part: int) -> None:
    for name, layout in laid_out(part, 6):
        assert not differing(layout), name


def test_a_value_that_is_lost_on_the_way_shows() -> None:
    _, layout = next(laid_out(0, 6))
    file = json.loads(export(layout, "deepspeed").text)
    changed = file | {"gradient_clipping": 7.0, "scheduler": {"type": "WarmupLR"}}
    back = read_config(model="debug-llama", **of(changed).values)
    assert back.optimizer.clip_grad == 7.0 and unlike_rates(layout.config, back)


def with_value(file: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    if not rest:
        return file | {name: value}
    within = file.get(name)
    return file | {name: with_value(within if isinstance(within, dict) else {}, rest, value)}


def read_paths(file: dict[str, Any]) -> set[str]:
    job = read_file(json.dumps(file))
    translate(job)
    return job._read


FILES = (USUAL, PLAIN, CONSTANT)
PATHS = sorted({path for file in FILES for path in read_paths(file)})


def test_no_setting_is_read_and_ignored() -> None:
    """Each that is asked for changes what is made of some file, is named, or is refused."""
    assert len(PATHS) > 60
    values = (True, False, 3, 0.25, "nvme", "other", [0.8, 0.9])
    ignored = [
        path
        for path in PATHS
        if all(
            outcome(with_value(file, path, value)) == outcome(file)
            for file in FILES
            for value in values
        )
    ]
    assert not ignored


@pytest.mark.parametrize("file", FILES)
def test_files_of_all_kinds_are_translated(file: dict[str, Any]) -> None:
    assert outcome(file)


def test_what_the_trainer_fills_in_is_told() -> None:
    """A file as documentation of transformers shows it."""
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    }
    found = of(file)
    told = [line for line in found.lost if "left open" in line]
    assert len(told) == 7 and "lr" not in found.values and "clip_grad" not in found.values
    steps = {"gradient_accumulation_steps": 4}  # of which batch only the Trainer knows
    assert "gradient_accumulation_steps = 4" in " ".join(of(file | steps).lost)


extremes = st.sampled_from((float("nan"), float("inf"), 10**400, 1e300, 2000))
numbers = st.integers(-2, 9) | st.floats() | extremes | st.booleans() | st.none()
anything = st.recursive(
    numbers | st.text(max_size=5) | st.just("auto"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=50)
@given(data=st.data())
def test_any_file_is_translated_or_refused_by_name(data: st.DataObject) -> None:
    file: dict[str, Any] = data.draw(st.sampled_from(FILES))
    paths = st.sampled_from([*PATHS, "optimizer", "zero_optimization", "fp16"])
    for path in data.draw(st.lists(paths, max_size=3)):
        file = with_value(file, path, data.draw(anything))
    try:
        found = of(file, data.draw(st.none() | st.integers(1, 64)))
    except ConfigError as error:
        assert str(error)
    else:
        assert set(found.values) and all(found.lost)


def test_what_is_sharded_and_moved_in_any_way_is_trained_or_told() -> None:
    """DeepSpeed ignores some of it, and some goes together there and not here."""
    devices, formats = ("none", "cpu", "nvme"), ("bf16", "fp16", "other")
    drawn = [*product(range(4), devices, devices, formats, (1, 2), ("AdamW", "Muon"))]
    for stage, states, weights, precision, part, optimizer in Random(0).sample(drawn, 100):
        sharded: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": {"device": states, "nvme_path": "/a", "ratio": 0.5},
            "offload_param": {"device": weights, "nvme_path": "/b"},
            "zero_hpz_partition_size": part,
            "zero_quantized_gradients": part == 2,
        }
        batch = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}
        file = batch | {"zero_optimization": sharded, precision: {"enabled": True}}
        found = of(file | {"optimizer": {"type": optimizer}, "gradient_accumulation_steps": 4})
        config = read_config(model="debug-llama", **found.values)
        trained, _ = without_orphans(config, (), deciding=SETTINGS)
        check(trained, 4)
        for what, device in (("optimizer", states), ("param", weights)):
            path = f"zero_optimization.offload_{what}.device = {device}"
            stays = any(line.startswith(path) for line in found.lost)
            assert stays + bool(found.values.get(f"{what}_cpu_offload")) == (device != "none")


@pytest.mark.parametrize("text", ["{", "{}x", '{"a": 1, "a": 2}', "[" * 100_000])
def test_what_is_no_file(text: str) -> None:
    with pytest.raises(ConfigError, match="not a configuration file of DeepSpeed"):
        read_file(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_train_epochs": 3, "bf16": true}', "num_train_epochs is an argument of the Trainer"),
        ('{"num-layers": 2, "zero_optimization": {"stage": 1}}', "num-layers is a setting of GPT-"),
        ('{"model_type": "llama", "num_hidden_layers": 2}', "model_type is of a model of Hugging"),
        ('{\n"train_batch_size": BATCH\n}', r'line 2 is no JSON\n *"train_batch_size": BATCH'),
    ],
)
def test_files_of_others_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_file(text)


@pytest.mark.parametrize("section", ["bf16", "fp16", "zero_optimization", "optimizer"])
def test_a_section_without_settings_is_a_mistake(section: str) -> None:
    with pytest.raises(ConfigError, match=f"^{section} cannot be True: it must be a section"):
        of({section: True})


def test_a_mistake_is_told_once_and_older_names_are_read() -> None:
    with pytest.raises(ConfigError) as refused:
        of({"zero_optimization": {"stage": [0, 1]}})
    assert str(refused.value).count("stage cannot be") == 1
    found = of({"bfloat16": {"enabled": True}, "_comment": "x"})
    assert found.values["precision"] == "bf16"
    assert not [line for line in found.lost if "bfloat16" in line or "comment" in line]


@pytest.mark.parametrize(
    ("text", "flag"),
    [("torchrun pretrain_gpt.py --num-layers 2", "--model"), ("{}", "--vocab-size")],
)
def test_flags_for_other_jobs_are_refused(
    text: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "job"
    source.write_text(text)
    assert main(["translate", str(source), flag, "7"]) == 2
    assert f"{flag} has no effect on a job of" in capsys.readouterr().err


def test_a_recipe_and_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "ds.json", tmp_path / "job.toml"
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    source.write_text(json.dumps(PLAIN | {"optimizer": adam, "amp": {"enabled": True}}))
    words = ["translate", str(source), str(target), "--nproc", "8"]
    assert main(words) == 2
    assert "does not say which model" in capsys.readouterr().err
    assert main([*words, "--model", "debug-llama"]) == 0
    said = capsys.readouterr().out
    assert "amp (enabled = True): no counterpart" in said and f"train {target} --nproc 8" in said
    assert "# A job of DeepSpeed" in target.read_text()
    assert read_config(target).training.global_batch_size == 64
    assert main(["train", str(target), "--nproc", "8", "--dry-run"]) == 0
