"""`fivefold translate`: the arguments of a job of Megatron-LM as a recipe."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import TextIO

from fivefold.cli.style import paint
from fivefold.config.config import SETTINGS
from fivefold.config.megatron import is_megatron, megatron_checkpoint
from fivefold.config.megatron_job.arguments import MegatronJob, job_of, read_job
from fivefold.config.megatron_job.settings import Translation, translate
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.settings import argument, option
from fivefold.config.sources import load_options, read_config, to_toml
from fivefold.errors import ConfigError
from fivefold.files import read_text, write_atomic
from fivefold.units import several


@dataclass(frozen=True)
class Options:
    """Write a recipe that is a job of Megatron-LM: same model, layout, batch, rates and data.

    Arguments that are not given have Megatron-LM's defaults. What has no counterpart here is told,
    and stands in the recipe as comments.
    """

    source: str = argument("file with the job's log or command line, - for input, or checkpoint")
    target: str | None = argument("recipe to write (default: print it)", None)
    vocab_size: int | None = option(
        None, "tokens of the tokenizer, if the job does not say (default: what it says)"
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    found = translate(_job(options.source), options.vocab_size)
    config, idle = without_orphans(read_config(**found.values), (), deciding=SETTINGS)
    recipe = "\n".join([*_header(found), "", to_toml(config, changes_only=True)])
    stem = "job" if options.source == "-" else Path(options.source).stem
    target = options.target or f"{stem}.toml"
    if options.target is None:
        print(recipe, end="")
    else:
        _check_unwritten(Path(target))
        write_atomic(Path(target), recipe)
    told = sys.stderr if options.target is None else sys.stdout
    load = options.source if options.source != "-" and Path(options.source).is_dir() else None
    for line in _told(found, [each.name for each in idle], target, load, told):
        print(line, file=told)
    return 0


_TITLE = "# A job of Megatron-LM, translated by `fivefold translate`."


def _check_unwritten(target: Path) -> None:
    """Only an earlier translation may be written over."""
    if target.exists() and not read_text(target, ConfigError).startswith(_TITLE):
        raise ConfigError(f"{target} is there, and no translation\n  works: another name")


def _job(source: str) -> MegatronJob:
    path = Path(source)
    if source != "-" and path.is_dir():
        if not is_megatron(path):
            raise ConfigError(
                f"{source} is no checkpoint of Megatron-LM\n  works: a log, or a file with the "
                "command line of pretrain_gpt.py"
            )
        from fivefold.convert.megatron import MegatronFolder

        return job_of(MegatronFolder(megatron_checkpoint(path, None)).arguments)
    return read_job(sys.stdin.read() if source == "-" else read_text(path, ConfigError))


def _header(found: Translation) -> Iterator[str]:
    yield _TITLE
    if found.lost:
        yield "# Not carried over:"
        for line in found.lost:
            yield from wrap(line, 100, initial_indent="# - ", subsequent_indent="#   ")


def _told(
    found: Translation, idle: Sequence[str], recipe: str, load: str | None, stream: TextIO
) -> Iterator[str]:
    if found.lost:
        yield paint("not carried over", "bold", stream)
        for line in found.lost:
            yield from wrap(line, 100, initial_indent="  ", subsequent_indent="    ")
    if without_effect := sorted({*found.harmless, *idle}):
        what = several(len(without_effect), "argument")
        names = wrap(", ".join(without_effect), 96, initial_indent="  ", subsequent_indent="  ")
        yield paint(f"{what} without effect here", "bold", stream)
        yield from (paint(line, "dim", stream) for line in names)
    ranks = f" --nproc {found.ranks}" if found.ranks else ""
    yield paint("next", "bold", stream)
    yield f"  fivefold train {quote(recipe)}{ranks} --dry-run"
    if found.ranks:
        yield f"  fivefold rehearse {quote(recipe)}{ranks}"
    if load is not None:
        yield f"  fivefold train {quote(recipe)}{ranks} --load {quote(load)}"
