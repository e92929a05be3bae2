"""The trainers for which settings can be exported: Fivefold, Megatron-LM, torchtitan, DeepSpeed.

`Export.missing` names everything for which a trainer has no setting.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fivefold.check import check
from fivefold.config.sources import to_toml
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.tell.export.deepspeed import deepspeed
from fivefold.tell.export.megatron import megatron
from fivefold.tell.export.settings import Export
from fivefold.tell.export.torchtitan import torchtitan


def export(layout: Layout, target: str) -> Export:
    """The settings of `layout` for one of `TARGETS`."""
    return TARGETS[target](layout)


def _fivefold(layout: Layout) -> Export:
    text = to_toml(layout.config, changes_only=True)
    try:
        check(layout.config, layout.grid.world_size)
    except ConfigError as error:
        return Export(text, tuple(mistake.what for mistake in error.mistakes))
    return Export(text, ())


TARGETS: Mapping[str, Callable[[Layout], Export]] = MappingProxyType(
    {
        "fivefold": _fivefold,
        "megatron": megatron,
        "torchtitan": torchtitan,
        "deepspeed": deepspeed,
    }
)
"""The export function of each trainer."""
