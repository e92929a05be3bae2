"""`fivefold convert`: weights from Hugging Face into a run, or from a run to Hugging Face."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold import process
from fivefold.cli.style import note
from fivefold.config.huggingface import is_adapter, read_adapter
from fivefold.config.megatron import is_megatron, megatron_checkpoint
from fivefold.config.model import ModelConfig
from fivefold.config.presets import resolve_model
from fivefold.config.settings import Allowed, argument, changed, option
from fivefold.config.sources import load_options
from fivefold.errors import DataError, Mistakes
from fivefold.hub import WEIGHTS, in_place
from fivefold.report.settings import run_config, run_settings
from fivefold.units import few, human_bytes, several

if TYPE_CHECKING:
    from fivefold.convert.non_finite import Converted

SHOWN = 4  # tensors
Bytes = Annotated[float, Allowed(lambda v: v >= 1, "at least 1")]


@dataclass(frozen=True)
class Options:
    """Convert weights between a run folder and other formats; the source decides the direction.

    A Hugging Face folder (config.json and .safetensors), a PEFT adapter or a distributed checkpoint
    of Megatron-core becomes a run folder, which `fivefold sample` and `train --load` read. A run
    folder becomes a Hugging Face folder, which transformers loads, with adapters merged. Training
    needs no conversion: `fivefold train --model FOLDER --load FOLDER` reads such weights directly,
    each rank its own part.
    """

    source: str = argument(
        "folder of Hugging Face, PEFT or Megatron-core, or ORG/NAME on the hub; or run folder"
    )
    target: str = argument("folder to make")
    step: int | None = option(None, "step of the run's checkpoint (default: the latest)")
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = option(
        None, "type of weights written for Hugging Face (default: that of training)"
    )
    max_shard_size: Bytes | None = option(
        None, "most bytes per file written for Hugging Face (default: 5e9)"
    )
    model: str | None = option(
        None, "model of a Megatron-core checkpoint: preset, hub name, or path of a config.json"
    )
    base: str | None = option(
        None,
        "Hugging Face folder with the base weights of a PEFT adapter (default: the one that it "
        "names)",
    )
    adapter: bool = option(
        False, "write only a run's adapters (LoRA), in PEFT's format, instead of merged weights"
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    options = replace(options, source=str(in_place(options.source, WEIGHTS, note)))
    source, target = Path(options.source), Path(options.target)
    adapter = source if is_adapter(source) else None
    of_megatron = adapter is None and is_megatron(source)
    inward = adapter is not None or of_megatron or (source / "config.json").is_file()
    base, model = _check(options, inward=inward)
    from fivefold.convert.hub import HubFolder, is_hub_folder
    from fivefold.convert.save import MOST_BYTES
    from fivefold.train.folder.convert import to_hub, to_run
    from fivefold.train.folder.side_files import whole_model

    process.work()
    if inward:
        made = to_run(base, target, adapter, model)
        _warn(made)
        print(f"{target}: a run folder with {human_bytes(made.size)} of weights at step 0")
        if is_hub_folder(base) and (left_out := HubFolder(base).parts_left_out()):
            print(f"  the text model of {base}; left out: {left_out}")
        file, after = target / "tokenizer.json", f"fivefold sample {quote(str(target))} PROMPT"
        missing = "" if file.is_file() else f"the model's tokenizer, copied to {file}, then "
        print(f"  next: {missing}{after}")
        return 0
    made = to_hub(
        source,
        target,
        step=options.step,
        dtype=options.dtype,
        most_bytes=options.max_shard_size or MOST_BYTES,
        adapter=options.adapter,
    )
    _warn(made)
    what, class_ = "a Hugging Face folder with {} of weights", "transformers import AutoModel"
    if options.adapter:
        what, class_ = "adapters for PEFT, {}", "peft import AutoPeftModel"
    opened = f"Model.from_pretrained({json.dumps(str(target), ensure_ascii=False)})"
    print(f"{target}: {what.format(human_bytes(made.size))}")
    if (whole := whole_model(source)) is not None:
        of = "for the" if options.adapter else "the"
        print(f"  {of} text model alone of the {whole} model that the run began with")
    if options.adapter and read_adapter(target).base is None:
        print("  next: say in its adapter_config.json where the weights are that it adapts")
        return 0
    print(f"  next: python -c {quote(f'from {class_}ForCausalLM as Model; {opened}')}")
    return 0


def _warn(made: "Converted") -> None:
    """Warn of weights that were converted unchanged, but with which no loss or text is possible."""
    if made.spoilt:
        what = several(len(made.spoilt), "tensor")
        note(f"{what} with infinities or NaN, as in the source: {few(made.spoilt, SHOWN)}")


def _check(options: Options, *, inward: bool) -> tuple[Path, ModelConfig | None]:
    """Check everything that can be checked without loading torch.

    Returns the folder of whole weights, and the model that --model names.
    """
    mistakes = Mistakes()
    if inward:
        of_steps = () if is_megatron(Path(options.source)) else ("step",)
        for setting in changed(options, (*of_steps, "dtype", "max_shard_size", "adapter")):
            mistakes.add(f"{setting.flag} applies to a run folder, and {options.source} is not one")
    if Path(options.target).exists():
        mistakes.add(f"{options.target} exists already", attempt="another folder")
    source = Path(options.source)
    base = _base(options, source, mistakes) if is_adapter(source) else source
    model = None
    if is_megatron(source) and not is_adapter(source):
        base, model = _of_megatron(options, source, mistakes)
    elif options.model is not None:
        mistakes.add(f"--model applies to a checkpoint of Megatron-core, and {source} is not one")
    if options.base is not None and not is_adapter(source):
        mistakes.add(f"--base applies to an adapter of PEFT, and {source} is not one")
    mistakes.raise_if_any()
    if not inward:
        _check_run(source)
    return base, model


def _check_run(source: Path) -> None:
    """Refuse a source that is no run folder, since it is none of the other formats either."""
    try:
        run_settings(source)
    except DataError as error:
        (found,) = error.mistakes
        why = (
            "nor does it hold config.json (Hugging Face), adapter_config.json (PEFT) or "
            ".metadata (Megatron-core)"
        )
        raise DataError(replace(found, why=(why,) if source.is_dir() else ())) from None
    run_config(source)


def _of_megatron(
    options: Options, source: Path, mistakes: Mistakes
) -> tuple[Path, ModelConfig | None]:
    """The folder of one checkpoint, and its model."""
    if options.model is None:
        what = f"{source} is a checkpoint of Megatron-core, and --model must say of which model"
        mistakes.add(what, works=("--model llama3-8b", "--model FOLDER, of a config.json"))
        return source, None
    model = None
    with mistakes.collecting():
        model = resolve_model(options.model)
    mistakes.raise_if_any()
    return megatron_checkpoint(source, options.step, step_flag="--step"), model


def _base(options: Options, adapter: Path, mistakes: Mistakes) -> Path:
    """The folder of the model that an adapter is for."""
    base = options.base
    with mistakes.collecting():
        base = read_adapter(adapter).base if base is None else base
        base = None if base is None else str(in_place(base, WEIGHTS, note))
        if base is None or not (Path(base) / "config.json").is_file():
            what = f"{adapter} is an adapter to {base}, which is not a Hugging Face folder here"
            mistakes.add(what, works=("--base FOLDER",))
    return Path(base or "")
