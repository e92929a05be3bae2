"""Jobs of LoongForge: what they say of their model in a file, and its own arguments.

Its command lines name the model by `--model-name`, a key of a table in its checkout, or by
`--config-file`. Either leads to a file whose fields are those of Megatron-LM's arguments, and count
more than those on the command line (`loongforge/train/validators.py`).
"""

import ast
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from fivefold.config.foreign import foreign
from fivefold.config.megatron_job.described import Described
from fivefold.config.megatron_job.release import Known, known
from fivefold.config.settings import name_of_flag
from fivefold.errors import ConfigError, Mistake, shown
from fivefold.files import read_text

_TABLE = Path("loongforge/utils/config_map.py")
_REGISTRY = "MODEL_CONFIG_REGISTRY"
_SAYS_MODEL = ("model_name", "config_file")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)")
_RESOLVED = re.compile(r"\$\{moe_freq:[\"']?(.*?)[\"']?\}$")
_PLAIN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{f"Qwen{release}Config": {} for release in ("", "2", "3")},
        "LLaMAConfig": {},
        "InternLMConfig": {},
        "DeepseekConfig": {},
        "GlmConfig": {},
        "MimoConfig": {},
        "MinimaxConfig": {},
        "Qwen3NextConfig": {
            "experimental_attention_variant": "gated_delta_net",
            "attention_output_gate": True,
            "moe_shared_expert_gate": True,
            "layernorm_zero_centered_gamma": True,
        },
    }
)
"""Classes of models of language -> what their code does besides what their fields say."""
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "apply_layernorm_1p": "layernorm_zero_centered_gamma",
        "fp8_param": "fp8_param_gather",
        "full_attention_interval": "linear_attention_freq",
        "norm_epsilon": "layernorm_epsilon",
        "num_moe_experts": "num_experts",
    }
)
"""Fields that are arguments of other names."""
_STRETCH = ("original_max_position_embeddings", "beta_fast", "beta_slow")
"""Of YaRN, which latent attention has there: fields, and some of them flags."""
_IDLE = (
    *("_target_", "defaults", "model_type", "convert_file", "word_embeddings_for_head"),
    *("max_sequence_length", "bias_activation_fusion", "peft_config", "rotary_emb_func"),
    "mtp_loss_scaling_factor_decay_ratio",  # of predictions after the first
)


def is_of_loongforge(launcher: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a command leaves its model to a file, as LoongForge's do."""
    names = {name_of_flag(word.partition("=")[0]) for word in words if word.startswith("--")}
    own = any("loongforge" in word.lower() for word in launcher[-1:])
    return not names.isdisjoint(_SAYS_MODEL) and (own or "num_layers" not in names)


def overrides(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command without those that change a field of its model's file."""
    found = {word: match for word in words if (match := _OVERRIDE.fullmatch(word))}
    fields = {match[1]: match[2] for match in found.values()}
    return [word for word in words if word not in found], fields


def describe(job: Described, changed: Mapping[str, str], program: str, folder: Path | None) -> None:
    """Add to the arguments of a job those that its model's file says.

    Args:
        job: its arguments.
        changed: fields that its command line changes.
        program: what it runs, from which its checkout is known if that is on this machine.
        folder: where its script lies, in a checkout perhaps; None: not known.

    Raises:
        ConfigError: the file is not there, or says no model of language.
    """
    roots = [*Path(program).parents[1:2], *((folder, *folder.parents) if folder else ())]
    roots = [root.resolve() for root in roots if (root / "configs" / "models").is_dir()]
    name, path = (job.take(each) for each in _SAYS_MODEL)
    file = _named(name, roots) if name is not None else _there(path or "", roots)
    fields = _fields(file) | {n: yaml.safe_load(text) for n, text in changed.items()}
    kind = str(fields.get("_target_")).rpartition(".")[2]
    if kind not in _PLAIN or any("." in name for name in changed):
        what = f"{file.name} describes no model of language that is known here"
        why = (f"its class is {kind}" if "_target_" in fields else "it is put together of parts",)
        raise ConfigError(Mistake(what, why, ("a script of one of its models of language",)))
    job.given |= _PLAIN[kind]
    if kind == "MinimaxConfig" and fields.get("qk_layernorm"):
        job.settings["qk_layernorm_type"] = "all_heads"
    _read_fields(job, fields, known(), file)
    _read_adapters(job, fields.get("peft_config"))


def _named(name: str, roots: Sequence[Path]) -> Path:
    """The file of a model's name, by the table of a checkout."""
    for root in (root for root in roots if (root / _TABLE).is_file()):
        table = _table(root / _TABLE)
        if name.lower() not in table:
            near = get_close_matches(name.lower(), table, n=6)
            raise ConfigError(Mistake(f"{root / _TABLE} has no model {name}", works=tuple(near)))
        entry = table[name.lower()]
        return _there(f"{entry['config_path']}/{entry['config_name']}.yaml", [root])
    raise _no_checkout(f"--model-name {name}")


def _table(path: Path) -> dict[str, dict[str, str]]:
    """The table that its source assigns, of which nothing is run."""
    for node in ast.walk(ast.parse(read_text(path, ConfigError))):
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == _REGISTRY for each in node.targets
        ):
            table: dict[str, dict[str, str]] = ast.literal_eval(node.value)
            return table
    raise ConfigError(f"{path} has no {_REGISTRY}")


def _there(path: str, roots: Sequence[Path]) -> Path:
    """A file where its path says, or at that place of a checkout."""
    inside = path[path.index("configs/") :] if "configs/" in path else path
    for found in (Path(path), *(root / inside for root in roots)):
        if found.is_file():
            return found
    if not roots:
        raise _no_checkout(f"--config-file {path}")
    raise ConfigError(Mistake(f"{path}, which describes the model, is not there"))


def _no_checkout(flag: str) -> ConfigError:
    what = f"{flag} names a file of LoongForge's checkout, which is not known"
    works = ("LOONGFORGE_PATH=... fivefold translate job.sh", "its script, where it lies")
    return ConfigError(Mistake(what, works=works))


def _fields(file: Path) -> dict[str, Any]:
    """The fields of a file, and those of the adapters that it names."""
    try:
        found = yaml.safe_load(read_text(file, ConfigError))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} describes no model")
    for entry in found.get("defaults") or ():
        where, name = next(iter(entry.items())) if isinstance(entry, dict) else (entry, "")
        folder, _, package = str(where).partition("@")
        if package == "peft_config":
            found[package] = _fields(file.parent / folder / f"{name}.yaml")
    return found


def _read_fields(job: Described, fields: Mapping[str, Any], release: Known, file: Path) -> None:
    kinds = {argument.name: argument for argument in release.arguments}
    if (turns := fields.get("rotary_emb_func", "RotaryEmbedding")) != "RotaryEmbedding":
        job.mistakes.add(f"rotary_emb_func = {turns} of {file.name}: no model here has that")
    for name, value in fields.items():
        target = _ALIASES.get(name, name)
        if isinstance(value, str) and (resolved := _RESOLVED.fullmatch(value.strip())):
            value = resolved[1]
        if name in ("vocab_size_in_config_file", "vocab_size"):
            job.vocabulary = value
        elif target in kinds and value is None:
            job.given.pop(target, None)
        elif target in kinds:
            number = {"int": int, "float": float}.get(str(kinds[target].kind))
            with_kind = number is not None and isinstance(value, str | int | float)
            try:
                job.given[target] = number(value) if number and with_kind else value
            except ValueError:
                job.mistakes.add(f"{name} of {file.name} cannot be {shown(value)}")
        elif name in _STRETCH:
            job.settings |= {name: value} if fields.get("multi_latent_attention") else {}
        elif name not in _IDLE and value is not None and not foreign(name).idle:
            job.mistakes.add(f"{name} = {shown(value)} of {file.name}: no model here has that")


def _read_adapters(job: Described, fields: Mapping[str, Any] | None) -> None:
    """Adapters are a part of the model's file, whose rank and scale its flags may change."""
    rank, alpha = job.number("lora_dim"), job.number("lora_alpha")
    if fields is not None:
        job.adapt(
            rank or fields.get("dim", 32),
            alpha or fields.get("alpha", 32),
            fields.get("target_modules") or ("linear_qkv", "linear_proj", "linear_fc1"),
            fields.get("dropout", 0.0),
        )


def own_arguments(job: Described) -> None:
    """What flags that only LoongForge has come to, among Megatron-LM's and settings here."""
    wide = job.take("use_fp32_dtype_for_param_pattern")
    if wide and not all("expert_bias" in each for each in wide.split()):
        job.notes.append(f"use_fp32_dtype_for_param_pattern = {wide}: weights are in one type here")
    if (tokens := job.number("vocab_size_in_config_file")) and job.vocabulary is None:
        job.vocabulary = int(tokens)
    for name in _STRETCH:
        if (value := job.number(name)) and job.given.get("multi_latent_attention"):
            job.settings[name] = value if name.startswith("beta") else int(value)
    _read_phase(job)
    _read_context(job)
    _read_recomputed(job, _read_stages(job))


def _read_phase(job: Described) -> None:
    """Conversations, each a row of its own or with others that it does not see."""
    if job.take("training_phase") != "sft":
        return
    job.given |= {"sft": True, "reset_position_ids": True, "reset_attention_mask": True}
    template = job.take("chat_template")
    job.notes.append(
        f"chat_template = {template}: conversations are put together by the template beside "
        "tokenizer_model here"
    )


def _read_context(job: Described) -> None:
    """Ulysses within groups of ranks, a ring between them."""
    inner = int(job.number("context_parallel_ulysses_degree") or 1)
    ranks = job.degree("context")
    if 1 < inner < ranks:
        sizes = [inner, ranks // inner]
        job.given |= {"cp_comm_type": ["a2a+p2p"], "hierarchical_context_parallel_sizes": sizes}
    elif inner > 1:
        job.given["cp_comm_type"] = ["a2a"]


def _read_stages(job: Described) -> list[int]:
    """Layers of each stage, which are a layout; empty: not said."""
    ranks = job.numbers("custom_pipeline_layers")
    chunks = job.given.get("num_virtual_stages_per_pipeline_rank") or 1
    # The later of a rank's chunks have the layers that are over.
    cut = [(n + chunk) // chunks for chunk in range(chunks) for n in ranks]
    layers = job.numbers("custom_virtual_pipeline_layers") or cut
    if not layers:
        return []
    stages, every = job.degree("pipeline_model") * chunks, job.given.get("num_layers")
    if len(layers) != stages or sum(layers) != every:
        job.mistakes.add(
            f"stages of {layers} layers: there are {stages} stages, and {every} layers in all"
        )
    if stages > 1:
        job.cut(layers)
        job.given.pop("num_virtual_stages_per_pipeline_rank", None)
    return layers


def _read_recomputed(job: Described, stages: Sequence[int]) -> None:
    """Layers that each rank's stages recompute, the first ones."""
    name = "custom_pipeline_recompute_layers"
    if not (numbers := job.numbers(name)):
        return
    ranks = job.degree("pipeline_model")
    held = [sum(stages[rank::ranks]) for rank in range(ranks)]
    if stages and numbers == held:
        job.given |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif len(stages) > ranks:
        job.mistakes.add(
            f"{name} {','.join(map(str, numbers))}: of which of the stages of a rank they are is "
            "not known here",
            works=[f"{','.join(map(str, held))}, all layers", "--recompute-num-layers N"],
        )
    else:
        job.given["recompute_method"] = "block"
        job.settings["recompute_num_layers"] = numbers
