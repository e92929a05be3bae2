"""What is asked of the planner: a model, a batch, a cluster, and what may not be changed."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.plan.cluster import Cluster

ASSUMED_TOKENS = 1 << 22
"""Of a step, where nothing is said: 4 Mi, as pre-training runs of billions of parameters take."""
ASSUMED_LENGTH = 4096
LAYOUT = frozenset(f.name for cls in (ParallelConfig, MemoryConfig) for f in fields(cls))


@dataclass(frozen=True)
class Request:
    """A question for the planner.

    Attributes:
        config: the model and the batch; of the layout, what was given.
        given: names of layout settings that must stay as `config` has them.
        cluster: on what.
        assumed: what nobody said, in words.
    """

    config: Config
    given: frozenset[str]
    cluster: Cluster
    assumed: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Devices, all of which take part."""
        return self.cluster.num_gpus

    def fixed(self) -> dict[str, Any]:
        """The layout settings that were given, with their values."""
        return {
            setting.name: getattr(section, setting.name)
            for _, section in self.config.sections()
            for setting in fields(section)
            if setting.name in self.given
        }


def request(
    config: Config,
    cluster: Cluster,
    *,
    by_flag: Iterable[str] = (),
    by_recipe: Iterable[str] = (),
) -> Request:
    """The question that a configuration asks.

    Flags that lay out the work are kept; a recipe's are not, since its layout is what is being
    looked for. Batch and length count wherever they were given.

    Args:
        config: with everything that was given.
        cluster: on what to plan.
        by_flag: names of the settings that flags gave.
        by_recipe: names of those that a recipe gave.
    """
    flags, recipe = frozenset(by_flag), frozenset(by_recipe)
    asked = Config(
        config.model,
        training=config.training,
        data=config.data,
        optimizer=config.optimizer,
        checkpoint=config.checkpoint,
        logging=config.logging,
    )
    given = flags & (LAYOUT | {"micro_batch_size"})
    layout = {
        name: value
        for section in (config.parallel, config.memory)
        for name, value in vars(section).items()
        if name in flags
    }
    asked = asked.with_values(**layout)
    assumed = []
    if "seq_length" not in flags | recipe:
        length = min(ASSUMED_LENGTH, config.model.max_position_embeddings)
        asked = asked.with_values(seq_length=length)
        assumed.append(f"sequences of {length:,} tokens (--seq-length)")
    if "global_batch_size" not in flags | recipe:
        batch = _batch(asked.training.seq_length, cluster.num_gpus)
        asked = asked.with_values(global_batch_size=batch)
        tokens = batch * asked.training.seq_length
        assumed.append(f"{batch:,} sequences a step, {tokens:,} tokens (--global-batch-size)")
    return Request(asked, given, cluster, tuple(assumed))


def _batch(length: int, devices: int) -> int:
    """Sequences of a step: some four million tokens, a whole number of sequences for each device.

    Many devices get one sequence for every eight of them, which is what the largest runs have.
    """
    sequences = max(ASSUMED_TOKENS // length, devices // 8)
    if sequences >= devices:
        return sequences // devices * devices
    return sequences
