"""A file of Accelerate's launcher as settings: nothing in it is read and ignored."""

from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.accelerate_job.file import (
    NAMES,
    SECTIONS,
    is_text_of_accelerate,
    read_file,
)
from fivefold.config.accelerate_job.settings import HARMLESS, translate
from fivefold.config.config import SETTINGS
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.sources import read_config
from fivefold.config.translation import Translation
from fivefold.errors import ConfigError

SHARDED: dict[str, Any] = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "num_machines": 2,
    "fsdp_config": {"fsdp_version": 2},
}
OLDER = SHARDED | {"fsdp_config": {}}
SPLIT = SHARDED | {
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_cp_size": 2,
    }
}
SP = {"parallelism_config_sp_size": 4, "parallelism_config_dp_shard_size": 2}
ULYSSES = SHARDED | {"parallelism_config": SP}
NARROW = SHARDED | {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}
NARROW_AO = SHARDED | {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
SPED: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "nvme"},
}
REPLICAS: dict[str, Any] = {"distributed_type": "MULTI_GPU", "num_processes": 2}
FILES = {
    name.lower(): file
    for name, file in globals().items()
    if isinstance(file, dict) and "distributed_type" in file
}


def of(file: dict[str, Any], ranks: int | None = None) -> Translation:
    return translate(read_file(yaml.safe_dump(file)), ranks)


def _with(file: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, _, name = path.rpartition(".")
    return file | ({section: file.get(section, {}) | {name: value}} if section else {name: value})


def _outcome(file: dict[str, Any]) -> Any:
    """What it is here, and what of it was named; of a file that is refused, why."""
    try:
        return of(file)
    except ConfigError as error:
        return str(error)


PATHS = [
    *(name for name in NAMES if not name.endswith("_config")),
    *(
        f"{section}.{prefix}{name}"
        for section, (prefix, names) in SECTIONS.items()
        for name in names.split()
    ),
]
VALUES = (True, False, 2, 3, "cpu", "FULL_SHARD", "no", "HYBRID", "inductor", "alltoall")


@pytest.mark.parametrize("name", FILES)
def test_each_setting_shows_in_what_it_becomes_or_what_is_said(name: str) -> None:
    """Whatever its value: in the recipe, among what is not carried over, without effect, or as a
    mistake; or the value is what the file means without it."""
    usual = _outcome(FILES[name])
    assert isinstance(usual, Translation), usual
    for path in PATHS:
        if path.startswith("deepspeed_config.deepspeed_config_file"):
            continue
        assert any(_outcome(_with(FILES[name], path, value)) != usual for value in VALUES), path


EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all is sharded": (SHARDED, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "gathered for both": (
        _with(SHARDED, "fsdp_config.fsdp_reshard_after_forward", False),
        {"data_parallel_sharding_strategy": "optim_grads", "grad_reduce_in_bf16": True},
    ),
    "within machines": (
        _with(OLDER, "fsdp_config.fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2"),
        {
            "data_parallel_sharding_strategy": "optim_grads",
            "num_distributed_optimizer_instances": 2,
        },
    ),
    "by number": (
        _with(OLDER, "fsdp_config.fsdp_sharding_strategy", 3),
        {"data_parallel_sharding_strategy": "no_shard"},
    ),
    "on the host, recomputed": (
        _with(
            _with(SHARDED, "fsdp_config.fsdp_offload_params", True),
            *("fsdp_config.fsdp_activation_checkpointing", True),
        ),
        {
            "optimizer_cpu_offload": True,
            "param_cpu_offload": True,
            "recompute_granularity": "full",
        },
    ),
    "inputs on the host": (
        SHARDED
        | {
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_activation_checkpointing": True,
                "fsdp_activation_checkpointing_offload": True,
            }
        },
        {"fine_grained_activation_offloading": True, "offload_tensors": ("layer_input",)},
    ),
    "context": (
        SPLIT,
        {
            "num_distributed_optimizer_instances": 2,
            "data_parallel_shard_size": 2,
            "context_parallel_size": 2,
            "cp_comm_type": ("all_gather",),
        },
    ),
    "heads": (ULYSSES, {"context_parallel_size": 4, "cp_comm_type": ("a2a",)}),
    "8 bits": (
        NARROW,
        {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024},
    ),
    "gathered in 8 bits": (
        _with(NARROW_AO, "fp8_config.fp8_enable_fsdp_float8_all_gather", True),
        {"fp8_recipe": "tensorwise", "fp8_param_gather": True},
    ),
    "its own words of DeepSpeed": (
        _with(SPED, "deepspeed_config.offload_optimizer_device", "cpu"),
        {"data_parallel_sharding_strategy": "optim_grads_params", "optimizer_cpu_offload": True},
    ),
    "replicas": (
        REPLICAS | {"mixed_precision": "bf16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        {"data_parallel_sharding_strategy": "no_shard", "compile": True},
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_a_file_becomes_a_recipe_that_trains(case: str) -> None:
    file, expected = EXPECTED[case]
    found = of(file)
    batch = {"global_batch_size": 16, "micro_batch_size": 1, "seq_length": 64}
    config = read_config(model="debug-llama", **batch, **found.values)
    config, _ = without_orphans(config, (), deciding=SETTINGS)
    assert check(config, found.ranks or 1).grid.world_size == file["num_processes"]
    assert {name: config.value(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (SHARDED | {"distributed_type": "XLA"}, "a job of TPUs"),
        (SHARDED | {"distributed_type": "FSDPP"}, "did you mean 'FSDP'"),
        (SHARDED | {"compute_environment": "AMAZON_SAGEMAKER"}, "only jobs of own machines"),
        (SHARDED | {"num_proceses": 8}, "no num_proceses, did you mean 'num_processes'"),
        (_with(SHARDED, "fsdp_config.fsdp_offload", True), "knows no fsdp_offload in fsdp_config"),
        (SHARDED | {"mixed_precision": "bf8"}, "mixed_precision cannot be 'bf8'"),
        (SPLIT | {"num_processes": 6}, "dp_replicate 2 x dp_shard 2 x tp 1 x cp 2 x sp 1 = 8"),
        (_with(SHARDED, "fsdp_config.reshard_after_forward", "FULL_SHARD"), "with version 2"),
        (_with(REPLICAS, "parallelism_config.parallelism_config_tp_size", 2), "jobs of FSDP"),
        (_with(SHARDED, "parallelism_config.tp_size", 2), "mean 'parallelism_config_tp_size'"),
        (
            SHARDED | {"fsdp_config": {"fsdp_version": 2, "version": 2}},
            "has version with and without fsdp_",
        ),
        (SHARDED | {"fsdp_config": 3}, "it must be a section with settings"),
    ],
)
def test_what_is_none_of_its_jobs_is_refused_by_name(file: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(file)
    assert part in str(caught.value)


def test_texts_are_told_apart_and_damage_is_told() -> None:
    assert is_text_of_accelerate('{"compute_environment": "LOCAL_MACHINE"}')
    assert not is_text_of_accelerate('{"zero_optimization": {"stage": 2}}')
    text, random = yaml.safe_dump(SPLIT), Random(3)
    with pytest.raises(ConfigError, match="num_machines is given twice"):
        read_file(text + "num_machines: 3\n")
    for _ in range(300):
        at = random.randrange(len(text))
        damaged = text[:at] + random.choice("{:[x\n\t-'&*!\0") + text[at + random.randrange(4) :]
        try:
            translate(read_file(damaged))
        except ConfigError as error:
            assert len(str(error)) < 1000


def test_a_file_of_deepspeed_is_read_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}, "train_batch_size": 16}'
    )
    file = SPED | {"mixed_precision": "bf16"}
    file |= {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(file))
    assert main(["translate", str(tmp_path / "job.yaml"), "--model", "debug-llama"]) == 0
    out = capsys.readouterr().out
    assert 'strategy = "optim"' in out and "global_batch_size = 16" in out
    assert "A job of Accelerate" in out and "precision" not in out  # bf16, as debug-llama's is
    assert main(["translate", str(tmp_path / "job.yaml")]) == 2
    assert "a file of Accelerate does not say which model" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_its_own_names_are_all_known() -> None:
    """Those of the release that is installed, of files and of the launcher's flags."""
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    own = {field.name for field in fields(arguments.ClusterConfig)}
    assert own <= {*NAMES}
    flags = set(vars(launch.launch_command_parser().parse_args(["x.py"])))
    for prefix, names in SECTIONS.values():
        if prefix:
            theirs = {flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)}
            assert theirs <= {*names.split()}, prefix
    whole = {f"{s}.{name}" for s, (_, names) in SECTIONS.items() for name in names.split()}
    assert {*HARMLESS} <= {*whole, *NAMES}
