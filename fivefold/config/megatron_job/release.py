"""The arguments that a release of Megatron-LM has."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """One way to give an argument, as Megatron-LM's parser defines it."""

    name: str
    flags: tuple[str, ...]
    action: str
    nargs: str | int | None
    kind: str | None
    default: Any

    @property
    def is_valued(self) -> bool:
        """Whether values follow it."""
        return self.action == "Store"

    def can_be(self, value: Any) -> bool:
        """Whether a value is of its type, which values in other trainers' logs and checkpoints may
        not be."""
        if self.action != "Store":
            return value is None or isinstance(value, bool)
        if self.nargs is not None and isinstance(value, list):
            return all(map(self._replace(nargs=None).can_be, value))
        if value is None or self.kind not in ("int", "float"):
            return value is not None or self.default != 1
        whole = isinstance(value, int) and not isinstance(value, bool)
        if self.kind == "float":
            return whole or isinstance(value, float)
        degree = self.default == 1 and not self.name.startswith("num_layers_at_")
        return whole and not (degree and value < 1)


@dataclass(frozen=True)
class Known:
    """The arguments of a release."""

    release: str
    arguments: tuple[Argument, ...]

    @cached_property
    def flags(self) -> Mapping[str, Argument]:
        """The argument of each flag."""
        return MappingProxyType({flag: a for a in self.arguments for flag in a.flags})

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The value of each argument if it is not given; if there are two ways to give it, the
        first counts."""
        return MappingProxyType({a.name: a.default for a in reversed(self.arguments)})


@cache
def known() -> Known:
    """The arguments that `benchmarks.megatron_arguments` has recorded."""
    read = json.loads(files(__package__).joinpath("arguments.json").read_text(encoding="utf-8"))
    return Known(
        read["release"],
        tuple(Argument(name, tuple(flags), *rest) for name, flags, *rest in read["arguments"]),
    )
