"""A job on the way from the arguments of a relative of Megatron-LM to those of a release."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fivefold.config.settings import name_of_flag
from fivefold.errors import Mistakes, shown

_ADAPTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
        "linear_q_proj": ("q_proj",),
        "linear_q_down_proj": ("q_a_proj",),
        "linear_q_up_proj": ("q_b_proj",),
        "linear_kv_down_proj": ("kv_a_proj",),
        "linear_kv_up_proj": ("kv_b_proj",),
    }
)
"""Modules of Megatron-core that adapters are given to, by the linear layers that they are here."""


@dataclass
class Described:
    """What a job's arguments come to.

    Attributes:
        given: arguments of Megatron-LM's.
        unknown: flags with their values that are left.
        settings: settings here that no argument of Megatron-LM's says.
        notes: sentences about what has no counterpart.
        vocabulary: tokens of the tokenizer; None: not known.
        mistakes: what no model here has, or cannot be.
    """

    given: dict[str, Any]
    unknown: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    vocabulary: int | None = None
    mistakes: Mistakes = field(default_factory=Mistakes)

    def take(self, name: str) -> str | None:
        """The value of a flag that the release does not have, which then is read; of several the
        last."""
        split = [(name_of_flag(flag.split()[0]), flag) for flag in self.unknown]
        self.unknown = [flag for named, flag in split if named != name]
        given = [flag.partition(" ")[2].strip() for named, flag in split if named == name]
        return given[-1] if given else None

    def number(self, name: str) -> float | None:
        """The number after a flag that the release does not have."""
        if (text := self.take(name)) is None:
            return None
        try:
            return float(text)
        except ValueError:
            self.mistakes.add(f"{name} cannot be {shown(text)}: it is a number")
            return None

    def numbers(self, name: str) -> list[int]:
        """The whole numbers after a flag that the release does not have; empty: it is not given."""
        words = [word.strip() for word in (self.take(name) or "").split(",") if word.strip()]
        if all(word.isdecimal() for word in words):
            return [int(word) for word in words]
        text = ",".join(words)
        self.mistakes.add(f"{name} cannot be {shown(text)}: numbers with commas between")
        return []

    def degree(self, kind: str) -> int:
        """The ranks of an axis."""
        return int(self.given.get(f"{kind}_parallel_size") or 1)

    def cut(self, layers: Sequence[int]) -> None:
        """Lay out stages of so many layers, with MTP modules in the last."""
        further = "m" * int(self.given.get("mtp_num_layers") or 0)
        stages = "|".join("t" * n for n in layers)
        self.given["pipeline_model_parallel_layout"] = f"E{stages}{further}L"

    def adapt(self, rank: float, alpha: float, modules: Iterable[str], dropout: float = 0) -> None:
        """Give adapters to modules of Megatron-core."""
        modules = [*modules]
        if wild := [name for name in modules if name not in _ADAPTED]:
            self.mistakes.add(f"adapters of {' '.join(wild)}: no such linear layers are known here")
            return
        self.settings |= {"lora_rank": int(rank), "lora_alpha": alpha, "lora_dropout": dropout}
        linears = [name for module in modules for name in _ADAPTED[module]]
        self.settings["lora_target_modules"] = linears
        if {"linear_qkv", "linear_fc1"} & {*modules}:
            self.notes.append(
                "adapters of linear_qkv and linear_fc1 have one first matrix for the layers that "
                "are one there: here each has its own"
            )
