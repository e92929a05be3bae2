"""Exported settings, and the list of what an export leaves out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import Any

from fivefold.config.by_layer import IN_BF16
from fivefold.config.config import SETTINGS, Config
from fivefold.layout import Layout

OWN = frozenset(
    {
        "save",
        "save_interval",
        "keep_latest_k",
        "save_retain_interval",
        "async_save",
        "non_persistent_save_interval",
        "non_persistent_local_ckpt_dir",
        "replication_jump",
        "data_cache_path",
        "document_length",
        "log_interval",
        "tensorboard",
        "wandb_project",
        "profile",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "use_pytorch_profiler",
        "record_memory_history",
        "audit",
        "numa_binding",
        "watchdog_timeout_seconds",
        "pipeline_dx_first",
        "device_memory_limit",
        "cuda_graph_scope",
    }
)
"""Settings that have no meaning for another trainer: of the run folder, of logging, of how ranks
are started and watched, of what predictions go by, and of what is sent first, as others split a
backward only where the schedule does. And `cuda_graph_scope`, whose one value goes with
`cuda_graph_impl`."""


@dataclass(frozen=True)
class Export:
    """Settings for a trainer.

    Attributes:
        text: text of the settings file, or flags of the command line.
        missing: sentences about settings of the layout that the text does not contain.
    """

    text: str
    missing: tuple[str, ...]


class Settings:
    """The settings of a run by name; records which of them an export has read.

    Reading `settings["lr"]` means that the export handles this setting, in its text or in a
    sentence. A setting that no export handles yet is therefore reported as missing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._config.value(name)

    def values_of(self, *names: str) -> str:
        """Settings with their values: 'beta_fast = 32, beta_slow = 1'."""
        return ", ".join(f"{name} = {SETTINGS[name].words(self[name])}" for name in names)

    def mention(self, *names: str) -> None:
        """Mark settings as handled that the export expresses in another way."""
        self._read.update(names)

    def unread(self, where: str) -> Iterator[str]:
        """A sentence with all settings that are not defaults and have not been read."""
        found = _changed(self._config, [n for n in SETTINGS if n not in self._read | OWN])
        if found:
            yield f"{where}: {found}"


def described(config: Config) -> str:
    """The model's settings that are not defaults: 'num_layers = 32, hidden_size = ...', but for
    layers that keep bf16, which `formats` names."""
    names = [field.name for field in fields(config.model) if field.name not in IN_BF16]
    return _changed(config, names)


def _changed(config: Config, names: Iterable[str]) -> str:
    changed = [name for name in names if config.value(name) != SETTINGS[name].default]
    texts = (SETTINGS[name].to_toml(config.value(name)).strip('"') for name in changed)
    return ", ".join(f"{name} = {text}" for name, text in zip(changed, texts, strict=True))


def command_line(flags: Iterable[str]) -> str:
    """Flags as one shell command, with one flag per line."""
    return " \\\n".join(flags) + "\n"


def flag(name: str, *values: object) -> Iterator[str]:
    """The flag `--name value ...`, with values quoted for a shell if necessary."""
    yield " ".join([f"--{name}", *(quote(str(value)) for value in values)])


def set_flag(name: str, value: Any) -> Iterator[str]:
    """A flag in Megatron-LM's style; none for None, False and no values."""
    if value is None or value is False or value == ():
        return
    values = () if value is True else value if isinstance(value, tuple) else (value,)
    yield from flag(name.replace("_", "-"), *values)


def flags(said: Settings, *names: str) -> Iterator[str]:
    """Flags for the settings that the trainer has under the same names."""
    for name in names:
        yield from set_flag(name, said[name])


DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
"""What only scales of earlier steps have."""


def in_steps(layout: Layout) -> tuple[Layout, list[str]]:
    """The layout with durations in steps, all with the whole batch, and sentences on what this
    leaves out."""
    training, optimizer = layout.config.training, layout.config.optimizer
    if training.train_samples is None:
        return layout, []
    steps = training.batch_sizes.steps
    end, last = optimizer.lr_decay_samples, optimizer.lr_wsd_decay_samples
    counted = {
        "train": training.num_steps,
        "lr_warmup": steps(optimizer.lr_warmup_samples),
        "lr_decay": end and max(steps(end), 1),
        "lr_wsd_decay": last and max(last // training.global_batch_size, 1),
    }
    lost = ["its first steps are whole batches, too (rampup_batch_size)"]
    lost = lost if training.rampup_batch_size else []
    config = layout.config.with_batch()
    for what, count in counted.items():
        iters, samples = f"{what}_iters", f"{what}_samples"
        if asked := config.value(samples):
            lost.append(f"it counts no samples: {samples} = {asked} is {iters} = {count}")
        none = SETTINGS[samples].default
        config = config.with_values(**{iters: count, samples: none})
    return replace(layout, config=config), lost


def formats(said: Settings) -> str:
    """Settings of the bits in which linear layers multiply, and of 8-bit scales."""
    late = DELAYED if said["fp8_format"] and said["fp8_recipe"] == "delayed" else ()
    return said.values_of("fp8_format", "fp8_recipe", *late, "fp4_format", *in_bf16(said))


def in_bf16(said: Settings) -> tuple[str, ...]:
    """Settings of layers that stay in bf16, if there are any."""
    return IN_BF16 if said["first_last_layers_bf16"] else ()


def state_types(said: Settings) -> str:
    """The requested types of masters, gradients and moments."""
    return said.values_of(
        *("main_params_dtype", "store_param_remainders"),
        *("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    )


def lost_types(said: Settings) -> Iterator[str]:
    """Requested types of masters, gradients and moments that a trainer without such settings
    lacks."""
    if said["use_precision_aware_optimizer"]:
        kinds = f"use_precision_aware_optimizer, {state_types(said)}"
        yield f"its gradients and moments have the type of its masters ({kinds})"
