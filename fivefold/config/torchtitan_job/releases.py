"""Settings that releases of torchtitan take, under the names of the newest TOML files."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

IN_TOML = "0.2.2"
"""The last release whose jobs are TOML files."""
IN_PYTHON = "0.3.0"
"""The release whose jobs are functions in Python, which are named on a command line."""
_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "float8.": "quantize.linear.float8.",
        "mx.": "quantize.linear.mx.",
        "quantize.dense.": "quantize.linear.",
        "quantize.float8.dense.": "quantize.linear.float8.",
        "quantize.mx.dense.": "quantize.linear.mx.",
        "quantize.moe.": "quantize.grouped_mm.",
        "quantize.float8.moe.": "quantize.grouped_mm.float8.",
        "quantize.mx.moe.": "quantize.grouped_mm.mx.",
        "scheduler.": "lr_scheduler.",
        "validator.dataloader.dataset": "validation.dataset",
        "validator.": "validation.",
        "profiler.": "profiling.",
        "dataloader.dataset": "training.dataset",
        "dataloader.": "training.dataloader.",
        "optimizer.param_groups.0.optimizer_kwargs.": "optimizer.",
        "optimizer.param_groups.0.": "optimizer.",
    }
)
"""Beginnings of names in other releases."""
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint.enable_checkpoint": "checkpoint.enable",
        "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
        "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
        "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
        "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
        "dump_folder": "job.dump_folder",
        "experimental.custom_args_module": "job.custom_config_module",
        "float8.enable_float8_linear": "model.enable_float8_linear",
        "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
        "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
        "hf_assets_path": "model.hf_assets_path",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "memory_estimation.enabled": "memory_estimation.enable",
        "model.tokenizer_path": "model.hf_assets_path",
        "optimizer.param_groups.0.optimizer_name": "optimizer.name",
        "training.batch_size": "training.local_batch_size",
        "training.compile": "compile.enable",
        "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
        "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
        "training.deterministic": "debug.deterministic",
        "training.enable_float8_linear": "model.enable_float8_linear",
        "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
        "training.seed": "debug.seed",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "validation.enabled": "validation.enable",
        **{
            f"{section}.{name}": f"parallelism.{name}"
            for section in ("training", "experimental")
            for name in (
                *("context_parallel_degree", "data_parallel_replicate_degree"),
                *("data_parallel_shard_degree", "enable_async_tensor_parallel"),
                *("expert_parallel_degree", "pipeline_parallel_degree"),
                *("pipeline_parallel_schedule", "pipeline_parallel_split_points"),
                "tensor_parallel_degree",
            )
        },
    }
)
"""Names that settings had before, or have since."""


class Configuration(NamedTuple):
    """A function of the registry that 0.3.0 has in the place of TOML files.

    Attributes:
        module: module of its model.
        flavour: its model's flavour.
        attention: class that computes its attention.
        dispatcher: class that sends tokens to experts; empty: there are none.
        linear: classes of its linear layers.
        predictions: number of its MTP modules.
        data: class that reads its data.
        values: settings that are not at their defaults.
    """

    module: str
    flavour: str
    attention: str
    dispatcher: str
    linear: tuple[str, ...]
    predictions: int
    data: str
    values: Mapping[str, Any]


class Releases(NamedTuple):
    """All releases.

    Attributes:
        settings: of each release the paths, as it spells them, with defaults.
        configurations: the registry of 0.3.0.
        parameters: of each release the number of parameters by module and flavour.
    """

    settings: Mapping[str, Mapping[str, Any]]
    configurations: Mapping[str, Configuration]
    parameters: Mapping[str, Mapping[str, int]]


@cache
def known() -> Releases:
    """What `benchmarks.torchtitan_settings` has written down."""
    read = json.loads(files(__package__).joinpath("releases.json").read_text(encoding="utf-8"))
    configurations = {
        name: Configuration(**{**each, "linear": tuple(each["linear"])})
        for name, each in read["configurations"].items()
    }
    return Releases(read["settings"], configurations, read["parameters"])


def renamed(path: str) -> str:
    """A setting under the name that the newest TOML files have for it."""
    if path in _RENAMED:
        return _RENAMED[path]
    begins = next((old for old in _SECTIONS if path.startswith(old)), "")
    return _SECTIONS.get(begins, "") + path.removeprefix(begins)


@cache
def defaults_of(release: str) -> Mapping[str, Any]:
    """What each setting of a release is where it is not given."""
    return MappingProxyType({renamed(n): v for n, v in known().settings[release].items()})


@cache
def all_settings() -> Mapping[str, Any]:
    """The settings of all releases, with the defaults of the newest that has them."""
    found: dict[str, Any] = {
        "hf_transformers.model": "",  # of an experiment
        "model.enable_float8_linear": False,  # before 0.1
        "optimizer.betas": [0.9, 0.95],
    }
    for each in known().configurations.values():  # whose classes have more settings
        found |= {renamed(path): value for path, value in each.values.items()}
    for release in known().settings:
        found |= defaults_of(release)
    return MappingProxyType(found)


def releases_of(paths: Iterable[str]) -> tuple[str, ...]:
    """The releases with TOML files that know the most of these settings, oldest first."""
    in_toml = [release for release in known().settings if release <= IN_TOML]
    given = set(paths)
    knows = {release: len(given & set(known().settings[release])) for release in in_toml}
    return tuple(release for release in in_toml if knows[release] == max(knows.values()))
