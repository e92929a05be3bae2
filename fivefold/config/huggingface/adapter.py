"""Reads the settings of an adapter that PEFT saved: adapter_config.json, and which layers it has.

As for a config.json, every field is understood, known to have no effect, or refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from fivefold.config.huggingface.reader import Reader
from fivefold.config.lora import LoraTarget
from fivefold.errors import CheckpointError, ConfigError, Mistake
from fivefold.files import read_json, tensor_names

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Of the names of all tensors that PEFT saves."""
_TARGETS = {name: name for name in get_args(LoraTarget)[1:]} | {
    "kv_a_proj_with_mqa": "kv_a_proj",
    "c_fc": "up_proj",  # of StarCoder2's and GPT-Neo's MLPs
    "c_proj": "down_proj",
    "fc1": "up_proj",  # of Phi-2's, OPT's and nanochat's
    "fc2": "down_proj",
    "fc_in": "up_proj",  # of GPT-J's
    "fc_out": "down_proj",
    "w1": "gate_proj",  # of LFM2
    "w3": "up_proj",
    "w2": "down_proj",
    "self_attn.out_proj": "o_proj",  # without what is before it, linear attention's
    "attn.out_proj": "o_proj",  # of GPT-J
    "attention.out_proj": "o_proj",  # of GPT-Neo
    "dense": "o_proj",  # of Phi-2
    "conv.out_proj": "out_proj",
}
"""Our name of a linear layer, by how that of transformers ends."""
_UNTOUCHED = True, False, None, "gaussian", "eva", "orthogonal"
"""Ways to initialise an adapter that leave the base model's weights as they are."""


@dataclass(frozen=True)
class PeftAdapter:
    """The description of an adapter, read from its folder.

    Attributes:
        folder: where it lies.
        settings: settings of ours that describe it, by name.
        base: the model that it is for, a folder or a hub name; None: not stated.
        targets: the linear layers that PEFT would look for: ends of names, or a pattern of whole
            names; None: PEFT knows them by the model's family.
        excluded: the targets that PEFT would leave out, in the same form.
        modules: the linear layers of which its file has tensors, by transformers' names.
    """

    folder: Path
    settings: Mapping[str, Any]
    base: str | None
    targets: str | tuple[str, ...] | None
    excluded: str | tuple[str, ...] | None
    modules: frozenset[str]

    def looks_for(self, module: str) -> bool:
        """Whether PEFT would give an adapter to a linear layer of this name."""
        if self.targets in (None, "all-linear"):
            return module in self.modules
        return _matches(self.targets, module) and not _matches(self.excluded, module)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / SETTINGS).is_file()


def read_adapter(folder: Path) -> PeftAdapter:
    """The settings of an adapter.

    Raises:
        ConfigError: a file cannot be read; or lists every field that has a wrong type, is not
            supported, or is not known, and layers that have no adapters here.
    """
    if not is_adapter(folder):
        why = "PEFT's save_pretrained writes one into the folder of an adapter"
        what = f"{folder} is no adapter of PEFT: it has no {SETTINGS}"
        raise ConfigError(Mistake(what, (why,)))
    reader = Reader(
        read_json(folder / SETTINGS, dict[str, Any], ConfigError), "this adapter", file=SETTINGS
    )
    rank, alpha = reader.size("r"), reader.number("lora_alpha", 8.0)
    if alpha <= 0:
        reader.mistakes.add(f"lora_alpha of this adapter must be positive, not {alpha:g}")
    settings: dict[str, Any] = {"lora_rank": rank, "lora_alpha": alpha}
    settings |= {name: reader.flag(name, False) for name in ("use_rslora", "use_dora")}
    settings["lora_dropout"] = dropout = reader.number("lora_dropout", 0.0)
    if not 0 <= dropout < 1:
        reader.mistakes.add(f"lora_dropout of this adapter must be in [0, 1), not {dropout:g}")
    base = reader.fields.get("base_model_name_or_path")
    targets, excluded = reader.patterns("target_modules"), reader.patterns("exclude_modules")
    _see_patterns(reader, rank, alpha)
    _refuse_others(reader)
    reader.refuse_unread()
    modules = _modules(folder, reader)
    settings["lora_target_modules"] = _our_targets(modules, reader)
    reader.mistakes.raise_if_any()
    return PeftAdapter(
        folder,
        settings,
        base if isinstance(base, str) else None,
        targets,
        excluded,
        frozenset(modules),
    )


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder of weights that holds an adapter of PEFT, even if its base lies beside it.

    Raises:
        CheckpointError: there is an adapter, or its adapter_config.json cannot be read.
    """
    if not is_adapter(folder):
        return
    fields = read_json(folder / SETTINGS, dict[str, Any], CheckpointError)
    kind, base = fields.get("peft_type"), fields.get("base_model_name_or_path")
    what = f"{folder} holds an adapter of PEFT ({kind}) to {base}, and no whole weights"
    of = quote(str(base)) if base and Path(str(base)).is_dir() else "BASE"
    adapter = quote(str(folder))
    raise CheckpointError(Mistake(what, works=(f"--load {of} --load-adapter {adapter}",)))


def _see_patterns(reader: Reader, rank: int, alpha: float) -> None:
    for name, value in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        table = reader.table(name)
        if table is not None and any(other != value for other in table.fields.values()):
            why = f"here all layers have the same: {value}"
            reader.unsupported(name, dict(table.fields), ({},), why)


def _refuse_others(reader: Reader) -> None:
    """Refuse fields that make it something other than a LoRA of linear layers; accept those without
    effect."""
    reader.fixed("peft_type", "LORA")
    reader.fixed("task_type", "CAUSAL_LM", None)
    reader.fixed("bias", "none")
    why = "others change the weights that it is for, or train a part of it"
    reader.fixed("init_lora_weights", *_UNTOUCHED, why=why)
    for name in ("modules_to_save", "target_parameters", "trainable_token_indices"):
        reader.fixed(name, None, [], {}, why="only linear layers have adapters, all else is frozen")
    for name in ("layers_to_transform", "layers_pattern", "layer_replication"):
        reader.fixed(name, None, [], why="every layer of the model has the same adapters")
    for name in ("velora_config", "monteclora_config", "kasa_config", "arrow_config"):
        reader.fixed(name, None, why="it is another adapter than LoRA")
    reader.fixed("use_bdlora", None)
    reader.fixed("alora_invocation_tokens", None, [])
    reader.fixed("megatron_config", None)
    reader.fixed("lora_bias", False)
    reader.fixed("use_qalora", False)
    reader.without_effect("fan_in_fan_out")  # of linear layers, which the families read here have
    reader.without_effect("auto_mapping", "peft_version", "base_model_name_or_path", "revision")
    reader.without_effect("inference_mode", "megatron_core", "ensure_weight_tying")
    # They configure what other fields, refused above, switch on, or the initial values of A.
    reader.without_effect("qalora_group_size", "loftq_config", "corda_config", "lora_ga_config")
    reader.without_effect("eva_config")


def _modules(folder: Path, reader: Reader) -> list[str]:
    """The linear layers for which the file has tensors."""
    if not (folder / ADAPTER).is_file():
        old = ", ".join(sorted(path.name for path in folder.glob("adapter_model.*"))[:3])
        attempt = f"PEFT's save_pretrained, which writes it from {old}" if old else None
        reader.mistakes.add(f"{folder} has no {ADAPTER}", attempt=attempt)
        return []
    found = []
    with reader.mistakes.collecting():
        for name in tensor_names(folder / ADAPTER, ConfigError):
            if name.startswith(PREFIX) and name.endswith(".lora_A.weight"):
                found.append(name.removeprefix(PREFIX).removesuffix(".lora_A.weight"))
        if not found:
            reader.mistakes.add(f"{folder / ADAPTER} has no adapter of a linear layer")
    return found


def _our_targets(modules: list[str], reader: Reader) -> tuple[str, ...]:
    ends = dict.fromkeys(map(end_of, modules))
    for end in [end for end in ends if end not in _TARGETS]:
        reader.mistakes.add(f"{end} of this adapter has no adapters here", works=tuple(_TARGETS))
    named = {_TARGETS[end] for end in ends if end in _TARGETS}
    return tuple(name for name in get_args(LoraTarget) if name in named)


def end_of(module: str) -> str:
    """The end of the name of one of transformers' linear layers, which tells layers apart."""
    *_, before, last = "", *module.split(".")
    whole = f"{before}.{last}"
    return whole if whole in _TARGETS else last


def _matches(wanted: str | tuple[str, ...] | None, module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted or ())
