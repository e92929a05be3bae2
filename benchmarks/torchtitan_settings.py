"""Write down what releases of torchtitan can be told, and what they take where they are not.

    git clone --branch v0.2.2 https://github.com/pytorch/torchtitan
    PYTHONPATH=torchtitan python -m benchmarks.torchtitan_settings 0.2.2

`fivefold translate` reads jobs by this file: each run adds the settings of one release with their
defaults, the parameters of its models, and, from 0.3.0 on, the values of the configurations that
its registry has in the place of TOML files.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fivefold.files import write_atomic

TARGET = Path(__file__).parents[1] / "fivefold" / "config" / "torchtitan_job" / "releases.json"
MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
APART = ("model_spec", "override", "loss", "tokenizer")
"""What of a configuration in Python is code, or belongs to its model."""


def flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by path, with values; lists that hold configurations by the place in them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, list) and any(map(is_dataclass, value)):
        value = {str(place): inner for place, inner in enumerate(value)}
    if callable(value):
        return  # code
    if not isinstance(value, Mapping):
        yield before, list(value) if isinstance(value, tuple) else value
        return
    for name, inner in value.items():
        if before or name not in APART:
            yield from flat(inner, f"{before}.{name}" if before else name)


def settings_of(config: Any) -> dict[str, Any]:
    """All settings of a configuration; its kind of recomputation is a class."""
    found = dict(flat(config))
    kind = getattr(config, "activation_checkpoint", None)
    if not hasattr(kind, "mode"):
        name = "none" if kind is None else type(kind).__qualname__.partition(".")[0]
        found["activation_checkpoint.mode"] = name.removesuffix("AC").lower()
    return found


def registered(defaults: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configurations in Python, as far as they differ from the defaults."""
    from torchtitan.components.quantization import float8, mx, nvfp4

    for quantised in (float8, mx, nvfp4):
        quantised.has_cuda_capability = lambda *_: True
    for module in MODELS:
        try:
            registry = import_module(f"torchtitan.models.{module}.config_registry")
        except ImportError:
            continue
        for name, make in vars(registry).items():
            if name.startswith("_") or getattr(make, "__module__", "") != registry.__name__:
                continue
            if make.__code__.co_argcount:
                continue
            try:
                config = make()
            except Exception as error:  # whatever it wants of this machine
                print(f"{name}: {error}")
                continue
            if hasattr(config, "model_spec"):
                its = settings_of(config)
                values = {n: v for n, v in its.items() if v != defaults.get(n, "none")}
                data = type(config.dataloader).__qualname__.partition(".")[0]
                of_model = _of_model(config.model_spec)
                yield name, {"module": module, **of_model, "data": data, "values": values}


def _of_model(spec: Any) -> dict[str, Any]:
    """What of a configuration's model is not in its flavour."""
    from torchtitan.models.common.linear import Linear

    layers = spec.model.layers
    attention = type(layers[-1].attention.inner_attention).__qualname__
    linear = {type(part).__qualname__ for _, part, *_ in spec.model.traverse(Linear.Config)}
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    sends = {type(d).__qualname__ for _, d, *_ in spec.model.traverse(LocalTokenDispatcher.Config)}
    return {
        "flavour": spec.flavor,
        "dispatcher": "".join(sorted(sends)).partition(".")[0],
        "attention": attention.partition(".")[0],
        "linear": sorted(name.partition(".")[0] for name in linear),
        "predictions": len(getattr(spec.model, "mtp_layers", None) or ()),
    }


def parameters() -> Iterator[tuple[str, int]]:
    """The parameters of each model that can be built."""
    for module in MODELS:
        for place in (f"torchtitan.models.{module}", f"torchtitan.experiments.{module}"):
            try:
                of = import_module(place)
            except ImportError:
                continue
            for flavour, model in _models(of):
                with torch.device("meta"):
                    built = model()
                yield f"{module} {flavour}", sum(p.numel() for p in built.parameters())
            break


def _models(of: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(of, "get_train_spec"):
        spec = of.get_train_spec()
        for flavour, args in spec.model_args.items():
            args.moe_impl = "standard"  # which a job says
            yield flavour, lambda args=args: spec.model_cls(args)
        return
    known = next(value for name, value in vars(of).items() if name.endswith("_configs"))
    for flavour in known:
        try:
            spec = of.model_registry(flavour)
        except Exception as error:  # whatever it wants of this machine
            print(f"{flavour}: {error}")
            continue
        yield flavour, spec.model.build


def main() -> None:
    """Add a release to the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="the release that is installed")
    release = parser.parse_args().release
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    try:
        trainer = import_module("torchtitan.trainer").Trainer.Config()
    except ImportError:
        place = "torchtitan.config_manager" if release < "0.2" else "torchtitan.config.job_config"
        trainer = import_module(place).JobConfig()
    defaults = settings_of(trainer)
    known.setdefault("settings", {})[release] = defaults
    known.setdefault("parameters", {}).update({release: dict(parameters())})
    if hasattr(trainer, "model_spec"):
        known["configurations"] = dict(registered(defaults))
    write_atomic(TARGET, _text(known))


def _text(known: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for part, values in known.items():
        lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in values.items())
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    main()
