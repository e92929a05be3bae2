"""`fivefold plan`: which layout, will it fit, how fast, and why not another one."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.cli.style import paint
from fivefold.config.parallel import option
from fivefold.config.settings import argument
from fivefold.config.sources import Loaded, load_with_origins
from fivefold.errors import ConfigError, Mistake
from fivefold.plan.cluster import load_cluster


@dataclass(frozen=True)
class Options:
    """Find the fastest layout of a model that fits on a cluster, and say why.

    Of a recipe, the model and the batch count; its layout does not, since that is what is looked
    for. A layout setting that is given as a flag stays as it is; all others are searched.
    """

    recipe: str | None = argument(
        "preset, recipe, hub name, or path of a config.json or .toml file", None
    )
    cluster: str = option("H100", "kind of GPU, or path of a cluster's .toml file")
    gpus: int | None = option(None, "GPUs (default: those of the cluster's file, or one node)")
    top: int = option(10, "layouts to show")


def run(argv: Sequence[str]) -> int:
    """Run the verb; `argv` is what follows it."""
    loaded = load_with_origins(argv, Options, models=True)
    options = loaded.options
    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus must be at least 1, not {options.gpus}")
    return _plan(loaded)


def _plan(loaded: Loaded[Options]) -> int:
    from fivefold.plan.request import request
    from fivefold.plan.search import search

    options = loaded.options
    cluster = load_cluster(options.cluster, options.gpus)
    asked = request(loaded.config, cluster, by_flag=loaded.by_flag, by_recipe=loaded.by_recipe)
    result = search(asked)
    if not result.found:
        raise ConfigError(Mistake("nothing fits"))
    print("\n".join(_report(result, options)))
    return 0


def _report(result, options) -> Iterator[str]:
    from fivefold.plan import answer

    yield from answer.question(result)
    yield ""
    yield _title("layouts, the best of each mesh")
    yield from answer.ranked(result.by_mesh()[: options.top])
    yield ""
    yield answer.counts(result)
    yield ""
    yield _title("the best")
    yield from answer.best(result)
    yield ""
    yield _title("where the time goes")
    yield from answer.waterfall(result.best.prediction)
    yield ""
    yield _title("memory of each pipeline rank")
    yield from answer.memory_table(result.best)


def _title(text: str) -> str:
    return paint(text, "bold", sys.stdout)
