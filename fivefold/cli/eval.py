"""`fivefold eval`: the loss of a run's checkpoint over its validation sets, or scores of tasks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fivefold.check import check
from fivefold.cli.helps import DEVICE_HELP, JSON_HELP, NPROC_HELP, RUN_HELP, STEP_HELP
from fivefold.cli.style import note
from fivefold.config.config import SETTINGS, Config
from fivefold.config.data import MOCK
from fivefold.config.memory import MemoryConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.records import LoggingConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.settings import Count, Whole, argument, changed, option
from fivefold.config.sharding import ShardingStrategy
from fivefold.config.sources import load_options
from fivefold.config.training import OptimizerConfig
from fivefold.counts.derived import as_table
from fivefold.data.mixture import counted_from
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.files import finite
from fivefold.layout import Layout
from fivefold.report.settings import run_config
from fivefold.train.folder.fetched import with_fetched_data
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.machine.devices import Asked
from fivefold.train.metrics import check_installed
from fivefold.train.ranks.rank_env import read_rank_env
from fivefold.units import human_count, human_seconds, several

if TYPE_CHECKING:
    from fivefold.inference.eval import Evaluated

_OF_TASKS = ("num_fewshot", "limit")
_NO_TRAINING: dict[str, Any] = {
    "eval_interval": 1,
    "label_smoothing": 0.0,
    "fp8_param_gather": False,
    "rampup_batch_size": (),
    "check_weight_hash_across_dp_replicas_interval": 0,
    "check_loss_across_dp_replicas_interval": 0,
}
_OF_A_PART = ("json", "eval_iters", "full_validation")
_OF_BOTH = ("run", "step", "device", "json", "tasks")


def _same(name: str, default: Any = None) -> Any:
    """A setting of runs as an option; None: as in the run."""
    return option(default, SETTINGS[name].help)


@dataclass(frozen=True)
class Options:
    """Compute the loss of a run's checkpoint over its validation sets, in any layout.

    Without flags one device reads the batches of the run's own evaluations, and gets the same
    losses. Perplexity is exp(loss) per token; bits per byte, known for byte-level tokenizers,
    compare models with different tokenizers. --tasks evaluates tasks of lm-evaluation-harness
    instead, on one device (extra: fivefold[eval]).
    """

    run: str = argument(RUN_HELP)
    step: int | None = option(None, STEP_HELP)
    nproc: Count = option(1, NPROC_HELP)
    device: Asked = option("auto", f"where to run; {DEVICE_HELP}")
    json: bool = option(False, JSON_HELP)
    tasks: tuple[str, ...] = option(
        (), "tasks of lm-evaluation-harness that choose or score: names, or paths of .yaml files"
    )
    num_fewshot: Whole | None = option(
        None, "with --tasks: examples in each prompt (default: the task's)"
    )
    limit: Count | None = option(
        None, "with --tasks: use only this many documents of each task (default: all)"
    )
    valid_data_path: tuple[str, ...] = _same("valid_data_path", ())
    split: str | None = _same("split")
    eval_iters: int | None = _same("eval_iters")
    full_validation: bool | None = _same("full_validation")
    micro_batch_size: int | None = _same("micro_batch_size")
    global_batch_size: int | None = _same("global_batch_size")
    tensor_model_parallel_size: int = _same("tensor_model_parallel_size", 1)
    sequence_parallel: bool = _same("sequence_parallel", False)
    pipeline_model_parallel_size: int = _same("pipeline_model_parallel_size", 1)
    context_parallel_size: int = _same("context_parallel_size", 1)
    expert_model_parallel_size: int = _same("expert_model_parallel_size", 1)
    data_parallel_sharding_strategy: ShardingStrategy = _same(
        "data_parallel_sharding_strategy", "no_shard"
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    if (launcher := read_rank_env().launcher) != "single":
        what = f"{launcher} has started ranks, and this command starts its own"
        raise ConfigError(Mistake(what, attempt="fivefold eval RUN --nproc N, without a launcher"))
    _check_tasks(options)
    if options.tasks:
        return _run_tasks(options)
    layout = check(with_fetched_data(_config(options), note), options.nproc)
    from fivefold.inference.eval import evaluate_run

    folder = Path(options.run)
    found = evaluate_run(folder, layout, step=options.step, device=options.device, progress=note)
    if options.json:
        print(json.dumps(finite(_as_json(options.run, found)), indent=2))
    else:
        print("\n".join(_text(options, layout, found)))
    return 0


def _check_tasks(options: Options) -> None:
    """Refuse flags that have no effect with --tasks, or without."""
    mistakes = Mistakes()
    for setting in changed(options):
        if not options.tasks and setting.name in _OF_TASKS:
            what = f"{setting.flag} has no effect: it is for tasks, and --tasks names none"
            mistakes.add(what, attempt="--tasks NAME, or a .yaml file")
        elif options.tasks and setting.name not in (*_OF_TASKS, *_OF_BOTH):
            what = f"{setting.flag} has no effect with --tasks, which run on one device"
            mistakes.add(what, attempt=f"no {setting.flag}, or no --tasks")
    with mistakes.collecting():
        if options.tasks:
            check_installed("lm_eval", "--tasks", "eval")
    mistakes.raise_if_any()
    run_config(Path(options.run))


def _run_tasks(options: Options) -> int:
    from fivefold.inference.harness import evaluate_tasks

    found = evaluate_tasks(
        Path(options.run),
        options.tasks,
        step=options.step,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        device=options.device,
    )
    if options.json:
        kept = ("results", "groups", "n-samples", "n-shot", "versions", "lm_eval_version")
        print(json.dumps({name: found[name] for name in kept if name in found}, indent=2))
        return 0
    print(as_table(_task_rows(found)))
    print(f"by lm_eval {found['lm_eval_version']}, on one device in fp32")
    print(f"  next: fivefold eval {_checkpoint(options)} --full-validation")
    return 0


def _task_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each task or group with its metrics: `acc 0.4167`, and the standard error where known."""
    for task, metrics in found["results"].items():
        shown = []
        for key, value in metrics.items():
            name, comma, filtered = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{name}_stderr,{filtered}")
            spread = f" \u00b1 {error:.4f}" if isinstance(error, int | float) else ""
            shown.append(f"{name} {value:.4f}{spread}")
        samples = found["n-samples"].get(task)
        read = f"{samples['effective']:,} of {samples['original']:,} documents" if samples else ""
        yield task, ", ".join(shown), read


def _config(options: Options) -> Config:
    """The settings of the run, with layout and evaluation replaced by what was asked for.

    Settings that only affect training (recomputation, the optimizer, a growing batch, logs) are at
    their defaults.
    """
    folder = Path(options.run)
    config = run_config(folder)
    config = replace(config, data=counted_from(RunFolder(folder).started_in, config.data))
    if config.training.label_smoothing:
        note("label_smoothing of the run is left out: perplexity is that of the text")
    memory, chosen = config.memory, vars(options).items()
    given = {name: x for name, x in chosen if name in SETTINGS and x is not None and x != ()}
    config = replace(
        config,
        parallel=ParallelConfig(),
        memory=MemoryConfig(
            cross_entropy_loss_fusion=memory.cross_entropy_loss_fusion,
            cross_entropy_fusion_impl=memory.cross_entropy_fusion_impl,
        ),
        optimizer=OptimizerConfig(),
        logging=LoggingConfig(),
    ).with_values(**_NO_TRAINING | given)
    config = without_orphans(config, [*given])[0]
    if not config.training.evaluates:
        works = ("--eval-iters 4", *(() if _is_endless(config) else ("--full-validation",)))
        what = f"eval_iters = {config.training.eval_iters} evaluates nothing"
        raise ConfigError(Mistake(what, works=works))
    return config


def _is_endless(config: Config) -> bool:
    """Whether one pass over the validation split would never end."""
    return MOCK in config.data.data_path


def _as_json(run: str, found: Sequence["Evaluated"]) -> dict[str, Any]:
    return {
        "run": run,
        "step": found[0].metrics.step,
        "sets": [
            {
                "name": each.metrics.name or None,
                "loss": each.metrics.loss,
                "perplexity": each.metrics.perplexity,
                "tokens": each.metrics.tokens,
                "samples": each.samples,
                "bytes": each.text_bytes,
                "bits_per_byte": each.bits_per_byte,
                "seconds": each.metrics.seconds,
            }
            for each in found
        ],
    }


def _checkpoint(options: Options) -> str:
    """The words of a command line that name the checkpoint."""
    step = "" if options.step is None else f" --step {options.step}"
    return f"{quote(options.run)}{step}"


def _whole(options: Options) -> str:
    """The command that evaluates the same sets in the same layout, with each sample once."""
    given = (s for s in changed(options) if s.name not in ("run", "step", *_OF_A_PART))
    words = [setting.typed(getattr(options, setting.name)) for setting in given]
    return " ".join([*words, "--full-validation"])


def _text(options: Options, layout: Layout, found: Sequence["Evaluated"]) -> Iterator[str]:
    rows = []
    for each in found:
        its, bits = each.metrics, each.bits_per_byte
        shown = [f"perplexity {its.perplexity:.4g}"]
        shown += [f"{bits:.4f} bits a byte"] if bits is not None else []
        shown += [f"{human_count(its.tokens)} tokens of {several(each.samples, 'sample')}"]
        shown += [human_seconds(its.seconds)]
        rows.append((its.name or "validation split", f"loss {its.loss:.4f}", ", ".join(shown)))
    yield as_table(rows)
    training, grid = layout.config.training, layout.grid
    read = f"the first {training.eval_iters * training.global_batch_size:,} samples of each set"
    if training.full_validation:
        read = "each sample once"
    ranks = "one device" if grid.world_size == 1 else f"{grid.world_size} ranks"
    yield f"step {found[0].metrics.step} in {training.precision} on {ranks}; {read}"
    whole = training.full_validation or _is_endless(layout.config)
    verb, after = ("sample", "PROMPT") if whole else ("eval", _whole(options))
    yield f"  next: fivefold {verb} {_checkpoint(options)} {after}"
