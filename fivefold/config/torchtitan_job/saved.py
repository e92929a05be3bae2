"""What torchtitan saves, and logs, of a job's settings as JSON."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fivefold.config.torchtitan_job.flavours import known_as, model_of
from fivefold.config.torchtitan_job.job import TitanJob, job_in_python, job_of
from fivefold.config.torchtitan_job.releases import IN_PYTHON, Configuration
from fivefold.errors import ConfigError, Mistake

LOGGED = re.compile(r"Running with (?:configs|args): (?=\{)")
_RANK = re.compile(r"^\[\w+\]:", re.MULTILINE)  # what torchrun puts before each line
_APART = ("model_spec", "override", "loss", "tokenizer")


def saved_settings(text: str) -> Mapping[str, Any] | None:
    """The settings of a file that torchtitan saved; None: it is no such file."""
    given = None
    if text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            given = json.loads(text)
    if not isinstance(given, dict):
        return None
    in_toml = all(isinstance(given.get(name), dict) for name in ("model", "parallelism"))
    return given if in_toml or isinstance(given.get("model_spec"), dict) else None


def job_of_log(text: str) -> TitanJob:
    """The job that a log tells, where it was started with `--job.print_config`.

    Raises:
        ConfigError: what the log tells is no JSON.
    """
    plain = _RANK.sub("", text)
    found = LOGGED.search(plain)
    assert found is not None, "the caller has looked for it"
    try:
        given, _ = json.JSONDecoder().raw_decode(plain[found.end() :])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the log's settings are no JSON: {error}") from None
    return job_of_saved(given)


def job_of_saved(given: Mapping[str, Any]) -> TitanJob:
    """The job whose settings were saved.

    Raises:
        ConfigError: its model is none that is known by name.
    """
    if not isinstance(spec := given.get("model_spec"), Mapping):
        return job_of(given, {})
    module, flavour = str(spec.get("name")), str(spec.get("flavor"))
    flat = dict(_flat({n: v for n, v in given.items() if n not in _APART}))
    flat.pop("optimizer.optimizer_factory_kwargs_by_name", None)
    kind = given.get("activation_checkpoint")
    if "memory_budget" in (kind or {}):
        mode = "memory_budget"
    elif kind is None:
        mode, _ = "none", flat.pop("activation_checkpoint", None)
    else:
        mode = "selective" if "force_recompute_mm_shapes_by_fqns" in kind else "full"
    flat["activation_checkpoint.mode"] = mode
    data = "HuggingFaceTextDataLoader"
    configuration = Configuration(module, flavour, "FlexAttention", "", ("Linear",), 0, data, {})
    job = job_in_python(configuration, flat, None)
    if wrong := _unlike(module, flavour, spec.get("model")):
        works = ("--model FOLDER, with its config.json",)
        raise ConfigError(Mistake(f"its model is not {module} {flavour}: {wrong}", works=works))
    note = (
        "its file does not say whether its model multiplies in 8 bits (--fp8-format), nor by whom "
        "tokens are sent to experts (--moe-token-dispatcher-type)"
    )
    return replace(job, notes=(note,))


def _unlike(module: str, flavour: str, model: Any) -> str:
    """What of a saved model is not that of its flavour; empty: all, as far as it is looked at."""
    if (name := known_as(module, flavour)) is None or not isinstance(model, Mapping):
        return ""
    its, layers = model_of(module, name, IN_PYTHON, 1), model.get("layers")
    found = {
        "hidden_size": model.get("dim"),
        "vocab_size": model.get("vocab_size"),
        "num_layers": len(layers) if isinstance(layers, list) else None,
    }
    return ", ".join(
        f"{size} = {value}, not {getattr(its, size)}"
        for size, value in found.items()
        if value != getattr(its, size)
    )


def _flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by path, those in lists of objects by their place."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        value = {str(place): each for place, each in enumerate(value)}
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{before}.{name}" if before else str(name))
    elif value != {}:
        yield before, value
