"""Runs a verification: the reference in one process, then the layout's ranks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite

import torch

from fivefold.audit.streams import StreamWatch
from fivefold.config.config import Config
from fivefold.data_parallel.policy import DTYPES
from fivefold.errors import ConfigError, FivefoldError, Mistake, Mistakes
from fivefold.files import telling_system_errors
from fivefold.layout import Layout
from fivefold.train.folder.scratch import scratch_folder
from fivefold.train.machine.devices import DeviceChoice
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.step_graph import WARMUP
from fivefold.units import several
from fivefold.verify.compare import compare
from fivefold.verify.delays import Delays
from fivefold.verify.plant import PLANTS
from fivefold.verify.reference import ReferenceStep, load_trace, run_reference, save_trace
from fivefold.verify.report import VerifyReport
from fivefold.verify.shrink import prepare

STEPS = 3
REPLAYED_STEPS = WARMUP + 2
"""Number of steps whose last one replays a graph on other tokens than those it was recorded
with."""
CPU = DeviceChoice("cpu", "the default")


def verify(
    layout: Layout,
    *,
    steps: int | None = None,
    plant: str | None = None,
    device: DeviceChoice = CPU,
    delays: int | None = None,
    races: bool = False,
) -> VerifyReport:
    """Compare a layout with one device, in processes started on this machine.

    Args:
        layout: checked layout; its `precision` is that of the comparison.
        steps: optimizer steps to run; None: three, or as many as show that graphs replay right.
        plant: name of an error to plant, see `plant.PLANTS`.
        device: where the ranks compute.
        delays: seed of random delays in the streams of GPUs; None: no delays.
        races: whether accesses of streams that nothing puts in order fail it, on GPUs.

    Raises:
        ConfigError: fewer than 1 step, or too few to replay one, an error to plant that is unknown
            or has no effect, or delays or races without a GPU.
        RanksFailed: a process failed.
    """
    steps = _enough_steps(layout, steps)
    if device.kind != "cuda":
        _need_no_streams(delays, races, "of GPUs only")
    if layout.config.training.cuda_graph_impl is not None:
        _need_no_streams(delays, races, "where every step is launched, and a graph replays some")
    check_plant(layout, plant)
    layout, changes = prepare(layout)
    config = layout.config
    with scratch_folder("verify") as folder:
        trace, baseline, result = (folder / n for n in ("exact", "rounded", "report"))

        def reference(_: RankEnv) -> None:
            with telling_system_errors(FivefoldError, folder):
                exact = run_reference(config, steps)
                save_trace(trace, exact)
                if config.training.precision != "fp64":
                    save_trace(baseline, rounded(config, steps, exact))

        def rank(env: RankEnv) -> None:
            same_bits = config.training.deterministic_mode
            late = Delays(delays, env.rank) if delays is not None else None
            here = init_process_group(
                env,
                device.kind,
                shared=device.shared,
                timeout_seconds=60 * config.training.distributed_timeout_minutes,
                deterministic=same_bits,
                pause=late.pause if late is not None else None,
            )
            narrow = load_trace(baseline) if baseline.exists() else ()
            loaded = load_trace(trace)
            watch = StreamWatch() if races else nullcontext()
            with late or nullcontext(), watch as followed:
                report = compare(layout, env.rank, here, loaded, baseline=narrow, plant=plant)
            if followed is not None:
                followed.raise_if_any()
            if report is not None:
                torch.save(vars(report), result)

        run_ranks(reference, 1).raise_if_failed("the run on one device failed")
        end = run_ranks(rank, layout.grid.world_size, describe=layout.grid.name)
        end.raise_if_failed("the run of the layout failed")
        report = VerifyReport(**torch.load(result, weights_only=True))
    return replace(report, changes=changes)


def rounded(config: Config, steps: int, exact: Sequence[ReferenceStep]) -> list[ReferenceStep]:
    """A run of one device in fewer bits, whose routers repeat the choices of the exact run.

    Raises:
        FivefoldError: its gradients are not finite, which would allow every error.
    """
    precision = config.training.precision
    found = run_reference(config, steps, DTYPES[precision], exact)
    if not all(isfinite(step.norm) for step in found):
        what = f"the gradients of one device are not finite in {precision}: nothing can be compared"
        wider = {"fp16": "a smaller --loss-scale, or none", "bf16": "--fp32"}
        raise FivefoldError(Mistake(what, attempt=wider.get(precision, "--precision fp64")))
    return found


def _enough_steps(layout: Layout, steps: int | None) -> int:
    replays = layout.config.training.cuda_graph_impl is not None
    if steps is None:
        return REPLAYED_STEPS if replays else STEPS
    if steps < 1:
        raise ConfigError(f"verification needs at least 1 step, not {steps}")
    if replays and steps < REPLAYED_STEPS:
        what = f"in {several(steps, 'step')} no graph is replayed with new tokens"
        why = f"{WARMUP} steps are launched, the next one is recorded, and those after it replayed"
        raise ConfigError(
            Mistake(what, (why,), (f"--steps {REPLAYED_STEPS}", "--cuda-graph-impl none"))
        )
    return steps


def _need_no_streams(delays: int | None, races: bool, where: str) -> None:
    mistakes = Mistakes()
    if delays is not None:
        mistakes.add(f"delays hold up streams, {where}", works=["--delays none"])
    if races:
        mistakes.add(f"races are between streams, {where}", works=["--no-races"])
    mistakes.raise_if_any()


def check_plant(layout: Layout, plant: str | None) -> None:
    """Check that an error can be planted in a layout.

    Raises:
        ConfigError: the error is unknown, or has no effect in this layout.
    """
    if plant is None:
        return
    fitting = tuple(name for name, known in PLANTS.items() if known.fits(layout))
    works = tuple(f"--plant {name}" for name in fitting) or ("--plant none",)
    if plant not in PLANTS:
        raise ConfigError(Mistake(f"there is no error {plant!r} to plant", works=works))
    if plant not in fitting:
        needs = PLANTS[plant].needs
        raise ConfigError(Mistake(f"{plant} needs {needs}", works=works))
