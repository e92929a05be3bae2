"""Reads the file that `accelerate config` writes and `accelerate launch --config_file` takes.

Facts of Accelerate 1.15.0, whose launcher has all of these as flags, too.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from fivefold.config.job_settings import JobSettings
from fivefold.errors import ConfigError, Mistake, did_you_mean, shown

_SIGN = re.compile(
    r"^[\s{,]*[\"']?(?:distributed_type|compute_environment)[\"']?\s*:", re.MULTILINE
)
SECTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fsdp_config": (
            "fsdp_",
            "activation_checkpointing activation_checkpointing_offload auto_wrap_policy "
            "backward_prefetch backward_prefetch_policy cpu_ram_efficient_loading forward_prefetch "
            "ignored_modules min_num_params offload_params reshard_after_forward "
            "sharding_strategy state_dict_type sync_module_states "
            "transformer_layer_cls_to_wrap use_orig_params version",
        ),
        "parallelism_config": (
            "parallelism_config_",
            "cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size "
            "sp_attn_implementation sp_backend sp_seq_length sp_seq_length_is_variable sp_size "
            "tp_size",
        ),
        "deepspeed_config": (
            "",
            "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile "
            "deepspeed_inclusion_filter deepspeed_moe_layer_cls_names "
            "deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping "
            "offload_optimizer_device offload_optimizer_nvme_path offload_param_device "
            "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage",
        ),
        "fp8_config": (
            "fp8_",
            "amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length backend "
            "enable_fsdp_float8_all_gather format interval margin opt_level optimization_level "
            "override_linear_precision pad_inner_dim use_autocast_during_eval",
        ),
        "dynamo_config": (
            "dynamo_",
            "backend mode use_dynamic use_fullgraph use_regional_compilation",
        ),
    }
)
"""Sections, the prefix that names in them may have (in `parallelism_config`: have), and the
names."""
_OPEN = "megatron_lm_config", "mpirun_config"
"""Sections of which nothing is carried over."""
_NAMES = """
    command_file commands compute_environment debug distributed_type downcast_bf16
    enable_cpu_affinity fp16 gpu_ids machine_rank main_process_ip main_process_port
    main_training_function mixed_precision num_machines num_processes rdzv_backend same_network
    tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone use_cpu dynamo_backend
"""
NAMES = (*_NAMES.split(), *SECTIONS, *_OPEN)
"""Everything that may stand in a file, sections too."""


def is_text_of_accelerate(text: str) -> bool:
    """Whether a text is a file of Accelerate's launcher, in YAML or in JSON."""
    return _SIGN.search(text) is not None


def read_file(text: str) -> JobSettings:
    """The settings of a file, by paths such as "fsdp_config.offload_params".

    Raises:
        ConfigError: it is neither YAML nor JSON, gives a setting twice, or has one that Accelerate
            does not know.
    """
    try:
        given = yaml.load(text, _NoDuplicates)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = "" if place is None else f"line {place.line + 1}: "
        what = getattr(error, "problem", None) or "it is no text"
        raise ConfigError(
            Mistake(f"not a configuration file of Accelerate: {where}{what}")
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Mistake(f"not a configuration file of Accelerate: {error}")) from None
    if not isinstance(given, dict):
        raise ConfigError(
            Mistake("not a configuration file of Accelerate: it holds no table of settings")
        )
    job = JobSettings({})
    job.given = dict(_known(given, job))
    return job


class _NoDuplicates(yaml.SafeLoader):
    """A loader that takes no setting twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _known(given: Mapping[Any, Any], job: JobSettings) -> Iterator[tuple[str, Any]]:
    """The settings without the prefixes of their sections; others are refused."""
    for name, value in given.items():
        if name in SECTIONS:
            yield name, dict(_of_section(name, value, job))
        elif name in _OPEN and isinstance(value, Mapping):
            yield name, dict(value)
        elif name in NAMES:
            yield name, value
        else:
            job.mistakes.add(f"Accelerate knows no {name}{did_you_mean(str(name), NAMES)}")


def _of_section(section: str, value: Any, job: JobSettings) -> Iterator[tuple[str, Any]]:
    prefix, names = SECTIONS[section]
    if value is not None and not isinstance(value, Mapping):
        job.mistakes.add(f"{section} cannot be {shown(value)}: it must be a section with settings")
        return
    seen = set[str]()
    for name, inner in (value or {}).items():
        short = str(name).removeprefix(prefix)
        whole = (
            section != "parallelism_config" or str(name) != short
        )  # its launcher adds none there
        if short not in names.split() or not whole:
            near = did_you_mean(f"{prefix}{short}", [f"{prefix}{each}" for each in names.split()])
            job.mistakes.add(f"Accelerate knows no {name} in {section}{near}")
        elif short in seen:
            job.mistakes.add(f"{section} has {short} with and without {prefix}")
        else:
            seen.add(short)
            yield short, inner
