"""A request to the planner: a model, a batch, a cluster, and the settings that must not change."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from fivefold.check import check
from fivefold.config.config import SETTINGS, Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.rules.dependence import check_dependents
from fivefold.config.rules.graph import check_step_graph
from fivefold.config.rules.memory import check_memory
from fivefold.config.training import ELEMENT_BYTES
from fivefold.data_parallel.rules import check_contradictions
from fivefold.errors import Mistakes
from fivefold.layout import Layout
from fivefold.mesh.degrees import DEGREES
from fivefold.predict.cluster import MAX_GPUS, Cluster

ASSUMED_TOKENS = (1 << 22, 1 << 13, 1 << 24)
"""Tokens of a step unless the batch is given: at least, for each device, and at most.

4 Mi is usual for models of billions of parameters on some hundreds of devices, 16 Mi is the batch
of Llama 3 405B on 16,384 (Grattafiori et al. 2024).
"""
ASSUMED_LENGTH = 4096
ASSUMABLE = frozenset({"seq_length", "global_batch_size"})
"""Names of the settings that a plan assumes unless they are given, and that every run has."""
LAYOUT = frozenset(f.name for cls in (ParallelConfig, MemoryConfig) for f in fields(cls))
FIXABLE = LAYOUT | {"micro_batch_size"}
"""Names of the settings that a plan searches unless they are given."""
LARGEST = (1 << 31) - 1  # largest batch and sequence length: the table's columns are int32
Only = Mapping[str, frozenset[Any]]
"""The values among which a search may choose, by the name of the setting; others are free."""
_COUNTED = ("micro_batch_size", "global_batch_size", "seq_length")


@dataclass(frozen=True)
class Request:
    """A request to the planner.

    Attributes:
        config: the model, the batch, and the layout settings that were given.
        given: names of the layout settings that must stay as `config` has them.
        cluster: the hardware to plan for.
        assumes: names of the settings that were not given and that the planner assumed.
        only: the values to choose from for settings that were not given.
    """

    config: Config
    given: frozenset[str]
    cluster: Cluster
    assumes: frozenset[str] = frozenset()
    only: Only = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def world(self) -> int:
        """Number of devices; all of them take part."""
        return self.cluster.num_gpus

    @property
    def assumed(self) -> tuple[str, ...]:
        """Descriptions of the settings that the planner assumed, with their flags."""
        training = self.config.training
        batch, length = training.global_batch_size, training.seq_length
        words = {
            "seq_length": f"sequences of {length:,} tokens (--seq-length)",
            "global_batch_size": f"{batch:,} sequences a step, {batch * length:,} tokens "
            "(--global-batch-size)",
        }
        return tuple(text for name, text in words.items() if name in self.assumes)

    def fixed(self) -> dict[str, Any]:
        """The values of the given layout settings, by name."""
        return {name: self.config.value(name) for name in SETTINGS if name in self.given}

    def fixed_words(self) -> list[str]:
        """'name = value' for each given layout setting, with values as they are typed."""
        return [f"{name} = {SETTINGS[name].words(value)}" for name, value in self.fixed().items()]

    def but(self, num_gpus: int | None = None, **settings: Any) -> "Request":
        """The same request with other flags.

        Args:
            num_gpus: number of GPUs; None keeps it.
            settings: values of further flags, by field name.

        Raises:
            ConfigError: the settings are wrong for every layout.
        """
        cluster = replace(self.cluster, num_gpus=num_gpus or self.world)
        given = self.given | (settings.keys() & FIXABLE)
        changed = _request(
            self.config.with_values(**settings), given, cluster, self.assumes.difference(settings)
        )
        return changed.among(self.only)

    def among(self, only: Only) -> "Request":
        """The same request, with the allowed values of settings that were not given."""
        left = {
            name: values & self.only.get(name, values)
            for name, values in only.items()
            if name not in self.given
        }
        return replace(self, only=MappingProxyType({**self.only, **left}))

    def checked(self, config: Config) -> Layout:
        """The checked layout of a configuration on all of these devices.

        Raises:
            ConfigError: it is not legal.
        """
        return check(config, self.world, planned=True)

    def permits(self, settings: Mapping[str, Any]) -> bool:
        """Whether a search may choose these settings."""
        return permits(self.only, settings)

    def without(self, names: Iterable[str]) -> "Request":
        """The same request with these layout settings left to the search."""
        usual = {name: SETTINGS[name].default for name in names}
        return replace(
            self, config=self.config.with_values(**usual), given=self.given - usual.keys()
        )


def permits(only: Only, settings: Mapping[str, Any]) -> bool:
    """Whether these settings are among the values to choose from."""
    return all(name not in only or value in only[name] for name, value in settings.items())


def request(
    config: Config,
    cluster: Cluster,
    *,
    by_flag: Iterable[str] = (),
    by_recipe: Iterable[str] = (),
) -> Request:
    """The request that a configuration makes.

    Layout settings given by flags are kept. Those of a recipe are ignored, because the layout is
    what the search is for. Batch size and sequence length count wherever they were given. A degree
    of -1 means inferred, and is left to the search.

    Args:
        config: configuration with everything that was given.
        cluster: the hardware to plan for.
        by_flag: names of the settings that were given by flags.
        by_recipe: names of the settings that were given by a recipe.

    Raises:
        ConfigError: some settings are wrong for every layout.
    """
    flags, recipe = frozenset(by_flag), frozenset(by_recipe)
    inferred = {n for n in DEGREES.values() if getattr(config.parallel, n) == -1}
    given = (flags & FIXABLE) - inferred
    layout = {name: config.value(name) for name in given}
    asked = replace(config, parallel=ParallelConfig(), memory=MemoryConfig()).with_values(**layout)
    return _request(asked, given, cluster, ASSUMABLE - flags - recipe)


def _request(
    config: Config, given: frozenset[str], cluster: Cluster, assumes: frozenset[str]
) -> Request:
    """The request with assumed settings filled in; raises if its settings are wrong."""
    if "seq_length" in assumes:
        length = min(ASSUMED_LENGTH, config.model.max_position_embeddings)
        config = config.with_values(seq_length=length)
    if "global_batch_size" in assumes:
        batch = _batch(config.training.seq_length, cluster.num_gpus)
        config = config.with_values(global_batch_size=batch)
    asked = Request(config, given, cluster, assumes)
    mistakes = Mistakes()
    _check_sizes(asked, mistakes)
    _check_units(config, cluster, mistakes)
    check_memory(config.memory, config.model, mistakes)
    check_dependents(config, mistakes, planned=True)
    check_contradictions(config, mistakes)
    check_step_graph(config, config.parallel, mistakes)
    mistakes.raise_if_any()
    return asked


def _check_sizes(asked: Request, mistakes: Mistakes) -> None:
    if asked.world > MAX_GPUS:
        mistakes.add(f"{asked.world:,} GPUs are more than the {MAX_GPUS:,} that can be planned for")
    for name in _COUNTED:
        size = getattr(asked.config.training, name)
        if size > LARGEST:
            mistakes.add(f"{name} must be at most {LARGEST:,} to be planned with, not {size:,}")
    for name, value in asked.fixed().items():
        if name in DEGREES.values() and value < 1:
            mistakes.add(f"{name} must be at least 1, not {value}")


def _check_units(config: Config, cluster: Cluster, mistakes: Mistakes) -> None:
    """Check that the device can multiply in the given precision, at a known rate."""
    training, gpu = config.training, cluster.gpu
    narrow = {"fp8": training.fp8_format, "fp4": training.fp4_format}
    asked = {name: f"--{name}-format {kind}" for name, kind in narrow.items() if kind}
    if len(asked) > 1:
        what = f"{' and '.join(asked.values())} both say how to multiply"
        mistakes.add(what, works=[f"--{name}-format none" for name in asked])
    for precision, flag in (*asked.items(), (training.precision, "--precision")):
        back = [f"--{precision}-format none"] if precision in asked else []
        if not gpu.multiplies_in(precision):
            wide = [f"{flag} {name}" for name in ELEMENT_BYTES if gpu.multiplies_in(name)]
            mistakes.add(
                f"{gpu.name} has no units that multiply in {precision}, or their rate is not known",
                f"{flag} needs gpu.peak.{precision} and gpu.matmul.{precision}, which a cluster's "
                "file can state",
                works=back or wide,
            )
        elif back and training.precision != "bf16":
            mistakes.add(
                f"{flag} multiplies on top of bf16, and precision is {training.precision}",
                works=("--precision bf16", *back),
            )


def _batch(length: int, devices: int) -> int:
    """The assumed batch size, a multiple of the device count if it is not below.

    Very many devices get one sequence for every eight of them, as in the largest published runs.
    """
    least, each, most = ASSUMED_TOKENS
    tokens = min(max(least, each * devices), most)
    sequences = max(tokens // length, devices // 8, 1)
    if sequences >= devices:
        return sequences // devices * devices
    return sequences
