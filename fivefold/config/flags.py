"""Parses command lines: every setting is a flag, and Megatron-LM's spellings are accepted."""

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fivefold.config.config import SETTINGS
from fivefold.config.data import MOCK
from fivefold.config.foreign import Foreign, foreign, name_of, without_entry, without_section
from fivefold.config.misspelt import MEANT
from fivefold.config.settings import NONE, Setting, flag_of
from fivefold.errors import Mistakes, closest, shown

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "dp_shard": "data_parallel_shard_size",
        "dp_replicate": "num_distributed_optimizer_instances",
        "vpp": "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
        "mbs": "micro_batch_size",
        "gbs": "global_batch_size",
        "layernorm_epsilon": "norm_epsilon",
        "muon_use_nesterov": "muon_nesterov",
        "apply_rope_fusion": "rope_fusion",
        "preset": "model",
        "from": "from_runs",
    }
)

IDLE_SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "group_query_attention": "needs --num-query-groups, which says it all",
        "moe_grouped_gemm": "needs --num-experts; experts always run grouped",
        "moe_permute_fusion": "needs --num-experts; rows are always fused",
        "calculate_per_token_loss": "nothing: the loss is always a mean over all valid tokens",
        "masked_softmax_fusion": "nothing: attention is fused as a whole where it can be",
        "no_masked_softmax_fusion": "nothing: attention is fused as a whole where it can be",
        "persist_layer_norm": "nothing: PyTorch's norms are one kernel",
        "no_persist_layer_norm": "nothing: PyTorch's norms are one kernel",
    }
)
"""Megatron-LM's switches that set nothing here, and what they mean; `sources` sees that what they
need is there."""
SWITCHES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        "fp32": {"precision": "fp32"},
        "fp64": {"precision": "fp64"},
        "mock_data": {"data_path": (MOCK,), "tokenizer_model": None},
        "use_distributed_optimizer": {"data_parallel_sharding_strategy": "optim"},
        "swiglu": {"activation_func": "silu", "gated_linear_unit": True},
        "squared_relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
        "disable_bias_linear": {"add_bias_linear": False},
        "use_rotary_position_embeddings": {"position_embedding_type": "rope"},
        **{name: {} for name in IDLE_SWITCHES},
    }
)
"""Megatron-LM's switches that say with one word what is a value here."""

_SWITCHED = re.compile(r"true|false|none|[\d.]+", re.IGNORECASE)  # values given to switches
_DASHES = "-\u2013\u2014"  # documents turn "--" into en or em dashes, which are then pasted


@dataclass
class Given:
    """The contents of a command line.

    Attributes:
        values: values of settings, by name.
        words: positional arguments.
        switches: names of the Megatron-LM switches that were used.
    """

    values: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)


def scan(
    argv: Sequence[str],
    settings: Iterable[Setting],
    mistakes: Mistakes,
    switches: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Given:
    """Parse a command line; if a flag is given twice, the last one counts.

    Flags are `--name value` or `--name=value`, with dashes or underscores; booleans are `--name`
    and `--no-name`; a tuple takes all words up to the next flag; after `--` nothing is a flag.
    """
    flags = {s.name: s for s in settings if not s.positional}
    return _Scanner(argv, flags, switches, mistakes).scan()


class _Scanner:
    def __init__(
        self,
        argv: Sequence[str],
        settings: Mapping[str, Setting],
        switches: Mapping[str, Mapping[str, Any]],
        mistakes: Mistakes,
    ) -> None:
        self._words = deque(argv)
        self._settings = settings
        self._mistakes = mistakes
        self._given = Given()
        self._spelled: dict[str, str] = {}  # setting -> the flag that set it
        self._switches = switches

    def scan(self) -> Given:
        while self._words:
            word = self._words.popleft()
            if word == "--":
                self._given.words += self._words
                break
            if _is_flag(word):
                self._flag(word)
            else:
                self._given.words.append(word)
        self._apply_switches()
        return self._given

    def _flag(self, word: str) -> None:
        flag, has_value, value = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        name = ALIASES.get(name, name)
        setting = self._settings.get(name)
        other = name.removeprefix("no_")
        negated = self._settings.get(ALIASES.get(other, other))
        if name in self._switches and not has_value:
            self._given.switches.append(name)
        elif setting is not None and setting.kind is bool and not has_value:
            self._switch(setting, flag, True)
        elif setting is not None:
            self._assign(setting, flag, [value] if has_value else self._take(setting))
        elif negated is not None and negated.kind is bool and not has_value:
            self._switch(negated, flag, False)
        else:
            self._unknown(flag, bool(has_value))

    def _switch(self, setting: Setting, flag: str, value: bool) -> None:
        following = self._words[0].lower() if self._words else ""
        if following in ("true", "false"):
            self._words.popleft()
            self._mistakes.add(
                f"{flag} stands alone, without {following!r}",
                works=(setting.flag, setting.typed(False)),
            )
        self._set(setting, flag, value)

    def _take(self, setting: Setting) -> list[str]:
        """The words that follow a flag: one, or as many as there are."""
        taken: list[str] = []
        while self._words and not _is_flag(self._words[0]) and (setting.many or not taken):
            taken.append(self._words.popleft())
        return taken

    def _assign(self, setting: Setting, flag: str, texts: list[str]) -> None:
        if not texts:
            self._mistakes.add(f"{flag} needs a value: {setting.expected}", setting.help)
            return
        if setting.default == () and texts == [NONE]:
            texts = []
        try:
            values = [setting.from_text(text) for text in texts]
        except (ValueError, KeyError):
            found = "" if any(map(setting.is_empty, texts)) else " ".join(texts)
            add_bad_value(flag, setting, found, self._mistakes)
            return
        self._set(setting, flag, tuple(values) if setting.many else values[0])

    def _set(self, setting: Setting, flag: str, value: Any) -> None:
        self._given.values[setting.name] = value
        self._spelled[setting.name] = flag

    def _apply_switches(self) -> None:
        """Apply the values that switches imply, unless another flag gives a different one."""
        for switch in self._given.switches:
            flag = flag_of(switch)
            for name, value in self._switches[switch].items():
                setting, before = self._settings[name], self._given.values.get(name, value)
                if before != value:
                    other = self._spelled[name]
                    self._mistakes.add(
                        f"{flag} contradicts {other}",
                        f"{flag} means {name} = {setting.words(value)}, and {other} means "
                        f"{name} = {setting.words(before)}",
                        works=(flag, setting.typed(before)),
                    )
                self._given.values[name] = value
                self._spelled.setdefault(name, flag)

    def _unknown(self, spelled: str, has_value: bool) -> None:
        name = spelled.lstrip(_DASHES).replace("-", "_")
        booleans = [s.name for s in self._settings.values() if s.kind is bool]
        alone = [*self._switches, *booleans, *(f"no_{name}" for name in booleans)]
        if has_value and name in alone:
            self._mistakes.add(f"{spelled} takes no value")
            return
        aliases = [alias for alias, of in ALIASES.items() if of in self._settings]
        known = list(dict.fromkeys([*self._settings, *alone, *aliases]))
        name = without_section(name, known)
        theirs = foreign(name, known)
        meant = [flag] if (flag := theirs.meant(known)) else []
        if theirs.flags and not meant:
            theirs = Foreign()  # the name belongs to another command
        note = theirs.note or ("" if meant or not self._switches else without_entry(spelled))
        if not meant and not note and not self._switches and ALIASES.get(name, name) in SETTINGS:
            note = "it is a setting of training: fivefold train takes it"
        if not meant and not note:
            close = closest(name, known)
            begun = [k for k in known if k.startswith(name)][:3]
            meant = list(map(flag_of, [close] if close else begun))
        suffix = f", did you mean {' or '.join(meant)}?" if meant else ""
        self._mistakes.add(f"unknown flag {spelled}{suffix}", *filter(None, [note]))
        if not has_value:
            self._skip_value(meant[0] if meant else "", alone)

    def _skip_value(self, meant: str, alone: Collection[str]) -> None:
        """Treat the word after an unknown flag, and numbers after it, as its values.

        Args:
            meant: flag that was meant, if it is known.
            alone: names of flags that take no value.
        """
        name = name_of(meant) if meant else ""
        switch = " " in meant or name in alone
        setting = self._settings.get(ALIASES.get(name, name))
        one = setting is None or not setting.many
        full = switch
        while self._words and not _is_flag(self._words[0]):
            if full and not _SWITCHED.fullmatch(self._words[0]):
                return
            self._words.popleft()
            full |= one


def _is_flag(word: str) -> bool:
    """Whether a word is a flag; negative numbers and a single dash are not."""
    return len(word) > 1 and word[0] in _DASHES and not word[1].isdigit() and word[1] != "."


def choice_meant(name: str, found: object, choices: Iterable[str]) -> str:
    """A suffix that suggests which choice of a setting was meant, ignoring case and dashes."""
    if not isinstance(found, str):
        return ""
    plain = found.lower().replace("-", "_")
    meant = MEANT.get(name, {}).get(plain)
    folded = {choice.lower(): choice for choice in choices}
    if meant is None and (close := closest(plain, folded)):
        meant = folded[close]
    return f", did you mean {meant!r}?" if meant else ""


def add_bad_value(place: str, setting: Setting, found: object, mistakes: Mistakes) -> None:
    """Add the mistake that `place` (a flag or a TOML key) has a value of the wrong kind."""
    value = str(found).lower() if isinstance(found, bool) else shown(found)
    if setting.choices:
        suggestion = choice_meant(setting.name, found, setting.choices)
        mistakes.add(f"{place} cannot be {value}{suggestion}", works=setting.choices)
    elif setting.is_too_large(found):
        mistakes.add(f"{place} must be below 2^64, not {value}")
    elif setting.is_empty(found):
        mistakes.add(f"{place} is empty")
    elif setting.kind is str and isinstance(found, str):
        mistakes.add(f"{place} must be text in UTF-8, not {value}")
    else:
        mistakes.add(f"{place} must be {setting.expected}, not {value}")
