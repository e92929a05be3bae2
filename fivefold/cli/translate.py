"""`fivefold translate`: turn a job of another trainer into a recipe."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import TextIO

from fivefold.check import check
from fivefold.cli.style import paint
from fivefold.config.accelerate_job.file import is_text_of_accelerate
from fivefold.config.accelerate_job.file import read_file as read_accelerate
from fivefold.config.accelerate_job.settings import translate as translate_accelerate
from fivefold.config.config import SETTINGS, Config
from fivefold.config.deepspeed_job.file import read_file
from fivefold.config.deepspeed_job.settings import translate as translate_file
from fivefold.config.megatron import is_megatron, megatron_checkpoint
from fivefold.config.megatron_job.arguments import MegatronJob, job_of, read_job
from fivefold.config.megatron_job.command import ScriptEnvironment
from fivefold.config.megatron_job.settings import translate as translate_job
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.settings import Count, argument, changed, option
from fivefold.config.sources import load_options, read_config, to_toml
from fivefold.config.torchtitan_job.file import is_text_of_torchtitan, read_text_of_torchtitan
from fivefold.config.torchtitan_job.job import TitanJob
from fivefold.config.torchtitan_job.saved import job_of_saved, saved_settings
from fivefold.config.torchtitan_job.settings import translate as translate_titan
from fivefold.config.translation import Translation
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.files import read_text, write_atomic
from fivefold.mesh.degrees import DEGREES
from fivefold.units import several


@dataclass(frozen=True)
class Options:
    """Translate a job of Megatron-LM or torchtitan, or settings of DeepSpeed or Accelerate, into a
    recipe.

    The recipe has the same model, layout, batch, learning rates and data. Missing arguments get
    that trainer's defaults. Arguments without a counterpart are printed, and written into the
    recipe as comments.
    """

    source: str = argument(
        "Megatron-LM: the job's script, command line, log or checkpoint, - for input; torchtitan: "
        "its TOML file, script, command line, log or saved settings; DeepSpeed: its JSON file, "
        "Accelerate: its YAML file, both with --model"
    )
    target: str | None = argument("recipe to write (default: print it)", None)
    vocab_size: Count | None = option(
        None, "tokens of the tokenizer, if the job does not give them"
    )
    script_arguments: str | None = option(
        None,
        "Megatron-LM, torchtitan: arguments of the job's script, as one text; of a TOML file, "
        "flags that change it (default: none)",
    )
    model: str | None = option(
        None,
        "DeepSpeed and Accelerate, whose files name no model, or torchtitan: preset, hub name, or "
        "path of a config.json (default: torchtitan's own)",
    )
    nproc: Count | None = option(
        None,
        "DeepSpeed, Accelerate, torchtitan: number of ranks (default: derived from batch sizes, or "
        "degrees and launcher)",
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    found = _translated(options)
    config, idle = without_orphans(read_config(**found.values), (), deciding=SETTINGS)
    ranks = _ranks_of(found, config)
    refused = _refused(config, ranks)
    recipe = "\n".join([*_header(found, refused), "", to_toml(config, changes_only=True)])
    stem = "job" if options.source == "-" else Path(options.source).stem
    stem += "-recipe" * (Path(options.source).suffix == ".toml")
    target = options.target or f"{stem}.toml"
    if options.target is None:
        print(recipe, end="")
    else:
        _check_unwritten(Path(target))
        write_atomic(Path(target), recipe)
    stream = sys.stderr if options.target is None else sys.stdout
    load = options.source if options.source != "-" and Path(options.source).is_dir() else None
    for line in _report_lines(found, refused, [each.name for each in idle], stream):
        print(line, file=stream)
    for line in _next(found, target, ranks, load, stream):
        print(line, file=stream)
    return 0


_MEGATRON = "Megatron-LM"
_TITLE = "# A job of {}, translated by `fivefold translate`."


def _check_unwritten(target: Path) -> None:
    """Check that only an earlier translation would be overwritten."""
    before, after = _TITLE.split("{}")
    first = read_text(target, ConfigError).partition("\n")[0] if target.is_file() else None
    if first is not None and not (first.startswith(before) and first.endswith(after)):
        raise ConfigError(
            Mistake(
                f"{target} exists, and was not written by fivefold translate",
                works=("another name",),
            )
        )


def _translated(options: Options) -> Translation:
    path = Path(options.source)
    if options.source != "-" and path.is_dir():
        _check_unasked(options, _MEGATRON, "model", "nproc")
        return translate_job(_of_checkpoint(path), options.vocab_size)
    text = sys.stdin.read() if options.source == "-" else read_text(path, ConfigError)
    if (saved := saved_settings(text)) is not None:
        _check_unasked(options, "torchtitan", "vocab_size", "script_arguments")
        return _of_torchtitan(job_of_saved(saved), options)
    if is_text_of_accelerate(text):
        _check_unasked(options, "Accelerate", "vocab_size", "script_arguments")
        return _of_accelerate(text, options, path)
    if text.lstrip().startswith("{"):
        _check_unasked(options, "DeepSpeed", "vocab_size", "script_arguments")
        return _of_deepspeed(text, options)
    if is_text_of_torchtitan(text, path.name):
        _check_unasked(options, "torchtitan", "vocab_size")
        job = read_text_of_torchtitan(text, str(path), _around(options, path))
        return _of_torchtitan(job, options)
    _check_unasked(options, _MEGATRON, "model", "nproc")
    return translate_job(read_job(text, _around(options, path)), options.vocab_size)


def _of_torchtitan(job: TitanJob, options: Options) -> Translation:
    found = translate_titan(job, options.nproc, options.model is not None)
    given = {} if options.model is None else {"model": options.model}
    return replace(found, values=given | found.values)


def _of_deepspeed(text: str, options: Options) -> Translation:
    return _with_model(options, "DeepSpeed", lambda: translate_file(read_file(text), options.nproc))


def _of_accelerate(text: str, options: Options, path: Path) -> Translation:
    def read(name: str) -> str:
        """A file that the settings name, beside them or, as for Accelerate, from here."""
        beside = path.parent / name
        there = beside if options.source != "-" and beside.is_file() else Path(name)
        return read_text(there, ConfigError)

    return _with_model(
        options,
        "Accelerate",
        lambda: translate_accelerate(read_accelerate(text), options.nproc, read),
    )


def _with_model(options: Options, trainer: str, make: Callable[[], Translation]) -> Translation:
    """The translation of settings that come without a model."""
    mistakes = Mistakes()
    if options.model is None:
        mistakes.add(
            f"a file of {trainer} does not say which model it trains",
            works=["--model FOLDER, with its config.json", "--model llama3-8b"],
        )
    with mistakes.collecting():
        found = make()
    mistakes.raise_if_any()
    return replace(found, values={"model": options.model} | found.values)


def _around(options: Options, path: Path) -> ScriptEnvironment:
    """The environment of a script: variables are read as bash would read them if it ran here."""
    arguments = shlex.split(options.script_arguments or "")
    return ScriptEnvironment(os.environ, arguments, None if options.source == "-" else path)


def _check_unasked(options: Options, trainer: str, *names: str) -> None:
    """Refuse flags for what is not read of this trainer's jobs."""
    mistakes = Mistakes()
    for setting in changed(options, names):
        mistakes.add(
            f"{setting.flag} has no effect on a job of {trainer}",
            setting.help,
            works=(setting.typed(setting.default),),
        )
    mistakes.raise_if_any()


def _of_checkpoint(folder: Path) -> MegatronJob:
    if not is_megatron(folder):
        works = ("a log, or a file with the command line of pretrain_gpt.py",)
        raise ConfigError(Mistake(f"{folder} is not a checkpoint of Megatron-LM", works=works))
    from fivefold.convert.megatron import MegatronFolder

    return job_of(MegatronFolder(megatron_checkpoint(folder, None)).arguments)


def _refused(config: Config, ranks: int) -> list[str]:
    """Lines on why `train --dry-run` refuses a recipe on so many ranks; none if it does not."""
    from fivefold.train.corpora import check_data_settings

    mistakes = Mistakes()
    with mistakes.collecting():
        check(config, ranks)
    with mistakes.collecting():
        check_data_settings(config)
    try:
        mistakes.raise_if_any()
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _header(found: Translation, refused: Sequence[str]) -> Iterator[str]:
    yield _TITLE.format(found.trainer)
    if found.lost:
        yield "# Not carried over:"
        for line in found.lost:
            yield from wrap(line, 100, initial_indent="# - ", subsequent_indent="#   ")
    if refused:
        yield "# Refused as it stands:"
        yield from (f"#   {line}" for line in refused)


def _ranks_of(found: Translation, config: Config) -> int:
    """The ranks of a job, or the fewest that its degrees need: templates leave the number to the
    user, and then say 1, or as many as one of its nodes has."""
    parallel = config.parallel
    fixed = [size for name in DEGREES.values() if (size := getattr(parallel, name)) != -1]
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    fewest = lcm(prod(fixed), experts * parallel.pipeline_model_parallel_size)
    fits = found.ranks is not None and found.ranks % fewest == 0
    return found.ranks if found.ranks and fits else fewest


def _report_lines(
    found: Translation, refused: Sequence[str], idle: Sequence[str], stream: TextIO
) -> Iterator[str]:
    if found.lost:
        yield paint("not carried over", "bold", stream)
        for line in found.lost:
            yield from wrap(line, 100, initial_indent="  ", subsequent_indent="    ")
    if refused:
        yield paint("refused here as it stands", "bold", stream)
        yield from (f"  {line}" for line in refused)
    if without_effect := sorted({*found.harmless, *idle}):
        what = several(len(without_effect), "argument")
        names = wrap(", ".join(without_effect), 96, initial_indent="  ", subsequent_indent="  ")
        yield paint(f"{what} without effect here", "bold", stream)
        yield from (paint(line, "dim", stream) for line in names)


def _next(
    found: Translation, recipe: str, ranks: int, load: str | None, stream: TextIO
) -> Iterator[str]:
    yield paint("next", "bold", stream)
    if ranks != found.ranks:
        said = "does not say its ranks" if found.ranks is None else f"says {found.ranks}"
        yield f"  # the job {said}; its degrees need {ranks}, or a multiple"
    recipe = quote(recipe)
    yield f"  fivefold train {recipe} --nproc {ranks} --dry-run"
    yield f"  fivefold rehearse {recipe} --nproc {ranks}"
    if load is not None:
        yield f"  fivefold train {recipe} --nproc {ranks} --load {quote(load)}"
